"""`synthesize` with a tiny LLaVA-NeXT, random or taught four scenes: what is kept, counted, refused and continued."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import openai_server, tiny_llava
from PIL import Image

from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.data.shards import verify_shards
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.text.sentences import split_sentences
from research.synthesize import command
from research.synthesize.chat_model import Asked, ChatModel, Server, answers
from research.synthesize.cleaning import fault
from research.synthesize.command import synthesize
from research.synthesize.instructions import LONG
from research.synthesize.options import SynthesizeConfig


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a model that knows four scenes and of a random one."""
    folder = tmp_path_factory.mktemp("models")
    assert tiny_llava.build(folder / "taught") < 0.5
    tiny_llava.build(folder / "random", steps=0)
    return {name: str(folder / name) for name in ("taught", "random")}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """(image folder, data file, {name: the caption that the model has learned})"""
    folder, learned = tmp_path_factory.mktemp("scenes"), {}
    for index, (image, caption) in enumerate(zip(*tiny_llava.scenes(), strict=True)):
        name = f"part{index % 2}/{index}.png"
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / "images" / name)
        learned[name] = caption
    lines = (json.dumps({"image": name, "caption": f"A photo of {name}."}) for name in learned)
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return str(folder / "images"), str(folder / "pairs.jsonl"), learned


def config(model, output, **settings):
    return SynthesizeConfig(**({"model": model, "output": str(output), "workers": 0, "device": "cpu"} | settings))


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def counts(output):
    return json.loads((output / "synthesize.json").read_text())["counts"]


def content(output):
    """The files of a finished run, but for the settings, which name the input's folders."""
    return {name: (output / name).read_bytes() for name in ("captions.jsonl", "removed.jsonl", "report.html")}


def test_batches_give_what_single_images_give_and_answers_are_greedy_and_cut(models):
    rng, sizes = np.random.default_rng(0), [(48, 48), (100, 40), (64, 64), (40, 100), (30, 30), (90, 30), (50, 50)]
    images = [Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)) for width, height in sizes]
    mixed = [Asked(image, LONG[3 * index % 20], index) for index, image in enumerate(images)]
    batched, single = (ChatModel(models["taught"], torch.device("cpu"), "fp32", batch) for batch in (3, 1))
    assert len({batched.shapes(image.size) for image in images}) == 2  # tiles, in an order that no batch size fits
    texts = dict(answers(batched, mixed, 20))
    assert texts == dict(answers(single, mixed, 20)) and len({*texts.values()}) > 1
    for index, text in answers(batched, mixed, 1):
        assert texts[index].startswith(text) and len(text) < len(texts[index])


def test_a_server_is_asked_as_a_model_is(models):
    alone = ChatModel(models["taught"], torch.device("cpu"), "fp32", 2)
    asked = [Asked(image, LONG[0], index) for index, image in enumerate(tiny_llava.scenes()[0])]
    with openai_server.serve(alone.model, alone.processor) as (url, requests):
        served = dict(answers(Server(url, openai_server.MODEL, 3), asked, 1))
    assert served == dict(answers(alone, asked, 1)) and len(requests) == len(asked)
    assert all(request["max_tokens"] == 1 for request in requests)


def test_long_and_short_captions_are_written_beside_existing_ones(models, scenes, tmp_path):
    images, data, learned = scenes
    for kind in ("long", "short"):
        synthesize(config(models["taught"], tmp_path / kind, images=images, data=data, kind=kind))
        for row in lines(tmp_path / kind / "captions.jsonl"):
            whole, given = learned[row["image"]], f"A photo of {row['image']}."
            expected = (whole, given) if kind == "long" else (given, split_sentences(whole)[0])
            assert (row["caption"], row["short_caption"]) == expected


def test_shards_are_written_in_place_of_lines(models, scenes, tmp_path):
    images, data, _ = scenes
    write_shards(ShardsConfig(data=data, images=images, output=str(tmp_path / "shards"), size=64, workers=0))
    settings = config(models["taught"], tmp_path / "out", data=str(tmp_path / "shards"), per_part=3)
    synthesize(settings)
    (before, originals), (after, copies) = (open_data(str(tmp_path / name)) for name in ("shards", "out"))
    assert not after.bad and not verify_shards(tmp_path / "out") and after.records
    assert len(lines(tmp_path / "out" / "removed.jsonl")) == 4 - len(after.records)
    places = {record.sample_id: record.image for record in before.records}
    for record in after.records:
        assert copies.read(record.image) == originals.read(places[record.sample_id])  # byte for byte
        assert fault(record.caption) is None and record.short == f"A photo of {record.sample_id}."
    files = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")}
    assert len(files) == 2 and not (tmp_path / "out" / "captions.jsonl").exists()
    (tmp_path / "out" / "shard-000001.tar").unlink()
    synthesize(settings)
    assert files == {path: path.read_bytes() for path in files}


def test_what_train_refuses_is_neither_read_nor_kept(models, scenes, tmp_path, monkeypatch):
    unusable = "Half an emoji: \ud83d."
    images, data, learned = scenes
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"image": "part0/0.png", "caption": unusable}) + "\n" + Path(data).read_text())
    (bad,) = open_data(str(pairs), images)[0].bad
    assert bad.where == "line 1" and bad.kind.endswith("in a caption")
    texts = [f"{text} {unusable}" if index == 2 else text for index, text in enumerate(learned.values())]
    monkeypatch.setattr(command, "answers", lambda model, asked, most: [(one.index, texts[one.index]) for one in asked])
    synthesize(config(models["random"], tmp_path / "out", images=images, data=str(pairs)))
    assert counts(tmp_path / "out") == {"images": 5, "kept": 3, "removed": {"meaningless": 1}, "unreadable": 1}
    assert [row["reason"] for row in lines(tmp_path / "out" / "removed.jsonl")] == [f"meaningless: {bad.kind}"]
    captions, _ = open_data(str(tmp_path / "out" / "captions.jsonl"), images)
    assert len(captions.records) == 3 and captions.bad == [] and all(record.short for record in captions.records)


def test_code_of_a_model_is_not_run(models, scenes, tmp_path):
    unknown = shutil.copytree(models["random"], tmp_path / "unknown")
    settings = json.loads((unknown / "config.json").read_text())
    settings |= {"model_type": "other", "auto_map": {"AutoConfig": "code.OtherConfig"}}
    (unknown / "config.json").write_text(json.dumps(settings))
    (unknown / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match="is not run"):
        synthesize(config(str(unknown), tmp_path / "out", images=scenes[0]))


def test_edited_and_swapped_captions_are_not_published(models, scenes, tmp_path, monkeypatch):
    settings = config(models["taught"], tmp_path / "out", images=scenes[0], per_part=2)
    synthesize(settings)
    with pytest.raises(UserError, match="contents of model: "):
        synthesize(replace(settings, model=models["random"]))
    before, (first, second) = content(tmp_path / "out"), sorted((tmp_path / "out" / "parts").iterdir())
    whole = first.read_bytes(), second.read_bytes()
    for edited in ((whole[0].replace(b"caption", b"no", 1), whole[1]), whole[::-1]):
        first.write_bytes(edited[0])
        second.write_bytes(edited[1])
        synthesize(settings)
        assert content(tmp_path / "out") == before
    # while others are written
    monkeypatch.setattr(command._Synthesis, "_made", lambda *_: [first.write_bytes(whole[1])][:0])
    with pytest.raises(UserError, match="part-000000.jsonl' is damaged"):
        synthesize(settings)
    assert content(tmp_path / "out") == before
