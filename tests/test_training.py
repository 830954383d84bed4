import io
import json
import os
import shutil
import signal
import tarfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest
import torch
from helpers.ranks import forked
from helpers.tiny_clip import CONFIG, registered, tiny_clip, tiny_siglip
from helpers.tiny_data import make_tiny_data
from helpers.training_runs import (
    STEPS,
    config,
    data_with_a_dragon,
    is_the_same_run,
    killed_copy,
    log,
    losses,
    recalls,
    same_weights,
    saved,
    settings_of,
)
from PIL import Image
from safetensors.torch import load_file

from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.data.sources import open_data
from debias_diffusion.encoders import load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.retrieval import recall_at_k
from debias_diffusion.training import loop, stop
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.feature_cache import FrozenTower
from debias_diffusion.training.loop import train
from debias_diffusion.training.setup import held_out_count, load_base_model, load_base_tokenizer, prepare_backbone
from debias_diffusion.training.step import backward


def test_a_run_leaves_what_it_says(world, finished_run):
    lines = log(finished_run)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert {"loss", "short", "long", "logit_scale", "learning_rate", "epoch", "samples_per_second"} <= steps[0].keys()
    assert [line["step"] for line in recalls(finished_run)] == [0, 3, 6, 7]
    assert sorted(finished_run.glob("checkpoint*")) == [finished_run / f"checkpoint-0000000{step}" for step in (6, 7)]
    assert json.loads((finished_run / "last" / "scores.json").read_text()) == {"step": 7}
    assert not (finished_run / "best").exists()
    assert open_clip.create_model(f"local-dir:{finished_run / 'last'}").context_length == 248
    assert settings_of(finished_run)["precision"] == "fp32"  # auto, on a CPU


def test_the_best_is_chosen_on_pairs_that_are_neither_trained_on_nor_held_out(world, tmp_path, capsys):
    settings = dict(keep_best=5, learning_rate=3e-2, eval_every=2)
    run = tmp_path / "run"
    assert train(config(world, run, **settings)) == run / "last"  # the result, whichever is the best
    assert "6 held out; 5 more choose the best model" in capsys.readouterr().out
    train(config(world, tmp_path / "held-out", validation=11, learning_rate=3e-2, eval_every=2))
    assert same_weights(run, tmp_path / "held-out")
    chosen = {line["step"]: line for line in log(run) if "choosing_t2i_r1" in line}
    assert chosen.keys() == {0, 2, 4, 6, 7} == {line["step"] for line in recalls(run)}
    means = {step: (line["choosing_t2i_r1"] + line["choosing_i2t_r1"]) / 2 for step, line in chosen.items()}
    best = json.loads((run / "best" / "scores.json").read_text())
    assert best == chosen[max((2, 4, 6, 7), key=lambda step: (means[step], -step))]
    assert best["step"] < 7 and best["choosing_pairs"] == 5  # else nothing shows that the last one is the result
    weights = load_two_tower(run).model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved(run, "last").items())
    assert any(not torch.equal(weights[name], tensor) for name, tensor in saved(run, "best").items())

    backbone, captions = load_two_tower(run / "best"), open_data(*world[1:])[0].records[6:11]
    images = torch.stack(
        [backbone.preprocess(Image.open(Path(world[2], pair.image)).convert("RGB")) for pair in captions]
    )
    with torch.inference_mode():
        image = backbone.encode_image(images)
        text = backbone.encode_text(backbone.tokenize([pair.caption for pair in captions]))
    assert recall_at_k(image, text, ks=(1,))["text_to_image"]["R@1"] == best["choosing_t2i_r1"]


def test_the_best_is_the_first_of_equals_and_never_the_base(world, tmp_path):
    # With steps of nothing all measurements are equal, the base's too.
    settings = config(world, tmp_path, learning_rate=1e-30, weight_decay=0, initial_scale=None, keep_best=5)
    train(settings)
    assert len({line["choosing_t2i_r1"] for line in log(tmp_path) if "choosing_t2i_r1" in line}) == 1
    assert json.loads((tmp_path / "best" / "scores.json").read_text())["step"] == 3
    with pytest.raises(UserError, match="keep_best: 5 there, 0 here"):
        train(replace(settings, keep_best=0))


def test_of_an_unfinished_run_the_best_is_loaded_if_it_keeps_one(world, finished_run, tmp_path):
    run = killed_copy(finished_run, tmp_path / "run")
    with pytest.raises(UserError, match="has not ended, so it has no model yet"):
        load_two_tower(run)
    load_backbone(world[0]).save(run / "best")
    assert load_two_tower(run).context_length == 77


def test_training_learns_and_keeps_the_kept_rows(world, finished_run):
    base, last = load_backbone(world[0]), load_backbone(str(finished_run / "last"))
    table = last.text.tower.positional_embedding
    assert torch.equal(table[:20], base.text.tower.positional_embedding[:20])
    stretched = load_backbone(world[0])
    stretched.stretch()
    assert (table[20:] != stretched.text.tower.positional_embedding[20:]).any(dim=1).all()
    assert sum(losses(finished_run)[-2:]) < sum(losses(finished_run)[:2])


def test_the_greatest_seed_and_a_single_pair_are_trained_on(world, tmp_path):
    data, images = make_tiny_data(tmp_path / "world", count=1)
    settings = dict(seed=2**32 - 1, batch=1, components=0, validation=0, max_steps=2)
    assert train(config((world[0], data, images), tmp_path / "run", **settings))
    assert len(losses(tmp_path / "run")) == 2


def test_positions_and_pooling_are_in_the_plan_and_stay_with_the_model(world, finished_run, tmp_path, capsys):
    train(config(world, tmp_path, pooling="average", keep_positions=0, max_steps=1))
    out = capsys.readouterr().out
    pairs = "18 to train on; 6 held out"
    parts = ("context length 308", "debias-clip", "average pooling", pairs, "1 of 8 pairs", "GB a process")
    assert [part for part in (*parts, "time    about") if part not in out] == []
    last = load_backbone(str(tmp_path / "last"))
    assert (last.context_length, last.kept_positions, last.pooling) == (308, 0, "average")
    assert load_backbone(str(finished_run / "last")).pooling == "eot"


def test_an_already_stretched_model_is_trained_further_as_it_is(world, finished_run, tmp_path):
    train(config((str(finished_run / "last"), *world[1:]), tmp_path, max_steps=1))
    before, after = (load_backbone(str(f / "last")) for f in (finished_run, tmp_path))
    assert after.context_length == 248
    tables = [b.text.tower.positional_embedding for b in (before, after)]
    assert torch.equal(tables[0][:20], tables[1][:20]) and not torch.equal(tables[0], tables[1])


def test_long_clip_and_overrides_change_the_run(world, finished_run, tmp_path):
    changes = [{"recipe": "long-clip"}, {"padding": "none"}, {"short_weight": 0.7}, {"pooling": "average"}]
    first = {losses(finished_run)[0]}
    for number, settings in enumerate(changes):
        train(config(world, tmp_path / str(number), max_steps=1, **settings))
        first.add(losses(tmp_path / str(number))[0])
    assert len(first) == 5


@pytest.mark.parametrize(("precision", "steps"), [("bf16", 4), ("fp16", 16)])
def test_half_precisions_train_too_and_continue_bit_identically(world, finished_run, tmp_path, precision, steps):
    settings = dict(precision=precision, max_steps=steps)
    train(config(world, tmp_path / "whole", **settings))
    half = losses(tmp_path / "whole")
    assert half[0] == pytest.approx(losses(finished_run)[0], rel=0.05)
    assert half[-1] < 0.7 * half[0]  # fp16 skips some steps first, until its scale is found
    train(config(world, killed_copy(tmp_path / "whole", tmp_path / "again", steps), **settings))
    assert same_weights(tmp_path / "whole", tmp_path / "again")


def test_saving_memory_changes_nothing_but_rounding(world, finished_run, tmp_path):
    train(config(world, tmp_path, chunk=3, checkpoint_activations=True))
    assert losses(tmp_path)[0] == pytest.approx(losses(finished_run)[0], rel=1e-6)
    # AdamW divides by the gradient's size, so rounding of gradients near 0 grows from step to step.
    assert losses(tmp_path) == pytest.approx(losses(finished_run), rel=1e-3)


def test_a_run_may_be_continued_with_less_memory(world, finished_run, tmp_path):
    train(config(world, killed_copy(finished_run, tmp_path / "run"), chunk=2, keep=1))
    assert losses(tmp_path / "run") == pytest.approx(losses(finished_run), rel=1e-4)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint*")] == ["checkpoint-00000007"]


def test_siglip_trains_with_its_own_loss_window_and_scale(world, tmp_path):
    base = tiny_siglip()
    base.save(tmp_path / "base")
    train(config((str(tmp_path / "base"), *world[1:]), tmp_path / "run", max_steps=3))
    last = load_backbone(str(tmp_path / "run" / "last"))
    assert (last.context_length, last.loss) == (196, "sigmoid")
    line = next(line for line in log(tmp_path / "run") if "loss" in line)
    assert line["logit_scale"] == pytest.approx(base.logit_scale.exp().item(), rel=1e-3)
    assert line["logit_bias"] == pytest.approx(base.logit_bias.item(), rel=1e-3)
    assert not torch.equal(last.logit_bias, base.logit_bias)
    assert open_clip.create_model(f"local-dir:{tmp_path / 'run' / 'last'}").context_length == 196
    with pytest.raises(UserError, match=r"label_smoothing is 0.1, but the sigmoid loss"):
        train(config((str(tmp_path / "base"), *world[1:]), tmp_path / "other", label_smoothing=0.1))


def poisoned_by(word: str):
    """A `prepare_backbone` that makes one word's embedding NaN, as a step that went wrong: no base model comes so."""

    def prepare_poisoned(*arguments):
        backbone = prepare_backbone(*arguments)
        (token,) = backbone.tokenizer.text_ids([word])[0]
        with torch.no_grad():
            backbone.model.token_embedding.weight[token] = torch.nan
        return backbone

    return prepare_poisoned


def test_a_step_whose_loss_is_not_finite_is_not_applied_and_its_samples_are_named(world, tmp_path, monkeypatch):
    data, images = data_with_a_dragon(tmp_path / "world")
    monkeypatch.setattr(loop, "prepare_backbone", poisoned_by("dragon"))
    train(config((world[0], data, images), tmp_path / "run", max_steps=9))
    named = [json.loads(line) for line in (tmp_path / "run" / "not-finite.jsonl").read_text().splitlines()]
    left_out = {line["step"] for line in named}
    assert named and all("15.png" in line["samples"] and len(line["samples"]) == 8 for line in named)
    assert {line["step"] for line in log(tmp_path / "run") if "loss" in line} == set(range(1, 10)) - left_out
    before, after = (load_file(Path(f) / "open_clip_model.safetensors") for f in (world[0], tmp_path / "run" / "last"))
    assert all(tensor.isfinite().all() for name, tensor in after.items() if name != "token_embedding.weight")
    assert after["token_embedding.weight"].isfinite().all(dim=1).logical_not().sum() == 1  # the word's own row
    assert not torch.equal(after["ln_final.weight"], before["ln_final.weight"])


def test_two_processes_share_image_features_and_what_goes_wrong(world, tmp_path, monkeypatch):
    """A frozen image tower, a broken image and steps that are not finite, by one process and by two."""
    monkeypatch.setattr(loop, "prepare_backbone", poisoned_by("dragon"))
    data, images = data_with_a_dragon(tmp_path / "world")
    Path(images, "7.png").write_text("not an image")
    settings = dict(freeze_image_tower=True, max_bad=0.1, max_steps=6, eval_every=6)
    runs = [tmp_path / "alone" / "run", tmp_path / "shared" / "run"]  # each with a feature cache beside it
    train(config((world[0], data, images), runs[0], **settings))
    forked(2, lambda _: str(train(config((world[0], data, images), runs[1], **settings))))
    for name in ("not-finite.jsonl", "bad-records.jsonl"):
        alone, shared = ([json.loads(line) for line in (run / name).read_text().splitlines()] for run in runs)
        assert shared and {json.dumps(line) for line in shared} == {json.dumps(line) for line in alone}
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)
    assert len(list((tmp_path / "shared" / "image-features").rglob("*.safetensors"))) == 2


def test_three_such_steps_in_a_row_stop_the_run(world, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "prepare_backbone", poisoned_by("number"))  # in every caption
    with pytest.raises(UserError, match=r"loss of step 3 is not finite.*like the 2 before it.*not-finite.jsonl"):
        train(config(world, tmp_path / "run", validation=0))
    assert len((tmp_path / "run" / "not-finite.jsonl").read_text().splitlines()) == 3
    # Started again it counts on from its checkpoint, and names each step once.
    with pytest.raises(UserError, match="like the 2 before it"):
        train(config(world, tmp_path / "run", validation=0))
    assert len((tmp_path / "run" / "not-finite.jsonl").read_text().splitlines()) == 3


def test_a_frozen_image_tower_stays_and_its_features_are_shared_between_runs(world, finished_run, tmp_path):
    settings = dict(freeze_image_tower=True, feature_cache=str(tmp_path / "cache"))
    train(config(world, tmp_path / "first", **settings))
    base, last = load_backbone(world[0]), load_backbone(str(tmp_path / "first" / "last"))
    for name, tensor in base.model.visual.state_dict().items():
        assert torch.equal(last.model.visual.state_dict()[name], tensor)
    assert not torch.equal(base.model.token_embedding.weight, last.model.token_embedding.weight)
    # The first step's loss needs no gradient: it is that of a run without freezing.
    assert losses(tmp_path / "first")[0] == pytest.approx(losses(finished_run)[0], rel=1e-4)
    assert recalls(tmp_path / "first")[0]["t2i_r1"] == recalls(finished_run)[0]["t2i_r1"]
    written = set((tmp_path / "cache").rglob("*.safetensors"))
    assert written
    train(config(world, tmp_path / "second", **settings))
    train(config(world, killed_copy(tmp_path / "second", tmp_path / "third"), **settings))
    for name in ("second", "third"):
        assert same_weights(tmp_path / name, tmp_path / "first")
    assert set((tmp_path / "cache").rglob("*.safetensors")) == written


def test_sigterm_while_image_features_are_computed_stops_the_run_and_keeps_them(world, tmp_path, monkeypatch, capsys):
    data, images = make_tiny_data(tmp_path / "world", count=40)
    settings = config((world[0], data, images), tmp_path / "run", freeze_image_tower=True, max_steps=2)
    encode = FrozenTower.encode
    encoded = []

    def encode_and_signal(tower, pixels):
        encoded.append(len(pixels))
        os.kill(os.getpid(), signal.SIGTERM)
        return encode(tower, pixels)

    with monkeypatch.context() as patch:
        patch.setattr(FrozenTower, "encode", encode_and_signal)
        assert train(settings) is None
    assert "Stopped while image features were computed" in capsys.readouterr().out
    assert encoded == [8]
    monkeypatch.setattr(FrozenTower, "encode", lambda *args: encoded.append(len(args[1])) or encode(*args))
    train(settings)
    assert encoded == [8] * 5


@pytest.mark.parametrize("apart", [0, 3])  # seconds, of two requests
def test_a_second_ctrl_c_stops_at_once_but_not_one_that_a_launcher_forwards(world, tmp_path, monkeypatch, apart):
    steps = []

    def interrupted(*arguments):
        steps.append(0)
        for now in (100, 100 + apart):
            monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda now=now: now))
            os.kill(os.getpid(), signal.SIGINT)
        return backward(*arguments)

    monkeypatch.setattr(loop, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt) if apart else nullcontext():
        assert train(config(world, tmp_path)) is None
    assert len(steps) == 1
    checkpoints = [path.name for path in tmp_path.glob("checkpoint*")]
    assert checkpoints == ([] if apart else ["checkpoint-00000001"])


def test_tensorboard_has_what_the_log_has(world, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(config(world, tmp_path, trackers=["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "debias-diffusion")).Reload()
    logged = {line["step"]: line["loss"] for line in log(tmp_path) if "loss" in line}
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(logged)
    assert [event.step for event in events.Scalars("t2i_r1")] == [0, 3, 6, 7]


def test_a_tracker_that_is_not_installed_is_named(world, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="'wandb' is not installed. `pip install wandb`"):
        train(config(world, tmp_path, trackers=["wandb"]))


def test_jsonl_and_shards_make_the_same_run_as_a_folder(world, finished_run, tmp_path):
    entries = json.loads(Path(world[1]).read_text())
    lines = [{"image": e["image"], "caption": e["conversations"][1]["value"]} for e in entries]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train(config((world[0], str(tmp_path / "data.jsonl"), world[2]), tmp_path / "jsonl"))
    (tmp_path / "shards").mkdir()
    for start in (0, 12):
        with tarfile.open(tmp_path / "shards" / f"{start:03}.tar", "w") as shard:
            for number, line in enumerate(lines[start : start + 12]):
                sidecar = json.dumps({"id": line["image"], "caption": line["caption"]}).encode()
                for ending, content in (("png", Path(world[2], line["image"]).read_bytes()), ("json", sidecar)):
                    member = tarfile.TarInfo(f"{number:05}.{ending}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
    train(config((world[0], str(tmp_path / "shards"), None), tmp_path / "tar"))
    for name in ("jsonl", "tar"):
        assert same_weights(tmp_path / name, finished_run)


def test_epochs_have_every_pair_and_a_stand_in_that_no_worker_process_or_restart_changes(world, tmp_path, capsys):
    data, images = make_tiny_data(tmp_path / "world", count=38)
    Path(images, "17.png").write_text("not an image")
    whole = (world[0], data, images)
    settings = dict(max_steps=None, epochs=2, max_bad=0.05)
    train(config(whole, tmp_path / "run", **settings))
    out = capsys.readouterr().out
    assert "32 to train on; 6 held out" in out and "8 of 8 pairs (2.00 epochs)" in out
    replaced = [json.loads(line) for line in (tmp_path / "run" / "bad-records.jsonl").read_text().splitlines()]
    assert len(replaced) == 1 and "17.png" in str(replaced)
    # killed in the last of eight steps, and continued with worker processes
    train(config(whole, killed_copy(tmp_path / "run", tmp_path / "again", 8), workers=2, **settings))
    is_the_same_run(tmp_path / "again", tmp_path / "run")


def test_captions_that_cannot_be_used_are_named_once_and_too_many_stop_the_run(world, tmp_path):
    data, images = make_tiny_data(tmp_path / "world")
    entries = json.loads(Path(data).read_text())
    entries[9]["conversations"][1]["value"] = " "
    Path(data).write_text(json.dumps(entries))
    settings = config((world[0], data, images), tmp_path / "run", max_steps=1, max_bad=0)
    with pytest.raises(UserError, match="1 of 24 records cannot be used"):
        train(settings)
    named = (tmp_path / "run" / "bad-records.jsonl").read_text().splitlines()
    assert [json.loads(line)["where"] for line in named] == ["entry 9"]
    settings = replace(settings, max_bad=0.01, output=str(tmp_path / "allowed"))
    for _ in range(2):
        train(settings)
    assert len((tmp_path / "allowed" / "bad-records.jsonl").read_text().splitlines()) == 1


def test_check_data_reads_everything_and_trains_nothing(world, tmp_path, capsys):
    data, images = make_tiny_data(tmp_path / "world")
    assert train(config((world[0], data, images), tmp_path / "run", check_data=True)) is None
    assert "24 of 24 pairs can be used" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    Path(images, "7.png").write_text("not an image")
    with pytest.raises(UserError, match=r"1 of 24 records cannot be used.*--max-bad"):
        train(config((world[0], data, images), tmp_path / "run", check_data=True, max_bad=0))
    assert "7.png: unreadable image" in capsys.readouterr().out
    assert len((tmp_path / "run" / "bad-records.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_captions_are_counted_for_the_context_length_that_is_trained(world, finished_run, tmp_path):
    stretched = str(finished_run / "last")
    for model, settings, length in ((world[0], {}, 248), (world[0], {"keep_positions": 0}, 308), (stretched, {}, 248)):
        run = config((model, *world[1:]), tmp_path, **settings)
        expected = prepare_backbone(load_base_model(run), run).tokenizer.context_length
        assert load_base_tokenizer(run).context_length == expected == length


def test_check_data_compares_shards_with_their_checksums(world, tmp_path, capsys):
    shards = tmp_path / "shards"
    write_shards(ShardsConfig(data=world[1], images=world[2], output=str(shards), size=32, per_shard=12))
    settings = config((world[0], str(shards), None), tmp_path / "run", check_data=True)
    train(settings)
    assert "24 of 24 pairs can be used" in capsys.readouterr().out
    with open(shards / "shard-000001.tar", "r+b") as file:
        file.seek(600)  # within the first image: a byte that decoding may well not notice
        byte = file.read(1)
        file.seek(600)
        file.write(bytes([byte[0] ^ 1]))
    train(replace(settings, max_bad=0.5))
    assert "shard-000001.tar: changed shard" in capsys.readouterr().out


def test_bad_settings_are_named(world, tmp_path):
    def refused(message, **settings):
        with pytest.raises(UserError, match=message):
            train(replace(config(world, tmp_path / "run"), **settings))

    refused("24 usable pairs less 17 held out leave 7.*--keep-best", keep_best=11)
    refused("Unknown sampling 'randm'. Did you mean random", sampling="randm")
    refused("components is 8, but must be at least 1 and less than 7", components=8)
    refused("24 usable pairs less 20 held out leave 4", validation=20)
    with pytest.raises(UserError, match="'ViT-B16' is not there. Did you mean ViT-B-16"):  # before data are looked for
        config(("ViT-B16", "/nowhere.json", "/nowhere"), tmp_path / "run")
    refused("batch normalisation", model="RN50-quickgelu", pretrained="none")
    refused("keep_positions is 76, but must be at most 75", keep_positions=76)
    refused("'ViT-B-16' is an open_clip model without weights.*--pretrained WEIGHTS.*laion2b.*none", model="ViT-B-16")
    refused("brings its own weights; leave out 'none'", pretrained="none")
    refused("'toy/long-clip' is not in open_clip's layout, so it cannot be trained", model="toy/long-clip")
    refused("'/nowhere.json' (is|are) not there", data="/nowhere.json")
    refused("Image folder '/nowhere' is not there", images="/nowhere")
    refused("holds none of the images, for example '6.png'", images=str(tmp_path))
    (tmp_path / "file").touch()
    refused("cannot be made", output=str(tmp_path / "file"))


def test_random_weights_are_asked_for(world, tmp_path):
    with registered(tmp_path / "configs", Tiny=CONFIG):
        settings = config(("Tiny", *world[1:]), tmp_path / "run", pretrained="none", max_steps=1)
        with pytest.raises(UserError, match=r"'Tiny' is an open_clip model without weights.*\(no tags"):
            replace(settings, pretrained=None)
        train(replace(settings, check_data=True))  # of which only captions' lengths are counted
        assert train(settings) == tmp_path / "run" / "last"


def test_toy_scenes_are_trained_on_at_the_defaults(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        loop._Training, "make_steps", lambda run, request: run.print_plan(0)
    )  # 9 steps of 256 would take long
    train(TrainConfig(data="toy/train-2", model="toy/clip", output=str(tmp_path), workers=0))
    assert "900 to train on; 100 held out (auto" in capsys.readouterr().out


@pytest.mark.parametrize(("records", "held_out"), [(1_200_000, 1000), (10_000, 1000), (9_999, 999), (24, 2), (5, 0)])
def test_held_out_pairs_are_the_first_thousand_but_at_most_a_tenth(world, tmp_path, records, held_out):
    assert held_out_count(config(world, tmp_path, validation="auto"), records) == held_out
    assert held_out_count(config(world, tmp_path, validation=1000), records) == 1000


def test_too_small_a_disk_is_noticed_before_the_run(world, small_disk):
    with pytest.raises(UserError, match=r"needs about 0\.[1-9] GB on the disk .* and 0.0 GB are free"):
        train(config(world, small_disk / "run", keep=200))
    # Nothing was begun there, so that other settings may try.
    train(config(world, small_disk / "run", seed=1, max_steps=1, keep=1))


def test_the_images_pass_open_clips_validation_transform(world):
    backbone = load_backbone(world[0])
    image = Image.new("RGB", (50, 40), (255, 0, 0))
    _, _, transform = open_clip.create_model_and_transforms(f"local-dir:{world[0]}")
    assert torch.equal(backbone.preprocess(image), transform(image))


# ---- runs that continue from what was changed, damaged or left unfinished since they stopped


def test_another_base_model_at_the_same_place_is_refused(world, finished_run, tmp_path):
    model, run = str(tmp_path / "base"), killed_copy(finished_run, tmp_path / "run")
    shutil.copytree(world[0], model)
    tiny_clip(seed=1).save(model)
    with pytest.raises(UserError, match="The base model is another one, by its contents"):
        train(config((model, *world[1:]), run))
    # Other preprocessing is another base model too.
    shutil.copytree(world[0], model, dirs_exist_ok=True)
    file = Path(model, "open_clip_config.json")
    before = json.loads(file.read_text())
    file.write_text(json.dumps(before | {"preprocess_cfg": before["preprocess_cfg"] | {"mean": [0.1, 0.2, 0.3]}}))
    with pytest.raises(UserError, match="The base model is another one, by its contents"):
        train(config((model, *world[1:]), run))
    file.write_text(json.dumps(before))
    train(config((model, *world[1:]), run))
    is_the_same_run(run, finished_run)


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
    # With that limit it is bound by no other setting less.
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


def test_damaged_lines_of_the_logs_are_left_out_and_the_others_kept(world, finished_run, tmp_path):
    run = killed_copy(finished_run, tmp_path / "run")
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    damaged = [b"\xff\xfe\x00\n", b'{"loss": 1}\n', b"[]}\n", b'{"step": "1"}\n', b"{" * 100_000 + b"}\n"]
    (run / "log.jsonl").write_bytes(b"".join([lines[0], *damaged, *lines[1:], b'{"step": 1']))
    (run / "not-finite.jsonl").write_bytes(b"\x80}\n")
    train(config(world, run))
    is_the_same_run(run, finished_run)
    assert (run / "not-finite.jsonl").read_bytes() == b""


@pytest.mark.parametrize("name", ["log.jsonl", "not-finite.jsonl", "job.json", "items.jsonl"])
def test_a_pipe_in_the_place_of_a_file_ends_a_run_at_once(world, tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises((UserError, OSError), match="not a regular file|no regular file"):
        train(config(world, tmp_path))
