"""Folders of stopped runs that a disk, a copy or a person has damaged: the same end, or a refusal that says why."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import rounds
from helpers import tiny_sdxl
from helpers.processes import as_options
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_data import make_tiny_data
from processes import PATIENCE, files, finish, start
from safetensors.torch import load_file


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def garbage(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice((b"{}", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", rng.randbytes(100))))


def folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGES = (flip, flip, flip, cut, empty, garbage, folder, remove)


def damaged_copy(stopped: Path, to: Path, rng: random.Random) -> str:
    """A copy of a folder with one file damaged, and in words which and how."""
    shutil.copytree(stopped, to)
    paths = [path for path in sorted(to.rglob("*")) if path.is_file() and path.name != ".lock"]
    path, damage = rng.choice(paths), rng.choice(DAMAGES)
    damage(path, rng)
    return f"{damage.__name__} {path.relative_to(to)}"


def run_again(arguments: list[str], screen: Path, told: str) -> bool:
    """Whether the command came to its end; otherwise it refused in words."""
    process = start(arguments, screen)
    process.join(PATIENCE)
    said = screen.read_text()
    assert "Traceback" not in said, f"{told}\n{said[-3000:]}"
    assert process.exitcode in (0, 2), f"{told}: {process.exitcode}\n{said[-3000:]}"
    assert process.exitcode == 0 or "error: " in said
    return process.exitcode == 0


def search(tmp_path: Path, arguments: Callable[[Path], list], check: Callable[[Path, str], None]) -> None:
    """Runs the command again in copies of the folder `stopped`; `check` gets each in which it came to its end."""
    ended = {True: 0, False: 0}
    for number in rounds(seconds=15):
        output = tmp_path / f"damaged-{number}"
        told = f"round {number}: {damaged_copy(tmp_path / 'stopped', output, random.Random(number))}"
        came_to_end = run_again(arguments(output), tmp_path / f"{number}.txt", told)
        if came_to_end:
            check(output, told)
        ended[came_to_end] += 1
    print(f"{ended[True]} ended, {ended[False]} refused")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_damaged_run_ends_with_the_same_weights_or_is_refused(frozen, tmp_path):
    base = save_tiny_clip(tmp_path / "base")
    data, images = make_tiny_data(tmp_path)
    settings = dict(model=base, data=data, images=images, validation=6, batch=8, components=3, epochs=9, max_steps=6)
    settings |= dict(eval_every=3, checkpoint_every=2, learning_rate=1e-3, log_every=1, workers=0)
    if frozen:
        settings |= dict(freeze_image_tower=True, feature_cache="features")

    def arguments(output):
        own = {name: output / value if name == "feature_cache" else value for name, value in settings.items()}
        return ["train", f"--output={output / 'run'}", *as_options(own)]

    def weights(output):
        return load_file(output / "run" / "last" / "open_clip_model.safetensors")

    stopped = tmp_path / "stopped"
    finish(arguments(stopped), tmp_path / "stopped.txt")
    expected = weights(stopped)
    shutil.rmtree(stopped / "run" / "last")
    (stopped / "run" / "checkpoint-00000006").unlink()

    def check(output, told):
        # Images whose features are gone are encoded again, in another batch, which rounds otherwise.
        rounding = 1e-2 if "features/" in told else 0
        apart = [(tensor - expected[name]).abs().max() for name, tensor in weights(output).items()]
        assert max(apart) <= rounding, told

    search(tmp_path, arguments, check)


def test_a_damaged_folder_of_pictures_is_filled_alike_or_refused(tmp_path):
    prompts, base = tmp_path / "prompts.txt", tiny_sdxl.build_tiny_sdxl(tmp_path / "sdxl")
    prompts.write_text("A red cat.\nA blue dog.\n\xff\n", encoding="latin-1")

    def arguments(output):
        return ["generate", f"--prompts={prompts}", f"--base={base}", f"--output={output}", "--steps=1"]

    finish(arguments(tmp_path / "stopped"), tmp_path / "stopped.txt")
    expected = files(tmp_path / "stopped")

    def check(output, told):
        assert files(output) == expected, told

    search(tmp_path, arguments, check)
