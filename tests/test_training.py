"""What a training run leaves, what it refuses, and that it continues as if nothing had happened."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import open_clip
import pytest
import torch
from helpers.ranks import forked
from helpers.tiny_clip import CONFIG, registered, tiny_clip
from helpers.tiny_data import make_tiny_data
from helpers.training_runs import (
    STEPS,
    checkpoint,
    config,
    is_the_same_run,
    killed_copy,
    lines_of,
    log,
    losses,
    recalls,
    same_weights,
    saved,
    settings_of,
)
from PIL import Image

from debias_diffusion.app.options import AlignConfig
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.errors import OutOfMemory, UserError
from debias_diffusion.training import loop, progress, two_tower
from debias_diffusion.training.optimizer import AdamW
from debias_diffusion.training.progress import Moment, Pace, Step, pace
from debias_diffusion.training.two_tower import prepare_backbone, train

CPU = torch.device("cpu")


def world_with(world, folder, **changes):
    """(base model, data file, image folder), with other data."""
    return world[0], *make_tiny_data(folder / "world", **changes)


def test_a_run_leaves_what_it_says_and_learns(world, finished_run):
    steps = [line for line in log(finished_run) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert {"loss", "short", "long", "logit_scale", "learning_rate", "epoch", "samples_per_second"} <= steps[0].keys()
    assert sum(losses(finished_run)[-2:]) < sum(losses(finished_run)[:2])
    assert [line["step"] for line in recalls(finished_run)] == [0, 3, 6, 7]
    assert sorted(finished_run.glob("checkpoint*")) == [finished_run / f"checkpoint-0000000{step}" for step in (6, 7)]
    assert json.loads((finished_run / "last" / "scores.json").read_text()) == {"step": 7}
    assert not (finished_run / "best").exists()
    assert settings_of(finished_run)["precision"] == "fp32"  # auto, on a CPU
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{finished_run / 'last'}")
    image = Image.new("RGB", (50, 40), (255, 0, 0))
    assert model.context_length == 248 and torch.equal(load_backbone(world[0]).preprocess(image), transform(image))


def test_the_best_is_chosen_on_pairs_that_are_neither_trained_on_nor_held_out(world, tmp_path, capsys):
    settings = dict(learning_rate=3e-2, eval_every=2)
    run = tmp_path / "run"
    assert train(config(world, run, keep_best=5, **settings)) == run / "last"  # the result, whichever is the best
    assert "6 held out; 5 more choose the best model" in capsys.readouterr().out
    train(config(world, tmp_path / "held-out", validation=11, **settings))
    assert same_weights(run, tmp_path / "held-out")
    chosen = {line["step"]: line for line in log(run) if "choosing_t2i_r1" in line}
    assert chosen.keys() == {0, 2, 4, 6, 7} == {line["step"] for line in recalls(run)}
    means = {step: (line["choosing_t2i_r1"] + line["choosing_i2t_r1"]) / 2 for step, line in chosen.items()}
    best = json.loads((run / "best" / "scores.json").read_text())
    assert best == chosen[max((2, 4, 6, 7), key=lambda step: (means[step], -step))]
    assert best["step"] < 7 and best["choosing_pairs"] == 5  # else nothing shows that the last one is the result
    weights = load_two_tower(run).model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved(run, "last").items())


def test_the_best_is_the_first_of_equals_and_never_the_base(world, tmp_path):
    # With steps of nothing all measurements are equal, the base's too.
    train(config(world, tmp_path, learning_rate=1e-30, weight_decay=0, initial_scale=None, keep_best=5))
    assert len({line["choosing_t2i_r1"] for line in log(tmp_path) if "choosing_t2i_r1" in line}) == 1
    assert json.loads((tmp_path / "best" / "scores.json").read_text())["step"] == 3


def test_the_recipe_says_what_weight_decay_acts_on(world, finished_run, tmp_path, capsys):
    train(config(world, tmp_path, component_parts=4, decay="all", batch=16, components=1, max_steps=1))
    assert "1 components of each of 4 parts, eot pooling, weight decay on all parameters" in capsys.readouterr().out
    runs = ((tmp_path, 1), (finished_run, STEPS))
    groups = [checkpoint(*run)["optimizer"]["adamw"]["param_groups"] for run in runs]
    assert [sorted(group["weight_decay"] for group in of_run) for of_run in groups] == [[0.1], [0.0, 0.1]]


CONTINUED = {  # what a checkpoint holds, and what a run draws
    "averages": dict(precision="bf16", max_steps=4),
    "scale of gradients": dict(precision="fp16", max_steps=16),  # skips some steps first, until it is found
    "modules and views": dict(recipe="fix-clip", components=None, groups=1, prompts=3, max_steps=4),
}


@pytest.mark.parametrize("case", CONTINUED)
def test_a_killed_run_continues_bit_for_bit(world, finished_run, tmp_path, case):
    """With compiled towers: test_compiled_training."""
    settings, whole, again = CONTINUED[case], tmp_path / "whole", tmp_path / "again"
    train(config(world, whole, **settings))
    if "precision" in settings:
        half = losses(whole)
        assert half[0] == pytest.approx(losses(finished_run)[0], rel=0.05) and half[-1] < 0.7 * half[0]
    train(config(world, killed_copy(whole, again, settings["max_steps"]), **settings, workers=2))
    is_the_same_run(again, whole)


# ---- what a run takes


def test_too_little_memory_names_a_chunk_with_which_the_run_continues(world, finished_run, tmp_path, monkeypatch):
    killed = killed_copy(finished_run, tmp_path / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(two_tower, "backward", Mock(side_effect=torch.OutOfMemoryError("Tried to allocate 2.00 GiB")))
        for output, chunk, message in (
            (tmp_path / "new", None, r"2\.00 GiB.* GB of weights.* of 8 pairs.* --chunk 4"),
            (tmp_path / "one", 1, "--checkpoint-activations"),
            (killed, 3, "--chunk 1,"),
        ):
            with pytest.raises(OutOfMemory, match=message):
                train(config(world, output, chunk=chunk))
    for output in (killed, tmp_path / "new"):
        train(config(world, output))
        is_the_same_run(output, finished_run)


def test_the_plan_counts_what_is_frozen_and_the_checkpoints_that_are_kept(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "GB", 1.0)  # bytes, of so small a model
    train(config(world, tmp_path / "run", freeze_image_tower=True, max_steps=1, keep=3))
    printed, content = capsys.readouterr().out, checkpoint(tmp_path / "run", 1)
    memory, disk = (float(re.search(rf"{name} +([\d.]+) GB", printed)[1]) for name in ("memory", "disk"))
    weights = sum(tensor.nbytes for tensor in content["model"].values())
    trained = sum(averages["exp_avg"].nbytes for averages in content["optimizer"]["adamw"]["state"].values())
    assert 0 < trained < 0.9 * weights and memory == pytest.approx(weights + 3 * trained, rel=0.01)
    assert disk == pytest.approx(4 * (weights + 2 * trained) + weights, rel=0.01)


def test_the_pace_is_of_the_steps_since_the_last_line_without_the_first_of_all():
    noted, now = [], 0.0
    run = Pace(20, 8, CPU, noted.append)
    run._previous._seconds = now
    for number, (waited, worked) in enumerate([(5, 4), (0.5, 1.5), (1, 3), (0, 1)], 1):
        begun, made = Moment(CPU), Moment(CPU)
        begun._seconds, made._seconds = now + waited, (now := now + waited + worked)
        run.add(Step(number, 0.1, None, [], torch.zeros(0), begun, made))
    assert [step.took["seconds"].get("left") for step in noted] == [None, None, 51.0]
    assert noted[2].took["seconds"] == {"step": 3.0, "waiting": 0.75, "left": 51.0}
    assert "2.7 pairs a second, 25% of the time waiting for data; 51 s to the end" in noted[2].words


def test_a_step_is_given_before_the_one_before_it_is_waited_for(world, tmp_path, monkeypatch):
    order, update, wait = [], AdamW.step, Moment.wait
    monkeypatch.setattr(AdamW, "step", lambda *step: order.append("given") or update(*step))
    monkeypatch.setattr(Moment, "wait", lambda self: order.append("awaited") or wait(self))
    train(config(world, tmp_path / "run", max_steps=8, eval_every=5, checkpoint_every=5, log_every=2))
    one, last = ["given", "awaited"], ["given", "awaited", "awaited"]  # the last before something is measured and saved
    assert order == ["given", *one * 3, *last, "given", *one, *last]
    assert [line["step"] for line in log(tmp_path / "run")] == [0, 2, 3, 4, 5, 6, 8, 8]


# ---- steps that go wrong


@pytest.fixture
def poison(monkeypatch):
    """Makes one word's embedding NaN before training, as a step that went wrong: no base model comes so."""

    def poison(word):
        def prepare_poisoned(*arguments):
            backbone, method = prepare_backbone(*arguments)
            (token,) = backbone.tokenizer.text_ids([word])[0]
            with torch.no_grad():
                backbone.model.token_embedding.weight[token] = torch.nan
            return backbone, method

        monkeypatch.setattr(two_tower, "prepare_backbone", prepare_poisoned)

    return poison


def test_a_step_that_is_not_finite_is_left_out_and_its_samples_named_by_two_processes_too(world, tmp_path, poison):
    """With a frozen image tower and a broken image."""
    poison("dragon")
    world = world_with(world, tmp_path, broken=[7], captions={15: "A red cat. It is a dragon. It is flat."})
    settings = dict(freeze_image_tower=True, max_bad=0.1, max_steps=9, eval_every=9)
    alone, shared = tmp_path / "alone" / "run", tmp_path / "shared" / "run"  # each with a feature cache beside it
    train(config(world, alone, **settings))
    named = lines_of(alone / "not-finite.jsonl")
    assert all("15.png" in line["samples"] and len(line["samples"]) == 8 for line in named)
    skipped = {line["step"] for line in named}
    assert len(skipped) > 2 and {line["step"] for line in log(alone) if "loss" in line} == {*range(1, 10)} - skipped
    before, after = load_backbone(world[0]).model.state_dict(), saved(alone, "last")
    wrong = {name for name, tensor in after.items() if not tensor.isfinite().all()}
    assert wrong == {"token_embedding.weight"} and not torch.equal(after["ln_final.weight"], before["ln_final.weight"])

    forked(2, lambda _: str(train(config(world, shared, **settings))))
    for name in ("not-finite.jsonl", "bad-records.jsonl"):
        assert {*map(str, lines_of(shared / name))} == {*map(str, lines_of(alone / name))} != set()
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-3)
    assert len(list((tmp_path / "shared" / "image-features").rglob("*.safetensors"))) == 1


def test_three_such_steps_in_a_row_stop_the_run(world, tmp_path, poison):
    poison("number")  # in every caption
    for _ in range(2):  # started again it counts on from its checkpoint, and names each step once
        with pytest.raises(UserError, match=r"loss of step 3 is not finite.*like the 2 before it.*not-finite.jsonl"):
            train(config(world, tmp_path / "run", validation=0, eval_every=9))
        assert len(lines_of(tmp_path / "run" / "not-finite.jsonl")) == 3


@pytest.mark.parametrize("step", [3, STEPS])
def test_a_run_that_is_asked_to_stop_saves_its_step_and_one_in_its_last_step_ends(
    world, finished_run, tmp_path, monkeypatch, step
):
    backward, begun = two_tower.backward, []

    def asked(*given, **options):
        begun.append(1)
        if len(begun) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(*given, **options)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(two_tower, "backward", asked)
        assert train(config(world, run)) == (run / "last" if step == STEPS else None)
    assert len(begun) == step and (run / f"checkpoint-{step:08}").exists()
    train(config(world, run))
    is_the_same_run(run, finished_run)


def test_a_second_ctrl_c_stops_at_once(world, tmp_path, monkeypatch):
    def interrupted(*arguments):
        for now in (100, 103):  # seconds: a launcher forwards the first one sooner
            monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda now=now: now))
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(two_tower, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config(world, tmp_path))
    assert not list(tmp_path.glob("checkpoint*"))


def test_tensorboard_has_what_the_log_has(world, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(config(world, tmp_path, trackers=["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "debias-diffusion")).Reload()
    logged = {line["step"]: line["loss"] for line in log(tmp_path) if "loss" in line}
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(logged)
    assert [event.step for event in events.Scalars("t2i_r1")] == [0, 3, 6, 7]


# ---- data


def test_check_data_reads_everything_and_trains_nothing(world, tmp_path, capsys):
    world = world_with(world, tmp_path, captions={9: " "})
    settings = config(world, tmp_path / "run", check_data=True, max_bad=0)
    Path(settings.images, "7.png").write_text("not an image")
    with pytest.raises(UserError, match=r"2 of 24 records cannot be used.*--max-bad"):
        train(settings)
    assert "7.png: unreadable image" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run").glob("*.jsonl")] == ["bad-records.jsonl"]
    assert train(replace(settings, output=str(tmp_path / "allowed"), max_bad=0.1)) is None
    assert "22 of 24 pairs can be used" in capsys.readouterr().out


def test_bad_settings_are_named(world, tmp_path):
    resnet = CONFIG | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16}}
    with registered(tmp_path / "configs", ResNet=resnet):
        for settings, message in (
            ({"keep_best": 11}, "24 usable pairs less 17 held out leave 7"),
            ({"components": 8}, "at least 1 and less than 7"),
            ({"model": "ResNet", "pretrained": "none"}, "batch normalisation"),
            ({"keep_positions": 76}, r"keep must be in \[0, 75\]"),
            ({"images": str(Path(__file__).parent)}, "18 cannot be used, for example '6.png', whose image"),
        ):
            with pytest.raises(UserError, match=message):
                train(replace(config(world, tmp_path / "run"), **settings))


AUTO = dict(validation="auto", batch="auto", components=None, warmup="auto", max_steps=None)


def test_held_out_pairs_batch_and_warmup_fit_small_data(world, tmp_path):
    settings = config(world, tmp_path, **AUTO)
    assert [settings.held_out_count(records) for records in (1_200_000, 9_999, 5)] == [1000, 999, 0]
    sizes = [settings.batch_size(pairs) for pairs in (10**6, 256, 255, 100, 11, 4, 3, 0, -5)]
    assert sizes == [256, 256, 128, 64, 8, 4, 4, 4, 4]
    assert [settings.warmup_steps(steps) for steps in (10**6, 2000, 1999, 31, 9)] == [200, 200, 199, 3, 0]
    aligned = AlignConfig(data="x", output="y", base="toy/sdxl", encoder="original")
    assert [aligned.batch_size(pairs) for pairs in (10**6, 48, 47)] == [48, 48, 32]
    assert [aligned.warmup_steps(steps) for steps in (1000, 999)] == [100, 99]
    given = replace(settings, validation=1000, batch=24, warmup=7)
    assert (given.held_out_count(24), given.batch_size(3), given.warmup_steps(9)) == (1000, 24, 7)


def test_twelve_pairs_train_with_the_defaults_and_are_told_that_it_is_little(world, tmp_path, capsys):
    few = world_with(world, tmp_path, count=12)
    train(config(few, tmp_path / "run", **AUTO | dict(epochs=3)))
    out = capsys.readouterr().out
    assert "as many components as the batch allows" in out and "4 of 8 pairs (auto: 256" in out
    assert out.count("Little will have changed after 4 steps; --epochs 219 makes 300.") == 2
    recorded = {"batch": 8, "components": 3, "warmup": 0, "validation": 1}
    assert {name: settings_of(tmp_path / "run")[name] for name in recorded} == recorded
    # Continued with these numbers, given or not.
    again = killed_copy(tmp_path / "run", tmp_path / "again", 4)
    train(config(few, again, **recorded | dict(max_steps=None, epochs=3)))
    is_the_same_run(again, tmp_path / "run")


@pytest.mark.parametrize("warmup", [20, 2, 1])
def test_a_run_of_warm_up_alone_is_told_in_the_plan_and_at_the_end(world, tmp_path, capsys, monkeypatch, warmup):
    monkeypatch.setattr(progress, "FEW_STEPS", 2)  # two are many
    train(config(world, tmp_path, max_steps=2, warmup=warmup, eval_every=9, checkpoint_every=9))
    assert capsys.readouterr().out.count("--warmup 0") == (2 if warmup > 1 else 0)


# ---- runs that continue from what was changed, damaged or left unfinished since they stopped


def test_another_base_model_is_refused_and_a_moved_one_is_not(world, finished_run, copy_of, tmp_path):
    run, moved = killed_copy(finished_run, tmp_path / "run"), copy_of(Path(world[0]), tmp_path / "moved")
    tiny_clip(seed=1).save(tmp_path / "other")
    with pytest.raises(UserError, match="contents of base model: "):
        train(config((str(tmp_path / "other"), *world[1:]), run))
    train(config((str(moved), *world[1:]), run))
    is_the_same_run(run, finished_run)


def test_damaged_lines_of_the_logs_are_left_out_and_the_others_kept(world, finished_run, tmp_path):
    run = killed_copy(finished_run, tmp_path / "run")
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    damaged = [b"\xff\xfe\x00\n", b'{"loss": 1}\n', b"[]}\n", b'{"step": "1"}\n', b"{" * 100_000 + b"}\n"]
    (run / "log.jsonl").write_bytes(b"".join([lines[0], *damaged, *lines[1:], b'{"step": 1']))
    (run / "not-finite.jsonl").write_bytes(b"\x80}\n")
    train(config(world, run))
    is_the_same_run(run, finished_run)
    assert (run / "not-finite.jsonl").read_bytes() == b""


def test_a_pace_below_one_pair_a_second_is_not_zero():
    assert [pace(pairs) for pairs in (0.48, 0.004, 9.96, 1024.3)] == ["0.48", "0.004", "10", "1,024"]
