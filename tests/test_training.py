"""What a training run leaves, what it refuses, and that it continues as if nothing had happened."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import open_clip
import pytest
import torch
from helpers.ranks import forked
from helpers.tiny_clip import CONFIG, correct, registered, tiny_clip, tiny_siglip
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
from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.errors import OutOfMemory, UserError
from debias_diffusion.training import loop, stop
from debias_diffusion.training.loop import load_base_model, load_base_tokenizer, prepare_backbone, train
from debias_diffusion.training.optimizer import AdamW
from debias_diffusion.training.plan import Moment, Pace, state_bytes

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


def test_positions_and_pooling_stay_with_the_model(world, finished_run, tmp_path):
    train(config(world, tmp_path / "run", pooling="average", keep_positions=0, max_steps=1))
    last = load_backbone(str(tmp_path / "run" / "last"))
    assert (last.context_length, last.kept_positions, last.pooling) == (308, 0, "average")
    # A model that is stretched already is trained as it is, and captions are counted for the length that is trained.
    run = config((str(finished_run / "last"), *world[1:]), tmp_path)
    tokenizers = load_base_tokenizer(run), prepare_backbone(load_base_model(run), run)[0].tokenizer
    assert [tokenizer.context_length for tokenizer in tokenizers] == [248, 248]


def test_the_recipe_says_what_weight_decay_acts_on(world, finished_run, tmp_path, capsys):
    train(config(world, tmp_path, recipe="debias-clip-as-released", batch=16, components=1, max_steps=1))
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
    """With features of a frozen tower, bad records, and compiled towers: below, and in test_compiled_training."""
    settings, whole, again = CONTINUED[case], tmp_path / "whole", tmp_path / "again"
    train(config(world, whole, **settings))
    if "precision" in settings:
        half = losses(whole)
        assert half[0] == pytest.approx(losses(finished_run)[0], rel=0.05) and half[-1] < 0.7 * half[0]
    train(config(world, killed_copy(whole, again, settings["max_steps"]), **settings, workers=2))
    is_the_same_run(again, whole)


def test_a_run_may_be_continued_with_less_memory(world, finished_run, tmp_path):
    train(config(world, killed_copy(finished_run, tmp_path / "run"), chunk=2, checkpoint_activations=True, keep=1))
    assert losses(tmp_path / "run") == pytest.approx(losses(finished_run), rel=1e-4)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint*")] == ["checkpoint-00000007"]


def test_siglip_trains_with_its_own_loss_window_and_scale(world, tmp_path):
    base = tiny_siglip()
    base.save(tmp_path / "base")
    world = (str(tmp_path / "base"), *world[1:])
    train(config(world, tmp_path / "run", max_steps=3))
    last, line = load_backbone(str(tmp_path / "run" / "last")), log(tmp_path / "run")[1]
    assert (last.context_length, last.loss) == (196, "sigmoid") and last.logit_bias.item() != base.logit_bias.item()
    expected = base.logit_scale.exp().item(), base.logit_bias.item()
    assert (line["logit_scale"], line["logit_bias"]) == pytest.approx(expected, rel=1e-3)
    with pytest.raises(UserError, match="label_smoothing is 0.1"):
        train(config(world, tmp_path / "other", label_smoothing=0.1))


# ---- what a run takes


def test_the_first_steps_and_those_that_compile_are_not_measured():
    double, given = torch.compile(lambda number: 2 * number, backend="eager", dynamic=False), torch.ones(3)
    pace, due, lines = Pace(100, 8, CPU), {}, {}
    for step in range(1, 21):
        double(given[: 2 + (step > 7)]) if step > 1 else None  # compiles in steps 2 and 8
        seconds = 100.0 if step in (1, 2, 3, 8) else 0.5 + step / 100
        numbers, line = pace.add(step, seconds, waited=seconds / (5 if step < 10 else 20))
        if numbers:
            due[step], lines[step] = numbers["seconds"], line
    assert due[5] == {"step": 0.545, "waiting": 0.109, "left": 51.8}
    means = {step: numbers["step"] for step, numbers in due.items()}
    assert means == pytest.approx({5: 0.545, 10: (0.59 + 0.60) / 2, 20: 0.655}, abs=1e-4)
    assert "20% of the time waiting for data; 52 s to the end; more --workers" in lines[5]
    assert lines[20].endswith("5% of the time waiting for data; 52 s to the end")


def test_the_bytes_of_weights_gradients_and_averages_are_counted_exactly():
    model, frozen = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)), torch.nn.Linear(4, 4)
    model[1].requires_grad_(False)
    optimizer = AdamW(dict(model.named_parameters()), 0.0, (0.9, 0.999), 1e-8)
    model(torch.ones(1, 3)).sum().backward()
    held = [*model.parameters(), *frozen.parameters(), *(weight.grad for weight in model[0].parameters())]
    optimizer.adamw.step()
    held += [state[name] for state in optimizer.adamw.state.values() for name in ("exp_avg", "exp_avg_sq")]
    run = SimpleNamespace(model=model, modules=None, frozen=list(frozen.parameters()))
    assert state_bytes(run) == sum(tensor.nbytes for tensor in held)


def test_too_little_memory_names_a_chunk_and_leaves_nothing(world, finished_run, tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    killed = killed_copy(finished_run, tmp_path / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "backward", Mock(side_effect=torch.OutOfMemoryError("Tried to allocate 2.00 GiB")))
        for output, chunk, message in (
            (tmp_path / "new", None, r"2\.00 GiB.* GB of weights.* of 8 pairs.* --chunk 4"),
            (tmp_path / "old", 1, "--checkpoint-activations"),
            (killed, 3, "--chunk 1,"),
        ):
            with pytest.raises(OutOfMemory, match=message):
                train(config(world, output, chunk=chunk))
    assert {path.name for path in tmp_path.iterdir()} == {"old", "killed"}
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["notes.txt"]
    train(config(world, killed))
    is_the_same_run(killed, finished_run)


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

        monkeypatch.setattr(loop, "prepare_backbone", prepare_poisoned)

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
    assert after["token_embedding.weight"].isfinite().all(dim=1).logical_not().sum() == 1  # the word's own row

    forked(2, lambda _: str(train(config(world, shared, **settings))))
    for name in ("not-finite.jsonl", "bad-records.jsonl"):
        assert {*map(str, lines_of(shared / name))} == {*map(str, lines_of(alone / name))} != set()
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-3)
    assert len(list((tmp_path / "shared" / "image-features").rglob("*.safetensors"))) == 2


def test_three_such_steps_in_a_row_stop_the_run(world, tmp_path, poison):
    poison("number")  # in every caption
    for _ in range(2):  # started again it counts on from its checkpoint, and names each step once
        with pytest.raises(UserError, match=r"loss of step 3 is not finite.*like the 2 before it.*not-finite.jsonl"):
            train(config(world, tmp_path / "run", validation=0, eval_every=9))
        assert len(lines_of(tmp_path / "run" / "not-finite.jsonl")) == 3


def test_a_frozen_image_tower_stays_and_its_features_are_shared_between_runs(world, finished_run, tmp_path):
    settings = dict(freeze_image_tower=True, feature_cache=str(tmp_path / "cache"))
    first = tmp_path / "first"
    train(config(world, first, **settings))
    base, last = (load_backbone(str(folder)).model.state_dict() for folder in (world[0], first / "last"))
    changed = {name for name, tensor in base.items() if not torch.equal(last[name], tensor)}
    assert "token_embedding.weight" in changed and not any(name.startswith("visual") for name in changed)
    # The first step's loss needs no gradient: it is that of a run without freezing.
    assert losses(first)[0] == pytest.approx(losses(finished_run)[0], rel=1e-4)
    assert recalls(first)[0]["t2i_r1"] == recalls(finished_run)[0]["t2i_r1"]
    written = set((tmp_path / "cache").rglob("*.safetensors"))
    train(config(world, killed_copy(first, tmp_path / "again"), **settings))
    is_the_same_run(tmp_path / "again", first)
    assert set((tmp_path / "cache").rglob("*.safetensors")) == written != set()


def test_a_second_ctrl_c_stops_at_once(world, tmp_path, monkeypatch):
    def interrupted(*arguments):
        for now in (100, 103):  # seconds: a launcher forwards the first one sooner
            monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda now=now: now))
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "backward", interrupted)
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


def test_every_pair_and_stand_in_of_an_epoch_survive_workers_and_restarts(world, tmp_path, capsys):
    world, run, again = world_with(world, tmp_path, count=38, broken=[17, 30]), tmp_path / "run", tmp_path / "again"
    settings = dict(max_steps=None, epochs=2, max_bad=0.1, checkpoint_every=1, keep=9)
    train(config(world, run, **settings))
    out = capsys.readouterr().out
    assert "32 to train on; 6 held out" in out and "8 of 8 pairs (2.00 epochs)" in out
    named = (run / "bad-records.jsonl").read_text().splitlines()
    assert {json.loads(line)["where"] for line in named} == {"17.png", "30.png"} and len(named) == 2
    killed_copy(run, again, 8)
    for step in range(2, 8):
        (again / f"checkpoint-{step:08}").unlink()
    with open(again / "bad-records.jsonl", "a") as file:
        file.write('{"where": "1')  # a kill
    train(config(world, again, workers=2, **settings))
    is_the_same_run(again, run)
    assert sorted((again / "bad-records.jsonl").read_text().splitlines()) == sorted([*named, '{"where": "1'])


def test_check_data_reads_everything_and_trains_nothing(world, tmp_path, capsys):
    world, shards = world_with(world, tmp_path, captions={9: " "}), tmp_path / "shards"
    settings = config(world, tmp_path / "run", check_data=True, max_bad=0)
    Path(settings.images, "7.png").write_text("not an image")
    with pytest.raises(UserError, match=r"2 of 24 records cannot be used.*--max-bad"):
        train(settings)
    assert "7.png: unreadable image" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run").glob("*.jsonl")] == ["bad-records.jsonl"]
    assert train(replace(settings, output=str(tmp_path / "allowed"), max_bad=0.1)) is None
    assert "22 of 24 pairs can be used" in capsys.readouterr().out

    write_shards(ShardsConfig(data=world[1], images=world[2], output=str(shards), size=32, max_bad=0.5))
    content = bytearray((shards / "shard-000000.tar").read_bytes())
    content[600] ^= 1  # within the first image: a byte that decoding may well not notice
    (shards / "shard-000000.tar").write_bytes(content)
    train(config((world[0], str(shards), None), tmp_path / "shared", check_data=True, max_bad=0.5))
    assert "shard-000000.tar: changed shard" in capsys.readouterr().out


def test_bad_settings_are_named(world, tmp_path):
    resnet = CONFIG | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16}}
    with registered(tmp_path / "configs", ResNet=resnet):
        for settings, message in (
            ({"keep_best": 11}, "24 usable pairs less 17 held out leave 7"),
            ({"components": 8}, "at least 1 and less than 7"),
            ({"model": "ResNet", "pretrained": "none"}, "batch normalisation"),
            ({"model": "ResNet"}, "without weights"),
            ({"model": "toy/long-clip"}, "not in open_clip's layout"),
            ({"keep_positions": 76}, r"keep must be in \[0, 75\]"),
            ({"images": str(Path(__file__).parent)}, "18 are missing, for example '6.png'"),
        ):
            with pytest.raises(UserError, match=message):
                train(replace(config(world, tmp_path / "run"), **settings))


def test_too_many_bad_records_end_with_what_mends_their_kind(world, tmp_path):
    """Not with images to be mended where the data have no short captions."""
    entries = json.loads(Path(world[1]).read_text())
    (tmp_path / "data.json").write_text(json.dumps([*entries, {"image": "0.png"}, {"image": "1.png"}]))
    shutil.copytree(world[2], tmp_path / "images")
    for name in ("0.png", "1.png"):
        (tmp_path / "images" / name).unlink()
    for data, given, message in (
        (world[1:], {"sampling": "given"}, "Add a short_caption .* --sampling, such"),
        ((str(tmp_path / "data.json"), world[2]), {}, "Mend them in the data"),
        ((world[1], str(tmp_path / "images")), {}, "Mend the images"),
    ):
        with pytest.raises(UserError, match=message) as error:
            train(config((world[0], *data), tmp_path / "run", check_data=True, **given))
        assert str(error.value).count("Mend") == ("Mend" in message)


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
    for part in (
        "3 components, eot pooling; as many components as the batch allows (--components)",
        "4 of 8 pairs (auto: 256, of small data fewer; --batch) (2.91 epochs)",
        "; 0 of warm-up",
    ):
        assert part in out
    line = "Little will have changed after 4 steps; --epochs 219 makes 300."
    assert f"  {line}\n" in out and f"records were replaced, and the last 1 pairs filled no step. {line} Give it" in out
    recorded = {"batch": 8, "components": 3, "warmup": 0, "validation": 1}
    assert {name: settings_of(tmp_path / "run")[name] for name in recorded} == recorded
    # Continued with these numbers, given or not.
    again = killed_copy(tmp_path / "run", tmp_path / "again", 4)
    train(config(few, again, **recorded | dict(max_steps=None, epochs=3)))
    is_the_same_run(again, tmp_path / "run")


# ---- runs that continue from what was changed, damaged or left unfinished since they stopped


def test_another_base_model_preprocessing_or_tokenizer_is_refused_and_a_moved_one_is_not(
    world, finished_run, copy_of, tmp_path
):
    run, moved = killed_copy(finished_run, tmp_path / "run"), copy_of(Path(world[0]), tmp_path / "moved")
    tiny_clip(seed=1).save(tmp_path / "weights")
    others = [tmp_path / "weights"]
    for part in ("preprocess_cfg", "tokenizer"):
        others.append(copy_of(moved, tmp_path / part))
        correct(others[-1], part)
    for other in others:
        with pytest.raises(UserError, match="contents of base model: "):
            train(config((str(other), *world[1:]), run))
    train(config((str(moved), *world[1:]), run))
    is_the_same_run(run, finished_run)


def test_a_run_stopped_by_max_bad_continues_with_a_larger_one(world, tmp_path):
    world = world_with(world, tmp_path, count=40, broken=range(10, 35, 5))
    Path(world[2], "35.png").unlink()
    settings = dict(max_steps=12, max_bad=0.1)
    with pytest.raises(UserError, match="with a larger --max-bad: the run continues"):
        train(config(world, tmp_path / "run", **settings))
    (*_, stopped_at) = sorted((tmp_path / "run").glob("checkpoint*"))
    train(config(world, tmp_path / "run", **settings | {"max_bad": 0.3}))
    steps = [line["step"] for line in log(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 13)) and int(stopped_at.name[-8:]) < 12
    kinds = {line["where"]: line["kind"] for line in lines_of(tmp_path / "run" / "bad-records.jsonl")}
    assert len(kinds) == 6 and (kinds["10.png"], kinds["35.png"]) == ("unreadable image", "missing image")


def test_damaged_lines_of_the_logs_are_left_out_and_the_others_kept(world, finished_run, tmp_path):
    run = killed_copy(finished_run, tmp_path / "run")
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    damaged = [b"\xff\xfe\x00\n", b'{"loss": 1}\n', b"[]}\n", b'{"step": "1"}\n', b"{" * 100_000 + b"}\n"]
    (run / "log.jsonl").write_bytes(b"".join([lines[0], *damaged, *lines[1:], b'{"step": 1']))
    (run / "not-finite.jsonl").write_bytes(b"\x80}\n")
    train(config(world, run))
    is_the_same_run(run, finished_run)
    assert (run / "not-finite.jsonl").read_bytes() == b""
