"""What a training run leaves, what it refuses, and that it continues as if nothing had happened."""

import json
import os
import re
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
from debias_diffusion.data.retrieval import recall_at_k
from debias_diffusion.data.sources import open_data
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.errors import OutOfMemory, UserError
from debias_diffusion.training import loop, plan, stop
from debias_diffusion.training.batches import GlobalBatches
from debias_diffusion.training.loop import load_base_model, load_base_tokenizer, prepare_backbone, train
from debias_diffusion.training.optimizer import AdamW
from debias_diffusion.training.plan import Moment, Pace, check_disk, state_bytes

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

    backbone, pairs = load_two_tower(run / "best"), open_data(*world[1:])[0].records[6:11]
    images = [backbone.preprocess(Image.open(Path(world[2], pair.image)).convert("RGB")) for pair in pairs]
    with torch.inference_mode():
        image = backbone.encode_image(torch.stack(images))
        text = backbone.encode_text(backbone.tokenize([pair.caption for pair in pairs]))
    assert recall_at_k(image, text, ks=(1,))["text_to_image"]["R@1"] == best["choosing_t2i_r1"]


def test_the_best_is_the_first_of_equals_and_never_the_base(world, tmp_path):
    # With steps of nothing all measurements are equal, the base's too.
    train(config(world, tmp_path, learning_rate=1e-30, weight_decay=0, initial_scale=None, keep_best=5))
    assert len({line["choosing_t2i_r1"] for line in log(tmp_path) if "choosing_t2i_r1" in line}) == 1
    assert json.loads((tmp_path / "best" / "scores.json").read_text())["step"] == 3


def test_positions_and_pooling_are_in_the_plan_and_stay_with_the_model(world, finished_run, tmp_path, capsys):
    train(config(world, tmp_path / "run", pooling="average", keep_positions=0, max_steps=1))
    out = capsys.readouterr().out
    for part in ("context length 308", "average pooling", "18 to train on; 6 held out", "1 of 8 pairs"):
        assert part in out
    last = load_backbone(str(tmp_path / "run" / "last"))
    assert (last.context_length, last.kept_positions, last.pooling) == (308, 0, "average")
    # A model that is stretched already is trained as it is, and captions are counted for the length that is trained.
    run = config((str(finished_run / "last"), *world[1:]), tmp_path)
    assert load_base_tokenizer(run).context_length == 248
    assert prepare_backbone(load_base_model(run), run)[0].tokenizer.context_length == 248


def test_the_recipe_says_what_weight_decay_acts_on(world, finished_run, tmp_path, capsys):
    train(config(world, tmp_path, recipe="debias-clip-as-released", batch=16, components=1, max_steps=1))
    assert "1 components of each of 4 parts, eot pooling, weight decay on all parameters" in capsys.readouterr().out
    runs = ((tmp_path, 1), (finished_run, STEPS))
    groups = [checkpoint(*run)["optimizer"]["adamw"]["param_groups"] for run in runs]
    assert [sorted(group["weight_decay"] for group in of_run) for of_run in groups] == [[0.1], [0.0, 0.1]]


@pytest.mark.parametrize(("precision", "steps"), [("bf16", 4), ("fp16", 16)])
def test_half_precisions_train_too_and_continue_bit_identically(world, finished_run, tmp_path, precision, steps):
    settings = dict(precision=precision, max_steps=steps)
    train(config(world, tmp_path / "whole", **settings))
    half = losses(tmp_path / "whole")
    assert half[0] == pytest.approx(losses(finished_run)[0], rel=0.05)
    assert half[-1] < 0.7 * half[0]  # fp16 skips some steps first, until its scale is found
    train(config(world, killed_copy(tmp_path / "whole", tmp_path / "again", steps), **settings))
    assert same_weights(tmp_path / "whole", tmp_path / "again")


def test_a_run_may_be_continued_with_less_memory(world, finished_run, tmp_path):
    train(config(world, killed_copy(finished_run, tmp_path / "run"), chunk=2, checkpoint_activations=True, keep=1))
    assert losses(tmp_path / "run") == pytest.approx(losses(finished_run), rel=1e-4)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint*")] == ["checkpoint-00000007"]


def test_siglip_trains_with_its_own_loss_window_and_scale(world, tmp_path):
    base = tiny_siglip()
    base.save(tmp_path / "base")
    world = (str(tmp_path / "base"), *world[1:])
    train(config(world, tmp_path / "run", max_steps=3))
    last = load_backbone(str(tmp_path / "run" / "last"))
    assert (last.context_length, last.loss) == (196, "sigmoid")
    line = next(line for line in log(tmp_path / "run") if "loss" in line)
    assert line["logit_scale"] == pytest.approx(base.logit_scale.exp().item(), rel=1e-3)
    assert line["logit_bias"] == pytest.approx(base.logit_bias.item(), rel=1e-3)
    assert last.logit_bias.item() != base.logit_bias.item()
    with pytest.raises(UserError, match=r"label_smoothing is 0.1, but the sigmoid loss"):
        train(config(world, tmp_path / "other", label_smoothing=0.1))


# ---- what a run takes


def test_the_pace_is_printed_and_logged_after_the_third_step_and_each_tenth(world, tmp_path, capsys):
    train(config(world, tmp_path, max_steps=6, log_every=6, eval_every=9, checkpoint_every=9))
    lines = [line for line in capsys.readouterr().out.splitlines() if "a step" in line]
    assert re.fullmatch(r"step 3: \S+ s a step, \d+ pairs a second, \d+% of the time waiting for data; .*", lines[0])
    assert re.match(r"step 6: .*; 0 s to the end", lines[1]) and len(lines) == 2
    steps = [line for line in log(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == [3, 6]
    assert steps[0]["seconds"]["left"] == pytest.approx(3 * steps[0]["seconds"]["step"], abs=0.1)


def test_the_first_steps_and_those_that_compile_are_not_measured():
    double, given = torch.compile(lambda number: 2 * number, backend="eager", dynamic=False), torch.ones(3)
    pace, due, lines = Pace(100, 8, CPU), {}, {}
    for step in range(1, 21):
        compiles = step in (2, 8)
        double(given[: 2 + (step > 7)]) if step > 1 else None
        seconds = 100.0 if compiles or step in (1, 3) else 0.5 + step / 100
        numbers, line = pace.add(step, seconds, waited=seconds / (5 if step < 10 else 20))
        if numbers:
            due[step], lines[step] = numbers, line
    assert list(due) == [5, 10, 20]
    assert due[5] == {"seconds": {"step": 0.545, "waiting": 0.109, "left": 51.8}}
    assert due[10]["seconds"]["step"] == pytest.approx((0.59 + 0.60) / 2, abs=1e-4)  # of the two since it compiled
    assert due[20]["seconds"]["step"] == pytest.approx(0.655, abs=1e-4)
    text = "0.55 s a step, 15 pairs a second, 20% of the time waiting for data; 52 s to the end"
    assert lines[5].startswith(f"{text}; more --workers, or")
    assert re.fullmatch(r"0.6\d s a step, 12 pairs .* 5% of the time waiting for data; 52 s to the end", lines[20])


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


def test_a_disk_without_room_is_named_and_what_a_run_has_written_counts_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    (tmp_path / "checkpoint").write_bytes(bytes(1000))
    assert check_disk(tmp_path, 10**9 + 1000, "Checkpoints", "") == 10**9
    with pytest.raises(UserError, match=r"^Checkpoints take 1\.0 GB in '.*', and 1\.0 GB are free\. Make room\.$"):
        check_disk(tmp_path, 10**9 + 1001, "Checkpoints", "Make room.")


def test_too_little_memory_names_a_chunk_and_leaves_nothing(world, finished_run, tmp_path, monkeypatch):
    failing = Mock(side_effect=torch.OutOfMemoryError("Tried to allocate 2.00 GiB"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "backward", failing)
        message = r"memory of cpu .*2\.00 GiB.* GB of weights.* of 8 pairs\. Start the same command with --chunk 4"
        with pytest.raises(OutOfMemory, match=message):
            train(config(world, tmp_path / "new"))
        (tmp_path / "old").mkdir()
        (tmp_path / "old" / "notes.txt").write_text("mine")
        with pytest.raises(OutOfMemory, match="--checkpoint-activations"):
            train(config(world, tmp_path / "old", chunk=1))
        killed = killed_copy(finished_run, tmp_path / "killed")
        with pytest.raises(OutOfMemory, match="--chunk 1,"):
            train(config(world, killed, chunk=3))
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
    settings = dict(freeze_image_tower=True, max_bad=0.1, max_steps=6, eval_every=6)
    alone, shared = tmp_path / "alone" / "run", tmp_path / "shared" / "run"  # each with a feature cache beside it
    train(config(world, alone, **settings))
    named = lines_of(alone / "not-finite.jsonl")
    assert named and all("15.png" in line["samples"] and len(line["samples"]) == 8 for line in named)
    assert {line["step"] for line in log(alone) if "loss" in line} == {*range(1, 7)} - {line["step"] for line in named}
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": 11}, "24 usable pairs less 17 held out leave 7.*--keep-best"),
        ({"components": 8}, "components is 8, but must be at least 1 and less than 7"),
        ({"model": "toy/long-clip"}, "'toy/long-clip' is not in open_clip's layout, so it cannot be trained"),
        ({"keep_positions": 76}, r"keep must be in \[0, 75\] for a table of 77 positions, got 76"),
        ({"images": str(Path(__file__).parent)}, "looked up in .*, 18 are missing, for example '6.png'"),
    ],
)
def test_bad_settings_are_named(world, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        train(replace(config(world, tmp_path / "run"), **settings))


def test_random_weights_are_asked_for_and_batch_normalisation_is_refused(world, tmp_path):
    resnet = CONFIG | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16}}
    with registered(tmp_path / "configs", Tiny=CONFIG, ResNet=resnet):
        settings = config(("Tiny", *world[1:]), tmp_path / "run", pretrained="none", max_steps=1)
        with pytest.raises(UserError, match=r"'Tiny' is an open_clip model without weights.*none"):
            replace(settings, pretrained=None)
        with pytest.raises(UserError, match="batch normalisation"):
            train(replace(settings, model="ResNet"))
        assert train(settings) == tmp_path / "run" / "last"


def test_too_many_bad_records_end_with_what_mends_their_kind(world, tmp_path):
    """Not with images to be mended where the data have no short captions."""
    entries = json.loads(Path(world[1]).read_text())
    (tmp_path / "data.json").write_text(json.dumps([*entries, {"image": "0.png"}, {"image": "1.png"}]))
    shutil.copytree(world[2], tmp_path / "images")
    for name in list((tmp_path / "images").iterdir())[:2]:
        name.unlink()
    for data, given, message in (
        (world[1:], {"sampling": "given"}, "no short caption .*Add a short_caption to the entries .* --sampling, such"),
        ((str(tmp_path / "data.json"), world[2]), {}, "Mend them in the data, or start"),
        ((world[1], str(tmp_path / "images")), {}, "Mend the images where they are, or start"),
    ):
        with pytest.raises(UserError, match=message) as error:
            train(config((world[0], *data), tmp_path / "run", check_data=True, **given))
        assert str(error.value).count("Mend") == ("Mend" in message)


def test_held_out_pairs_are_the_first_thousand_but_at_most_a_tenth(world, tmp_path):
    settings = config(world, tmp_path, validation="auto")
    assert [settings.held_out_count(records) for records in (1_200_000, 9_999, 5)] == [1000, 999, 0]
    assert replace(settings, validation=1000).held_out_count(24) == 1000


AUTO = dict(validation="auto", batch="auto", components=None, warmup="auto", max_steps=None)


def test_batch_and_warmup_fit_small_data(world, tmp_path):
    settings = config(world, tmp_path, **AUTO)
    sizes = [settings.batch_size(pairs) for pairs in (10**6, 256, 255, 100, 11, 4, 3, 0, -5)]
    assert sizes == [256, 256, 128, 64, 8, 4, 4, 4, 4]
    assert [settings.warmup_steps(steps) for steps in (10**6, 2000, 1999, 31, 9)] == [200, 200, 199, 3, 0]
    aligned = AlignConfig(data="x", output="y", base="toy/sdxl", encoder="original")
    assert [aligned.batch_size(pairs) for pairs in (10**6, 48, 47)] == [48, 48, 32]
    assert [aligned.warmup_steps(steps) for steps in (1000, 999)] == [100, 99]
    given = replace(settings, batch=24, warmup=7)
    assert given.batch_size(3) == 24 and given.warmup_steps(9) == 7


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


def test_the_epochs_named_make_three_hundred_steps(world, tmp_path, capsys):
    few = world_with(world, tmp_path, count=5)
    with pytest.raises(UserError, match=r"5 usable pairs less 2 held out leave 3 .*, fewer than a batch of 4"):
        train(config(few, tmp_path / "run", **AUTO | dict(validation=2)))
    train(config(few, tmp_path / "run", **AUTO | dict(epochs=50, max_steps=2)))  # one component is left
    assert "after 2 steps; --epochs 240 --max-steps 300 makes 300." in capsys.readouterr().out
    assert [GlobalBatches(5, 4, epochs, 0).total_steps for epochs in (239, 240)] == [298, 300]
    assert settings_of(tmp_path / "run")["components"] == 1


# ---- runs that continue from what was changed, damaged or left unfinished since they stopped


def test_another_base_model_preprocessing_or_tokenizer_is_refused_and_a_moved_one_is_not(world, finished_run, tmp_path):
    run, moved = killed_copy(finished_run, tmp_path / "run"), tmp_path / "moved"
    weights, preprocessing = tiny_clip(seed=1), load_backbone(world[0])
    preprocessing.config["preprocess_cfg"]["mean"] = [0.1, 0.2, 0.3]
    for other in (weights, preprocessing):
        other.save(moved)
        with pytest.raises(UserError, match="contents of base model: "):
            train(config((str(moved), *world[1:]), run))
    for corrected in (True, False):
        shutil.copytree(world[0], moved, dirs_exist_ok=True)
        for path in (moved, *moved.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        if corrected:
            correct(moved, "tokenizer")
            with pytest.raises(UserError, match="contents of base model: "):
                train(config((str(moved), *world[1:]), run))
    train(config((str(moved), *world[1:]), run))
    is_the_same_run(run, finished_run)


def test_a_run_stopped_by_max_bad_continues_with_a_larger_one(world, tmp_path):
    world = world_with(world, tmp_path, count=40, broken=range(10, 35, 5))
    Path(world[2], "35.png").unlink()
    settings = dict(max_steps=12, max_bad=0.1)
    with pytest.raises(UserError, match=r"share of 0.1 that --max-bad .* with a larger --max-bad: the run continues"):
        train(config(world, tmp_path / "run", **settings))
    stopped_at = max((tmp_path / "run").glob("checkpoint*")).name
    train(config(world, tmp_path / "run", **settings | {"max_bad": 0.3}))
    steps = [line["step"] for line in log(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 13)) and int(stopped_at[-8:]) < 12
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
