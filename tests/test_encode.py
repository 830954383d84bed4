"""`encode`: captions of a training set as embeddings, in the files of kohya's scripts and of diffusers' loops."""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from debias_diffusion.app.encode import INDEX, _digest_in, encode_captions
from debias_diffusion.app.prompt_options import EncodeConfig
from debias_diffusion.errors import UserError
from debias_diffusion.files import folder_lock
from debias_diffusion.pipelines.rendering.checkpoints import DENOISER
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.shipped import shipped

SHORT, LONG = "A red star above a blue ring.", caption("test", 2).text
TEXTS = {"a.png": SHORT, "b/c.d.jpg": LONG}
SUFFIX = "_te_outputs.npz"


def put(folder: Path, texts: dict[str, str], ending: str = ".txt") -> Path:
    for image, text in texts.items():
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / image)
        if text:
            (folder / image).with_suffix(ending).write_text(text)
    return folder


def run(folder: Path, to: str = "kohya", base: str = "toy/sdxl", **options) -> Path:
    options = {"output": str(folder / "out")} | options if to == "diffusers" else options
    return encode_captions(EncodeConfig(captions=str(folder), base=base, to=to, device="cpu", **options))


def written(folder: Path, pattern: str = f"**/*{SUFFIX}") -> dict[str, tuple[int, int]]:
    """{file: what changes when it is written}"""
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.glob(pattern)}


def index_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / INDEX).read_text().splitlines()]


def loaded_by_kohya(image: Path) -> list[np.ndarray]:
    """As `SdxlTextEncoderOutputsCachingStrategy` loads them."""
    content = np.load(os.path.splitext(image)[0] + "_te_outputs.npz")  # no pickle is read
    return [content[name] for name in ("hidden_state1", "hidden_state2", "pool2")]


@cache
def pipe_with(encoder):
    return load_pipeline("toy/sdxl", encoder, torch.device("cpu"), without=DENOISER)


@pytest.mark.parametrize(
    ("reading", "positions", "encoder"),
    [("kohya", 152, None), ("cut", 77, None), ("overlap", 302, "toy/debias-clip"), ("a1111", 231, None)],
)
def test_kohya_loads_what_pipelines_read(tmp_path, reading, positions, encoder):
    put(tmp_path, TEXTS, ".caption")
    run(tmp_path, reading=reading, positions=None if reading == "cut" else positions, encoder=encoder)
    pipe = pipe_with(encoder).set_long_prompt(reading=reading, positions=positions)
    for image, text in TEXTS.items():
        embeds, _, pooled, _ = pipe.encode_prompt(text, do_classifier_free_guidance=False)
        first, second, pool = arrays = loaded_by_kohya(tmp_path / image)
        assert {array.dtype for array in arrays} == {np.dtype("float32")}
        assert first.shape == (positions, pipe.text_encoder.config.hidden_size) and pool.ndim == 1
        assert np.array_equal(np.concatenate([first, second], -1), embeds[0].detach())
        assert np.array_equal(pool, pooled[0].detach())


def test_a_trainer_of_diffusers_finds_all_captions_of_an_image(tmp_path, capsys):
    put(tmp_path, dict.fromkeys(("a.png", "b.png"), ""))
    rows = [("a.png", SHORT), ("a.png", LONG), ("b.png", SHORT), ("gone.png", SHORT), ("../a.png", SHORT)]
    lines = (json.dumps({"file_name": name, "text": text}) for name, text in rows)
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    output = run(tmp_path, "diffusers", dtype="fp16", max_bad=0.5)
    index = index_of(output)
    assert [(row["image"], row["caption"]) for row in index] == rows[:3]
    assert index[0]["file"] == index[2]["file"] != index[1]["file"]
    pipe = pipe_with(None).set_long_prompt(positions=227)
    for row in index:
        embeds, _, pooled, _ = pipe.encode_prompt(row["caption"], do_classifier_free_guidance=False)
        tensors = load_file(output / row["file"])
        assert torch.equal(tensors["prompt_embeds"], embeds[0].half())
        assert torch.equal(tensors["pooled_prompt_embeds"], pooled[0].half())
    assert "2 bad records (2 no such image)" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["kohya", "diffusers"])
def test_only_what_differs_is_made_again(tmp_path, to):
    put(tmp_path, TEXTS)
    pattern = f"**/*{SUFFIX}" if to == "kohya" else "out/*.safetensors"
    run(tmp_path, to)
    before = written(tmp_path, pattern)
    (tmp_path / "a.txt").write_text(f"{SHORT} {SHORT}")
    run(tmp_path, to)
    after = written(tmp_path, pattern)
    kept = {name for name, _ in before.items() & after.items()}
    assert kept == before.keys() - ({f"a{SUFFIX}"} if to == "kohya" else set()) and len(before) == 2
    options = {}  # from run to run one of them is another
    for change in ({"reading": "separate"}, {"positions": 302}, {"encoder": "toy/debias-clip"}, {"dtype": "fp16"}):
        run(tmp_path, to, **(options := options | change))
        last = written(tmp_path, pattern)
        current = last.keys() if to == "kohya" else {row["file"] for row in index_of(tmp_path / "out")}
        assert not {name for name in current if last[name] == after.get(name)}, options
        after = last


def test_files_of_others_stay_unless_they_may_be_replaced(tmp_path):
    put(tmp_path, {"a.png": SHORT})
    (tmp_path / "out").mkdir()
    foreign = {"kohya": tmp_path / f"a{SUFFIX}", "diffusers": tmp_path / "out" / INDEX}
    np.savez(foreign["kohya"], hidden_state1=np.zeros((77, 768)))
    foreign["diffusers"].write_text('{"image": "a.png"}\n')
    for to, path in foreign.items():
        before = path.read_bytes()
        with pytest.raises(UserError, match="1 files in .* are not of this command: .*--overwrite"):
            run(tmp_path, to)
        assert path.read_bytes() == before
        run(tmp_path, to, overwrite=True)
        assert path.read_bytes() != before
        run(tmp_path, to)


def test_an_old_file_of_a_caption_that_is_left_out_is_removed(tmp_path, capsys):
    """kohya's scripts would train the image on a caption that is gone. What others wrote is never removed."""
    put(tmp_path, {f"{name}.png": SHORT for name in "abcd"})
    run(tmp_path)
    np.savez(tmp_path / f"d{SUFFIX}", hidden_state1=np.zeros((77, 768)))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    for name in "bd":
        (tmp_path / f"{name}.txt").unlink()
    with pytest.raises(UserError, match=f"1 files in .* are not of this command: d{SUFFIX}"):
        run(tmp_path, max_bad=1, overwrite=True)
    assert len(written(tmp_path)) == 4
    (tmp_path / f"d{SUFFIX}").rename(tmp_path / "mine.npz")
    run(tmp_path, max_bad=1)
    assert written(tmp_path).keys() == {f"c{SUFFIX}"} and (tmp_path / "mine.npz").exists()
    assert f"left out: a{SUFFIX}, b{SUFFIX}\n" in capsys.readouterr().out
    put(tmp_path, {"b.png": SHORT})
    (tmp_path / "metadata.jsonl").write_text(metadata("b.png"))
    run(tmp_path)
    assert written(tmp_path).keys() == {f"b{SUFFIX}"}


@pytest.mark.parametrize("to", ["kohya", "diffusers"])
def test_a_damaged_file_does_not_count_as_finished(tmp_path, to):
    put(tmp_path, {"a.png": SHORT})
    run(tmp_path, to)
    [path] = tmp_path.rglob("*.npz" if to == "kohya" else "*.safetensors")
    content, random, digest = path.read_bytes(), np.random.default_rng(0), _digest_in(path)
    for at in random.integers(len(content), size=20).tolist():
        flipped = bytes([content[at] ^ 1 << int(random.integers(8))])
        for damaged in (content[:at], content[:at] + flipped + content[at + 1 :]):
            path.write_bytes(damaged)
            assert _digest_in(path) in (None, "") and digest
    run(tmp_path, to, overwrite=True)
    assert path.read_bytes() == content


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize(("to", "name"), [("kohya", f"a{SUFFIX}"), ("diffusers", INDEX), ("diffusers", None)])
def test_a_fifo_and_another_process_are_told(tmp_path, to, name):
    put(tmp_path, {"a.png": SHORT})
    output = run(tmp_path, to)
    path = output / (name or index_of(output)[0]["file"])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=f"1 files .* are not of this command: {path.name}"):
        run(tmp_path, to)
    with folder_lock(output), pytest.raises(UserError, match="Another process works in"):
        run(tmp_path, to, overwrite=True)


def test_the_last_lines_say_what_the_trainer_needs(tmp_path, capsys):
    put(tmp_path, {"a.png": SHORT})
    for options, says in (({}, False), ({"positions": 152}, True)):
        run(tmp_path, **options)
        printed = capsys.readouterr().out
        assert "--cache_text_encoder_outputs_to_disk --network_train_unet_only" in printed
        assert ("Encode as your users will draw" in printed) is says


def metadata(*names: str) -> str:
    return "".join(json.dumps({"file_name": name, "text": f"{SHORT} {at}"}) + "\n" for at, name in enumerate(names))


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"a.caption": SHORT}, {}, ": a.caption and a.txt"),
        ({"metadata.jsonl": metadata("a.png", "a.png")}, {}, ": a.png and a.png"),
        (dict.fromkeys(("a.txt", "b/c.d.txt"), "a [cat|dog]"), {"reading": "a1111"}, r"2 bad .*\[cat\|dog\]"),
        ({"c.txt": SHORT, "d.png": ""}, {}, "2 of 4 records cannot be used.* --max-bad"),
        ({}, {"positions": 152}, "1 of 2 captions do not fit 152 positions: b/c.d.jpg. Give --positions 227"),
        ({}, {"to": "diffusers", "output": None}, "needs --output"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused_by_name(tmp_path, files, options, message):
    put(tmp_path, TEXTS)
    for name, content in files.items():
        if content:
            (tmp_path / name).write_text(content)
        else:
            Image.new("RGB", (8, 8)).save(tmp_path / name)
    with pytest.raises(UserError, match=message):
        run(tmp_path, **options)
    assert not written(tmp_path)


def test_longer_captions_are_read_where_positions_say_so_and_cut_ones_are_named(tmp_path, capsys):
    put(tmp_path, TEXTS | {"a.png": LONG * 2})
    run(tmp_path, positions=377)
    assert {len(loaded_by_kohya(tmp_path / image)[0]) for image in TEXTS} == {377}
    run(tmp_path, reading="kohya")
    assert "Cut at 227 positions, as the reading says: 1 captions: a.png" in capsys.readouterr().out


def test_embeddings_that_are_not_finite_are_refused(tmp_path, copy_of):
    """What float32 holds may overflow in half precision."""
    base = copy_of(Path(shipped("toy/sdxl")), tmp_path / "sdxl")
    state = load_file(file := base / "text_encoder" / "model.safetensors")
    for name in (name for name in state if name.endswith("_embedding.weight")):
        state[name][:, 0] += 6e4  # of a token and its position together, more than half precision holds
    save_file(state, file, {"format": "pt"})
    put(tmp_path / "photos", {"a.png": SHORT})
    with pytest.raises(UserError, match="'a.png' are not finite"):
        run(tmp_path / "photos", base=str(base), dtype="fp16")
    assert not written(tmp_path)
    run(tmp_path / "photos", base=str(base))
