"""`synthesize` with a tiny LLaVA-NeXT, random or taught four scenes: what is kept, counted, refused and continued."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_llava
from helpers.html_page import Page
from PIL import Image
from transformers import CLIPConfig, CLIPModel

from debias_diffusion.app.cli import main
from debias_diffusion.app.options import SynthesizeConfig
from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.app.synthesize import command
from debias_diffusion.app.synthesize.captioner import Asked, Captioner
from debias_diffusion.app.synthesize.cleaning import fault
from debias_diffusion.app.synthesize.command import synthesize
from debias_diffusion.app.synthesize.instructions import LONG, SHORT, draw_instruction
from debias_diffusion.data.shards import verify_shards
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.sentences import split_sentences
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.loop import train


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a model that knows four scenes and of a random one."""
    folder = tmp_path_factory.mktemp("models")
    loss = tiny_llava.build(folder / "taught")
    assert loss < 0.5
    tiny_llava.build(folder / "random", steps=0)
    return {name: str(folder / name) for name in ("taught", "random")}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """(image folder, data file, {name: the caption that the model has learned}); the data has short captions."""
    folder = tmp_path_factory.mktemp("scenes")
    images, captions = tiny_llava.scenes()
    names = [f"part{index % 2}/{index}.png" for index in range(len(images))]
    lines = []
    for name, image in zip(names, images, strict=True):
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / "images" / name)
        lines.append(json.dumps({"image": name, "caption": f"A photo of {name}."}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return str(folder / "images"), str(folder / "pairs.jsonl"), dict(zip(names, captions, strict=True))


def config(model, output, **settings):
    return SynthesizeConfig(**({"model": model, "output": str(output), "workers": 0, "device": "cpu"} | settings))


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def content(output):
    """The files of a finished run, but for the settings, which name the input's folders."""
    names = ("captions.jsonl", "removed.jsonl", "report.html")
    return {name: (Path(output) / name).read_bytes() for name in names}


# ---- the model


@pytest.fixture(scope="module")
def mixed():
    """Images that the processor makes two and three tiles of, in an order that no batch size fits."""
    rng, sizes = np.random.default_rng(0), [(48, 48), (100, 40), (64, 64), (40, 100), (30, 30), (90, 30), (50, 50)]
    images = [Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)) for width, height in sizes]
    return [Asked(index, image, LONG[3 * index % 20]) for index, image in enumerate(images)]


def test_batches_give_what_single_images_give(models, mixed):
    batched = Captioner(models["taught"], torch.device("cpu"), "fp32", 20, batch=3)
    single = Captioner(models["taught"], torch.device("cpu"), "fp32", 20, batch=1)
    assert len({batched.shapes(asked.image.size) for asked in mixed}) == 2
    answers = dict(batched.captions(mixed))
    assert answers == dict(single.captions(mixed)) and len(answers) == len(mixed) and len(set(answers.values())) > 1
    order = [index for index, _ in batched.captions(mixed)]
    assert sorted(order) == list(range(7)) and order != sorted(order)  # a batch when it is full, then the rest


def test_pads_on_the_right_would_change_answers(models, mixed):
    captioner = Captioner(models["taught"], torch.device("cpu"), "fp32", 20, batch=4)
    alike = [asked for asked in mixed if captioner.shapes(asked.image.size) == captioner.shapes(mixed[0].image.size)]
    answers = dict(captioner.captions(alike))
    captioner.pipeline.tokenizer.padding_side = "right"  # as this tokenizer is saved
    assert dict(captioner.captions(alike)) != answers


def test_answers_are_greedy_and_cut(models, mixed):
    short, long = (Captioner(models["taught"], torch.device("cpu"), "fp32", most, batch=2) for most in (1, 7))
    short, long = ([text for _, text in captioner.captions(mixed[:2])] for captioner in (short, long))
    assert all(text.startswith(first) and len(first) < len(text) for first, text in zip(short, long, strict=True))


# ---- what is left


def test_a_taught_model_leaves_pairs_that_train_reads(models, scenes, world, tmp_path, capsys):
    images, _, learned = scenes
    synthesize(config(models["taught"], tmp_path / "out", images=images, batch=3, workers=1))
    printed = capsys.readouterr().out
    assert "Kept 4 captions of 4 images; removed 0, unreadable 0." in printed
    rows = lines(tmp_path / "out" / "captions.jsonl")
    assert [row["image"] for row in rows] == sorted(learned)
    assert {row["image"]: row["caption"] for row in rows} == learned
    assert all(row["prompt"] == draw_instruction("long", 0, row["image"]) for row in rows)
    assert not any("short_caption" in row for row in rows)
    assert f"train --data {tmp_path / 'out' / 'captions.jsonl'} --images {images}" in printed
    data = str(tmp_path / "out" / "captions.jsonl")
    assert train(TrainConfig(data=data, images=images, model=world[0], output=str(tmp_path), check_data=True)) is None
    checked = capsys.readouterr().out
    assert "4 of 4 pairs can be used" in checked and "of the captions begin with a summary" in checked
    settings = json.loads((tmp_path / "out" / "synthesize.json").read_text())
    assert settings["counts"] == {"images": 4, "kept": 4, "removed": {}, "unreadable": 0}
    assert settings["versions"]["transformers"] and settings["captions"]["captions"] == 4


def test_the_page_shows_images_captions_and_what_was_removed(models, scenes, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(scenes[0], images)
    shutil.copy(images / "part0" / "0.png", images / "<b>&.png")
    synthesize(config(models["taught"], tmp_path / "out", images=str(images), max_new_tokens=60))
    synthesize(config(models["random"], tmp_path / "bad", images=str(images), max_new_tokens=60))
    source, bad = ((tmp_path / name / "report.html").read_text() for name in ("out", "bad"))
    assert source.count("data:image/jpeg;base64,") == 5 and "<b>&" not in source and "&lt;b&gt;&amp;.png" in source
    assert scenes[2]["part1/1.png"] in source and "Removed captions" not in source and "25 to 49" in source
    for page in (source, bad):
        Page(page).check_is_self_contained()
    removed = lines(tmp_path / "bad" / "removed.jsonl")
    assert "Removed captions" in bad and "Some of the kept" not in bad
    assert removed[0]["reason"].partition(":")[0] in bad and "default-src 'none'" in bad


def test_a_random_models_captions_are_all_removed_and_counted(models, scenes, tmp_path, capsys):
    synthesize(config(models["random"], tmp_path, images=scenes[0], max_new_tokens=40))
    removed = lines(tmp_path / "removed.jsonl")
    assert [row["image"] for row in removed] == sorted(scenes[2]) and not lines(tmp_path / "captions.jsonl")
    kinds = Counter(row["reason"].partition(":")[0] for row in removed)
    counts = json.loads((tmp_path / "synthesize.json").read_text())["counts"]
    assert counts == {"images": 4, "kept": 0, "removed": dict(kinds), "unreadable": 0}
    assert kinds.keys() <= {"repeated", "meaningless", "short"} and all("text" in row for row in removed)
    assert "Nothing is left to train on" in capsys.readouterr().out


def test_an_existing_caption_becomes_the_short_one(models, scenes, tmp_path):
    images, data, learned = scenes
    synthesize(config(models["taught"], tmp_path / "out", images=images, data=data))
    rows = {row["image"]: row for row in lines(tmp_path / "out" / "captions.jsonl")}
    assert {name: row["caption"] for name, row in rows.items()} == learned
    assert all(row["short_caption"] == f"A photo of {name}." for name, row in rows.items())


UNUSABLE = ("Half an emoji: \ud83d.", "A \x00 cat.", "A \x1b[31mred cat.", "A \x7f cat.")


@pytest.mark.parametrize("unusable", UNUSABLE)
def test_what_train_refuses_is_neither_read_nor_kept(models, scenes, tmp_path, monkeypatch, unusable):
    images, data, learned = scenes
    bad = [json.dumps({"image": "part0/0.png", "caption": unusable}), Path(data).read_text()]
    (tmp_path / "pairs.jsonl").write_text("\n".join(bad))
    (fault,) = open_data(str(tmp_path / "pairs.jsonl"), images)[0].bad
    assert fault.where == "line 1" and fault.kind.endswith("in a caption")

    def written(self, asked):
        texts = list(learned.values())
        return [(one.index, texts[one.index] + f" {unusable}" * (one.index == 2)) for one in asked]

    monkeypatch.setattr(Captioner, "captions", written)
    synthesize(config(models["random"], tmp_path / "out", images=images, data=str(tmp_path / "pairs.jsonl")))
    counts = json.loads((tmp_path / "out" / "synthesize.json").read_text())["counts"]
    assert counts == {"images": 5, "kept": 3, "removed": {"meaningless": 1}, "unreadable": 1}
    (removed,) = lines(tmp_path / "out" / "removed.jsonl")
    assert removed["reason"] == f"meaningless: {fault.kind}"
    captions, _ = open_data(str(tmp_path / "out" / "captions.jsonl"), images)
    assert len(captions.records) == 3 and captions.bad == [] and all(record.short for record in captions.records)


def test_kind_short_writes_the_short_caption_beside_the_long_one(models, scenes, tmp_path):
    images, data, learned = scenes
    synthesize(config(models["taught"], tmp_path / "both", images=images, data=data, kind="short"))
    rows = lines(tmp_path / "both" / "captions.jsonl")
    assert all(row["caption"] == f"A photo of {row['image']}." and row["prompt"] == SHORT[0] for row in rows)
    first = {split_sentences(caption)[0] for caption in learned.values()}
    assert len(rows) == 4 and {row["short_caption"] for row in rows} <= first
    synthesize(config(models["taught"], tmp_path / "alone", images=images, kind="short"))
    rows = lines(tmp_path / "alone" / "captions.jsonl")
    assert len(rows) == 4 and {row["caption"] for row in rows} <= first
    assert not any("short_caption" in row for row in rows)


def test_pair_folders_and_shards(models, scenes, tmp_path, capsys):
    images, data, learned = scenes
    write_shards(ShardsConfig(data=data, images=images, output=str(tmp_path / "shards"), size=64, workers=0))
    settings = config(models["taught"], tmp_path / "out", data=str(tmp_path / "shards"), per_part=3)
    synthesize(settings)
    assert f"train --data {tmp_path / 'out'}, without --images" in capsys.readouterr().out
    before, after = open_data(str(tmp_path / "shards")), open_data(str(tmp_path / "out"))
    assert not after[0].bad and not verify_shards(tmp_path / "out")
    kept = [record.sample_id for record in after[0].records]
    assert kept and len(lines(tmp_path / "out" / "removed.jsonl")) == 4 - len(kept)
    originals = {record.sample_id: record.image for record in before[0].records}
    for record in after[0].records:
        assert after[1].read(record.image) == before[1].read(originals[record.sample_id])  # byte for byte
        assert fault(record.caption) is None and not record.caption.startswith("A photo")
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2 and not (tmp_path / "out" / "captions.jsonl").exists()
    files = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")}
    (tmp_path / "out" / "shard-000001.tar").unlink()
    assert [bad.kind for bad in open_data(str(tmp_path / "out"))[0].bad] == ["missing shard"]
    synthesize(settings)
    assert files == {path: path.read_bytes() for path in files}
    folder = tmp_path / "pairs"
    shutil.copytree(images, folder)
    for name in learned:
        (folder / name).with_suffix(".txt").write_text(f"A photo of {name}.")
    synthesize(config(models["taught"], tmp_path / "again", data=str(folder)))
    rows = lines(tmp_path / "again" / "captions.jsonl")
    assert {row["image"]: (row["caption"], row["short_caption"]) for row in rows} == {
        name: (caption, f"A photo of {name}.") for name, caption in learned.items()
    }


# ---- what cannot be used


def test_unreadable_images_are_named_and_too_many_stop_the_run(models, scenes, tmp_path, capsys):
    images = tmp_path / "images"
    shutil.copytree(scenes[0], images)
    (images / "z.jpg").write_bytes(b"no image")
    settings = config(models["taught"], tmp_path / "out", images=str(images), per_part=4)  # the last part is bad
    synthesize(settings)
    counts = json.loads((tmp_path / "out" / "synthesize.json").read_text())["counts"]
    assert counts == {"images": 5, "kept": 4, "removed": {}, "unreadable": 1}
    assert "z.jpg: unreadable image" in capsys.readouterr().out
    assert lines(tmp_path / "out" / "bad-records.jsonl")[0]["where"] == "z.jpg"
    strict = replace(settings, max_bad=0, output=str(tmp_path / "strict"))
    with pytest.raises(UserError, match="1 of 5 records cannot be used.*--max-bad"):
        synthesize(strict)
    synthesize(replace(strict, max_bad=0.2))  # continues
    assert content(tmp_path / "out") == content(tmp_path / "strict")
    for name in scenes[2]:
        (images / name).write_bytes(b"no image")
    synthesize(replace(settings, max_bad=1, output=str(tmp_path / "none")))
    assert "Kept 0 captions of 5 images" in capsys.readouterr().out


def test_models_that_cannot_write_captions_are_refused(models, scenes, tmp_path):
    def refused(folder, message):
        with pytest.raises(UserError, match=message):
            synthesize(config(str(folder), tmp_path / "out", images=scenes[0]))
        assert not (tmp_path / "out" / "parts").exists()

    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    CLIPModel(CLIPConfig(text_config=tower, vision_config=tower)).save_pretrained(tmp_path / "clip")
    refused(tmp_path / "clip", "no image-text-to-text model of its kind, clip. Give .*llava-hf")
    refused(tmp_path / "nowhere", "cannot be used: it is not there")
    unknown = tmp_path / "unknown"
    shutil.copytree(models["random"], unknown)
    (unknown / "chat_template.jinja").unlink()
    refused(unknown, "has no chat template")
    settings = json.loads((unknown / "config.json").read_text())
    remote = settings | {"model_type": "other", "auto_map": {"AutoConfig": "code.OtherConfig"}}
    (unknown / "config.json").write_text(json.dumps(remote))
    (unknown / "code.py").write_text("raise SystemExit('it ran')")
    refused(unknown, "Code that comes with a model is not run")
    deeper = settings | {"text_config": settings["text_config"] | {"num_hidden_layers": 3}}
    (unknown / "config.json").write_text(json.dumps(deeper))
    shutil.copy(Path(models["random"], "chat_template.jinja"), unknown)
    refused(unknown, "it lacks 9 of the model's weights")


def test_settings_and_folders_that_do_not_fit_are_refused(models, scenes, tmp_path):
    settings = config(models["random"], tmp_path / "out", images=scenes[0], max_new_tokens=5)
    synthesize(settings)
    for changes, named in (
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"kind": "short"}, "kind: 'long' there, 'short' here"),
        ({"model": models["taught"]}, "The model is another one"),
        ({"images": str(Path(scenes[0], "part1"))}, "The data is another one"),
    ):
        with pytest.raises(UserError, match=f"other settings.*{named}"):
            synthesize(replace(settings, **changes))
    synthesize(replace(settings, batch=1, workers=1))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a.txt").touch()
    (tmp_path / "empty").mkdir()
    for changes, named in (
        ({"output": str(tmp_path / "used")}, "holds something else"),
        ({"output": str(tmp_path / "used" / "a.txt")}, "is a file"),
        ({"images": str(tmp_path / "empty")}, "holds no images"),
        ({"images": str(tmp_path / "nowhere")}, "is not there"),
    ):
        with pytest.raises(UserError, match=named):
            synthesize(replace(settings, **({"output": str(tmp_path / "new")} | changes)))
    assert not (tmp_path / "new").exists()


def test_edited_and_swapped_captions_are_not_published(models, scenes, tmp_path, monkeypatch):
    settings = config(models["taught"], tmp_path / "out", images=scenes[0], per_part=2)
    synthesize(settings)
    before, (first, second) = content(tmp_path / "out"), sorted((tmp_path / "out" / "parts").iterdir())
    first.write_bytes(first.read_bytes().replace(b"caption", b"no", 1))
    synthesize(settings)
    assert content(tmp_path / "out") == before
    swapped = second.read_bytes(), first.read_bytes()
    first.write_bytes(swapped[0]), second.write_bytes(swapped[1])
    synthesize(settings)
    assert content(tmp_path / "out") == before

    def edit(*_):  # while the rest is written
        first.write_bytes(second.read_bytes())

    monkeypatch.setattr(command._Synthesis, "_write", edit)
    with pytest.raises(UserError, match="part-000000.jsonl' is damaged"):
        synthesize(settings)
    assert content(tmp_path / "out") == before


# ---- as it is started


def test_both_forms_as_a_newcomer_types_them(models, world, tmp_path, capsys):
    photographs = tmp_path / "photographs"
    photographs.mkdir()
    from skimage import data_dir

    for name in ("rocket.jpg", "coffee.png", "camera.png", "horse.png", "chelsea.png"):
        shutil.copy(Path(data_dir, name), photographs)
    pairs = str(Path(__file__).parent / "photographs" / "captions.json")
    forms = (["--images", str(photographs)], ["--data", pairs, "--images", str(photographs), "--max-bad", "1"])
    for number, form in enumerate(forms):
        output = tmp_path / str(number)
        main(["synthesize", "--model", models["taught"], *form, "--output", str(output), "--device", "cpu"])
        removed, kept = lines(output / "removed.jsonl"), lines(output / "captions.jsonl")
        assert kept and len(kept) + len(removed) == len(list(photographs.iterdir())) - number
        check = ["train", "--data", str(output / "captions.jsonl"), "--images", str(photographs)]
        main([*check, "--model", world[0], "--output", str(tmp_path / "run"), "--check-data"])
        assert f"{len(kept)} of {len(kept)} pairs can be used" in capsys.readouterr().out
