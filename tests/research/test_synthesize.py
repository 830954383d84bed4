"""`synthesize` with a server that knows four scenes: what is asked, kept, counted, refused and continued."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import openai_server
from PIL import Image

from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.data.shards import verify_shards
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.toyworld.grammar import short_prompt
from debias_diffusion.toyworld.render import render
from research.options import SynthesizeConfig
from research.synthesize import command
from research.synthesize.cleaning import fault
from research.synthesize.command import synthesize
from research.synthesize.instructions import LONG


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """(image folder, data file, {name: the caption that the server gives})"""
    folder, learned = tmp_path_factory.mktemp("scenes"), {}
    for index, number in enumerate((0, 3, 4, 8)):
        name, (scene, caption) = f"part{index % 2}/{index}.png", short_prompt("development", number)
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        render(scene).save(folder / "images" / name)
        learned[name] = caption.text
    lines = (json.dumps({"image": name, "caption": f"A photo of {name}."}) for name in learned)
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return str(folder / "images"), str(folder / "pairs.jsonl"), learned


@pytest.fixture(scope="module")
def server(scenes):
    """(address, requests so far)"""
    known = {text: Image.open(Path(scenes[0], name)).convert("RGB") for name, text in scenes[2].items()}

    def nearest(image, *_):  # shards hold JPEGs
        text = min(known, key=lambda text: np.abs(np.subtract(known[text], image, dtype=float)).mean())
        return [{"token": text}]

    with openai_server.serve_replies(nearest) as served:
        yield served


def config(server, output, **settings):
    given = {"model": openai_server.MODEL, "server": server[0], "output": str(output), "workers": 0}
    return SynthesizeConfig(**(given | settings))


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def counts(output):
    return json.loads((output / "synthesize.json").read_text())["counts"]


def content(output):
    """The files of a finished run, but for the settings, which name the input's folders."""
    return {name: (output / name).read_bytes() for name in ("captions.jsonl", "removed.jsonl", "report.html")}


def test_each_image_is_asked_about_with_its_prompt(server, scenes, tmp_path):
    del server[1][:]
    synthesize(config(server, tmp_path / "out", images=scenes[0], batch=3, max_new_tokens=90))
    assert len(server[1]) == 4 and all(request["max_tokens"] == 90 for request in server[1])
    asked = {request["messages"][0]["content"][1]["text"] for request in server[1]}
    assert asked == {row["prompt"] for row in lines(tmp_path / "out" / "captions.jsonl")} and asked <= {*LONG}


def test_long_and_short_captions_are_written_beside_existing_ones(server, scenes, tmp_path):
    images, data, learned = scenes
    for kind in ("long", "short"):
        synthesize(config(server, tmp_path / kind, images=images, data=data, kind=kind))
        for row in lines(tmp_path / kind / "captions.jsonl"):
            whole, given = learned[row["image"]], f"A photo of {row['image']}."
            expected = (whole, given) if kind == "long" else (given, split_sentences(whole)[0])
            assert (row["caption"], row["short_caption"]) == expected


def test_shards_are_written_in_place_of_lines(server, scenes, tmp_path):
    images, data, _ = scenes
    write_shards(ShardsConfig(data=data, images=images, output=str(tmp_path / "shards"), size=64, workers=0))
    settings = config(server, tmp_path / "out", data=str(tmp_path / "shards"), per_part=3)
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


def test_what_train_refuses_is_neither_read_nor_kept(server, scenes, tmp_path, monkeypatch):
    unusable = "Half an emoji: \ud83d."
    images, data, learned = scenes
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"image": "part0/0.png", "caption": unusable}) + "\n" + Path(data).read_text())
    (bad,) = open_data(str(pairs), images)[0].bad
    assert bad.where == "line 1" and bad.kind.endswith("in a caption")
    texts = [f"{text} {unusable}" if index == 2 else text for index, text in enumerate(learned.values())]
    monkeypatch.setattr(command.Captioner, "describe", lambda *_: texts)
    synthesize(config(server, tmp_path / "out", images=images, data=str(pairs)))
    assert counts(tmp_path / "out") == {"images": 5, "kept": 3, "removed": {"meaningless": 1}, "unreadable": 1}
    assert [row["reason"] for row in lines(tmp_path / "out" / "removed.jsonl")] == [f"meaningless: {bad.kind}"]
    captions, _ = open_data(str(tmp_path / "out" / "captions.jsonl"), images)
    assert len(captions.records) == 3 and captions.bad == [] and all(record.short for record in captions.records)


def test_edited_and_swapped_captions_are_not_published(server, scenes, tmp_path, monkeypatch):
    settings = config(server, tmp_path / "out", images=scenes[0], per_part=2)
    synthesize(settings)
    with pytest.raises(UserError, match="seed"):
        synthesize(replace(settings, seed=1))
    before, (first, second) = content(tmp_path / "out"), sorted((tmp_path / "out" / "parts").iterdir())
    whole = first.read_bytes(), second.read_bytes()
    for edited in ((whole[0].replace(b"caption", b"no", 1), whole[1]), whole[::-1]):
        first.write_bytes(edited[0])
        second.write_bytes(edited[1])
        synthesize(settings)
        assert content(tmp_path / "out") == before
    # while others are written
    monkeypatch.setattr(command._Synthesis, "_make", lambda *_: first.write_bytes(whole[1]))
    with pytest.raises(UserError, match="part-000000.jsonl' is damaged"):
        synthesize(settings)
    assert content(tmp_path / "out") == before
