"""Runs that continue from what was changed, damaged or left unfinished since they stopped."""

import json
import os
import resource
import shutil
from copy import deepcopy
from pathlib import Path

import psutil
import pytest
import torch
from helpers.stops import copied_at_writes
from helpers.tiny_clip import tiny_clip
from helpers.tiny_data import make_tiny_data
from helpers.training_runs import config, is_the_same_run, killed_copy, log, losses, same_weights
from safetensors.torch import load_file, save_file

from debias_diffusion.errors import UserError
from debias_diffusion.files import sha256
from debias_diffusion.training import loop
from debias_diffusion.training.checkpoint import CHECKSUMS
from debias_diffusion.training.folder import RunFolder
from debias_diffusion.training.loop import train

STEPS = 6
NEWEST, OLDER = f"step-{STEPS:08}", f"step-{STEPS - 2:08}"


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    """The output folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("finished")
    train(config(world, output, max_steps=STEPS))
    return output


@pytest.fixture
def stopped(finished, tmp_path):
    """A run killed after the checkpoint of its last step."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "last")
    return tmp_path / "run"


@pytest.fixture
def stopped_earlier(finished, tmp_path):
    """A run killed in its last step, two after its newest checkpoint."""
    return killed_copy(finished, tmp_path / "run", STEPS)


def flip(file: Path, place: float) -> None:
    """Flips a bit at a share of the file's length."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


def sign(checkpoint: Path) -> None:
    """Writes the checksums of a checkpoint's files as they are."""
    names = [line.split()[1] for line in (checkpoint / CHECKSUMS).read_text().splitlines()]
    (checkpoint / CHECKSUMS).write_text("".join(f"{sha256(checkpoint / name)}  {name}\n" for name in names))


def continue_run(world, output, **settings):
    return train(config(world, output, **{"max_steps": STEPS} | settings))


# ---- at whatever moment it was killed


def test_a_run_killed_at_any_write_continues_bit_identically(world, tmp_path, monkeypatch):
    """About 30 moments: the settings are written, checkpoints, an old one is removed, the model is written."""
    settings = dict(max_steps=2, checkpoint_every=1, keep=1, validation=0)
    base = loop.load_base_model(config(world, tmp_path, **settings))
    monkeypatch.setattr(loop, "load_base_model", lambda _: deepcopy(base))  # loading it takes half of the time
    monkeypatch.setattr(loop._Training, "print_plan", lambda *_: None)
    with copied_at_writes(tmp_path / "run", tmp_path) as killed:
        train(config(world, tmp_path / "run", **settings))
    assert len(killed) > 20 and sum((run / "last").exists() for run in killed) < 10
    monkeypatch.setattr(psutil, "pid_exists", lambda _: False)  # the killed process is this one
    for run in killed:
        train(config(world, run, **settings))
        is_the_same_run(run, tmp_path / "run")
        assert {path.name for path in run.rglob(".*")} == {".lock"}, run.name


# ---- the same files under another path


def test_a_relative_path_and_an_absolute_one_are_the_same_setting(world, finished, stopped, monkeypatch):
    monkeypatch.chdir(Path(world[1]).parent)
    relative = [os.path.relpath(path) for path in world]
    assert continue_run(relative, stopped)
    is_the_same_run(stopped, finished)
    folder = RunFolder(stopped)
    with pytest.raises(UserError, match=r"other settings \(images: '.*' there, '.*elsewhere' here\)"):
        folder.check_settings(folder.settings() | {"images": relative[2] + "/elsewhere"})


# ---- another base model


def test_another_base_model_at_the_same_place_is_refused(world, finished, stopped_earlier, tmp_path):
    model = str(tmp_path / "base")
    shutil.copytree(world[0], model)
    folder = RunFolder(stopped_earlier)
    folder.claim(folder.settings() | {"model": model})
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
    stopped_at = max((tmp_path / "run" / "checkpoints").iterdir()).name
    before = (tmp_path / "run" / "settings.json").read_text()
    assert train(config(bad_world, tmp_path / "run", **settings | {"max_bad": 0.3})) is not None
    assert (tmp_path / "run" / "settings.json").read_text() == before
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
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(checkpoint)
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


# ---- damaged checkpoints


@pytest.mark.parametrize(
    ("name", "place"),
    [("model.safetensors", 0.5), ("optimizer.safetensors", 0.9), ("state.json", 0.4), ("SHA256SUMS", 0.1)],
)
def test_a_checkpoint_with_a_flipped_bit_is_named_and_the_older_one_offered(world, finished, stopped, name, place):
    flip(stopped / "checkpoints" / NEWEST / name, place)
    named = "model.safetensors" if name == "SHA256SUMS" else name
    with pytest.raises(UserError, match=rf"{NEWEST}' cannot be used: {named} and its checksum .*continue from {OLDER}"):
        continue_run(world, stopped)
    shutil.rmtree(stopped / "checkpoints" / NEWEST)
    continue_run(world, stopped)
    is_the_same_run(stopped, finished)


def test_the_only_checkpoint_damaged_means_to_begin_anew(world, finished, stopped_earlier):
    (stopped_earlier / "checkpoints" / OLDER / "SHA256SUMS").write_bytes(b"\xff")
    with pytest.raises(UserError, match="Remove that folder, and the same command will begin anew"):
        continue_run(world, stopped_earlier)
    shutil.rmtree(stopped_earlier / "checkpoints" / OLDER)
    continue_run(world, stopped_earlier)
    is_the_same_run(stopped_earlier, finished)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: {name: state[name] for name in state if name != "ln_final.bias/exp_avg"}, "exp_avg' is missing"),
        (lambda state: state | {"ln_final.bias/exp_avg": torch.zeros(3)}, "has the shape"),
        (lambda state: state | {"x/step": torch.tensor(1.0)}, "the optimizer has no 'x/step'"),
        (b"cut short", "header"),
        ("{}", "state.json is that of step 0"),
        ('{"step": 4}', "state.json is that of step 4"),
        ('{"step": 6, "best_r1": null}', "other values than numbers"),
        ("[1]", "must be a mapping"),
        ('{"step": 6, "x": 1}', "unexpected keyword argument"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_checkpoints_signed_after_the_damage_are_named(world, stopped, damage, message):
    newest = stopped / "checkpoints" / NEWEST
    if isinstance(damage, bytes):
        (newest / "model.safetensors").write_bytes(damage)
    elif isinstance(damage, str):
        (newest / "state.json").write_text(damage)
    else:
        optimizer = load_file(newest / "optimizer.safetensors")
        save_file(damage(optimizer), newest / "optimizer.safetensors")
    sign(newest)
    with pytest.raises(UserError, match=f"{NEWEST}' cannot be used: .*{message}.*continue from {OLDER}"):
        continue_run(world, stopped)


def test_a_lost_scaler_of_fp16_is_named(world, tmp_path):
    settings = dict(max_steps=2, precision="fp16", validation=0)
    train(config(world, tmp_path, **settings))
    newest = tmp_path / "checkpoints" / "step-00000002"
    file = newest / "optimizer.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "scale" not in name}, file)
    sign(newest)
    with pytest.raises(UserError, match="the optimizer's 'scaler/.*' is missing"):
        train(config(world, tmp_path, **settings))


def test_damaged_image_features_are_named_and_computed_anew(world, tmp_path):
    settings = dict(max_steps=2, freeze_image_tower=True, feature_cache=str(tmp_path / "cache"))
    train(config(world, tmp_path / "first", **settings))
    (features,) = (tmp_path / "cache").rglob("features-0000")
    for row in range(24):  # whichever comes first
        flip(features, (row + 0.5) / 24)
    with pytest.raises(UserError, match="features-0000' are damaged: row .* Remove that file and 'stamps-0000'"):
        train(config(world, tmp_path / "second", **settings))
    with pytest.raises(UserError, match="are damaged") as raised:
        train(config(world, tmp_path / "second", workers=1, **settings))
    assert "Traceback" not in str(raised.value)
    features.unlink()
    features.with_name("stamps-0000").unlink()
    train(config(world, tmp_path / "second", **settings))
    assert same_weights(tmp_path / "first", tmp_path / "second")
    # Without the stamp of an image its features are not found, and are computed again, in a batch of its own.
    flip(features.with_name("stamps-0000"), 0.5)
    train(config(world, tmp_path / "third", **settings))
    assert features.stat().st_size == 25 * 24 * 4
    assert losses(tmp_path / "third") == pytest.approx(losses(tmp_path / "first"), rel=1e-4)


# ---- other files of a run


def test_damaged_and_changed_settings_are_named(world, stopped_earlier):
    file = stopped_earlier / "settings.json"
    changed = file.read_bytes().replace(b'"validation": 6', b'"validation": 5')
    damaged = (b"{", b"\xff\xfe", b"[]", b"null", b"{}", b"[" * 100_000)
    for content in (*damaged, changed):
        assert content != file.read_bytes()
        file.write_bytes(content)
        problem = ".*it and its checksum do not agree" if content in (b"{}", changed) else ""
        with pytest.raises(UserError, match=f"json', the settings of the run, cannot be read: {problem}.*Put a copy"):
            continue_run(world, stopped_earlier)
        assert file.read_bytes() == content


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


def test_what_a_killed_checkpoint_left_is_removed(world, finished, stopped_earlier):
    unfinished = stopped_earlier / "checkpoints" / ".step-00000005.tmp"
    shutil.copytree(stopped_earlier / "checkpoints" / OLDER, unfinished)
    shutil.copytree(unfinished, stopped_earlier / ".best.tmp")
    (stopped_earlier / "checkpoints" / OLDER).rename(stopped_earlier / "checkpoints" / f".{OLDER}.old")
    continue_run(world, stopped_earlier)
    hidden = [path.name for path in stopped_earlier.rglob(".*") if path.name != ".lock"]
    assert hidden == []
    is_the_same_run(stopped_earlier, finished)


@pytest.mark.parametrize("share", [0.5, 1.5])  # of the model's file, which the optimizer's is larger than
def test_a_limit_on_the_size_of_files_loses_nothing(world, finished, stopped_earlier, share):
    largest = (stopped_earlier / "checkpoints" / OLDER / "model.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest * share), before[1]))
    try:
        with pytest.raises(UserError, match=r"larger than allowed .*\(`ulimit -f unlimited`\)"):
            continue_run(world, stopped_earlier)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (stopped_earlier / "checkpoints").iterdir()] == [OLDER]
    continue_run(world, stopped_earlier)
    assert same_weights(stopped_earlier, finished)
