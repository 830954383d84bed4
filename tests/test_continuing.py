"""Runs that continue from what was changed, damaged or left unfinished since they stopped."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.tiny_clip import tiny_clip
from helpers.tiny_data import make_tiny_data
from helpers.training_runs import config, is_the_same_run, killed_copy, log, same_weights

from debias_diffusion.errors import UserError
from debias_diffusion.training.loop import train

STEPS = 6


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    """The output folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("finished")
    train(config(world, output, max_steps=STEPS))
    return output


@pytest.fixture
def stopped_earlier(finished, tmp_path):
    """A run killed in its last step, two after its newest checkpoint."""
    return killed_copy(finished, tmp_path / "run", STEPS)


def flip(file: Path, place: float) -> None:
    """Flips a bit at a share of the file's length."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


def continue_run(world, output, **settings):
    return train(config(world, output, **{"max_steps": STEPS} | settings))


# ---- another base model


def test_another_base_model_at_the_same_place_is_refused(world, finished, stopped_earlier, tmp_path):
    model = str(tmp_path / "base")
    shutil.copytree(world[0], model)
    tiny_clip(seed=1).save(model)
    with pytest.raises(UserError, match="The base model is another one, by its contents"):
        continue_run((model, *world[1:]), stopped_earlier)
    # Other preprocessing is another base model too.
    shutil.rmtree(model)
    shutil.copytree(world[0], model)
    file = Path(model, "open_clip_config.json")
    before = file.read_text()
    changed = json.loads(before)
    changed["preprocess_cfg"] = changed.get("preprocess_cfg", {}) | {"mean": [0.1, 0.2, 0.3]}
    file.write_text(json.dumps(changed))
    with pytest.raises(UserError, match="The base model is another one, by its contents"):
        continue_run((model, *world[1:]), stopped_earlier)
    file.write_text(before)
    continue_run((model, *world[1:]), stopped_earlier)
    is_the_same_run(stopped_earlier, finished)


# ---- bad records


@pytest.fixture
def bad_world(world, tmp_path):
    """(base model, data file, image folder) with five of 40 images unreadable and one missing, none of them held out"""
    data, images = make_tiny_data(tmp_path / "world", count=40)
    for bad in (10, 15, 20, 25, 30):
        Path(images, f"{bad}.png").write_text("not an image")
    Path(images, "35.png").unlink()
    return world[0], data, images


def test_a_run_stopped_by_max_bad_continues_with_a_larger_one(bad_world, tmp_path):
    settings = dict(max_steps=12, max_bad=0.1, batch=8)
    with pytest.raises(UserError, match=r"share of 0.1 that --max-bad .* with a larger --max-bad: the run continues"):
        train(config(bad_world, tmp_path / "run", **settings))
    stopped_at = max((tmp_path / "run").glob("checkpoint*")).name
    before = (tmp_path / "run" / "job.json").read_text()
    assert train(config(bad_world, tmp_path / "run", **settings | {"max_bad": 0.3})) is not None
    assert (tmp_path / "run" / "job.json").read_text() == before
    steps = [line["step"] for line in log(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 13)) and int(stopped_at[-8:]) < 12
    # With that limit it may stop and continue again, and is bound by no other setting less.
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="seed: 0 there, 1 here"):
        train(config(bad_world, tmp_path / "run", **settings | {"seed": 1}))


def test_a_bad_record_is_named_once_however_often_a_run_continues(bad_world, tmp_path):
    settings = dict(max_steps=12, max_bad=0.3, checkpoint_every=4, keep=9)
    train(config(bad_world, tmp_path / "alone", **settings))
    shutil.copytree(tmp_path / "alone", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "last")
    for checkpoint in sorted((tmp_path / "run").glob("checkpoint*"))[1:]:
        checkpoint.unlink()
    with open(tmp_path / "run" / "bad-records.jsonl", "a") as file:
        file.write('{"where": "1')  # a kill
    train(config(bad_world, tmp_path / "run", **settings))
    alone, run = ((tmp_path / name / "bad-records.jsonl").read_text().splitlines() for name in ("alone", "run"))
    kinds = {record["where"]: record["kind"] for record in map(json.loads, alone)}
    assert len(alone) == len(kinds) == 6
    assert (kinds["10.png"], kinds["35.png"]) == ("unreadable image", "missing image")
    assert run == [*alone, '{"where": "1'] or sorted(run) == sorted([*alone, '{"where": "1'])
    assert same_weights(tmp_path / "run", tmp_path / "alone")


def test_a_workers_error_is_reported_without_its_traceback(bad_world, tmp_path):
    for index in range(6, 40):
        Path(bad_world[2], f"{index}.png").write_text("not an image")
    for index in (6, 16, 26, 36):  # `look_for_images` finds all
        assert Path(bad_world[2], f"{index}.png").exists()
    with pytest.raises(UserError) as raised:
        train(config(bad_world, tmp_path / "run", workers=1, max_bad=0.2))
    assert "Traceback" not in str(raised.value) and "cannot be read from" in str(raised.value)


# ---- other files of a run


def test_damaged_lines_of_the_logs_are_left_out_and_the_others_kept(world, finished, stopped_earlier):
    file = stopped_earlier / "log.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = [
        b"\xff\xfe\x00\n",
        b'{"loss": 1}\n',
        b"[]}\n",
        b'{"step": "1"}\n',
        b"{" * 100_000 + b"}\n",
        b'{"step": 1',
    ]
    file.write_bytes(b"".join([lines[0], *damaged[:-1], *lines[1:], damaged[-1]]))
    (stopped_earlier / "not-finite.jsonl").write_bytes(b"\x80}\n")
    continue_run(world, stopped_earlier)
    is_the_same_run(stopped_earlier, finished)
    assert (stopped_earlier / "not-finite.jsonl").read_bytes() == b""
