"""Recall at k against brute force and closed forms, and a retrieval evaluation on real photographs."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import skimage
import torch
from helpers.literal import literal_ranks
from helpers.tiny_clip import byte_tokenizer, save_tiny_clip
from helpers.training_runs import config as train_config
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.app.export import export
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.json_files import read_data_file
from debias_diffusion.data.retrieval import recall_at_k, recall_ranks
from debias_diffusion.data.seen import read_seen
from debias_diffusion.data.sources import data_digest, read_captions
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.eval import retrieval
from debias_diffusion.eval.attention import AttentionConfig, evaluate_attention
from debias_diffusion.eval.image_features import PairSession
from debias_diffusion.eval.intervals import hits_interval
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.files import path_digest
from debias_diffusion.training.two_tower import train
from research.ablate.command import ablate
from research.options import AblateConfig

PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("tiny-clip"), tokenizer=byte_tokenizer(77))


def rows(count):
    """Small whole numbers, so that exact ties, duplicates and zero vectors are frequent."""
    return st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=count, max_size=count)


# Images, the captions' images and captions: one caption for each image, or one to three in any order.
one_each = st.integers(1, 12).flatmap(lambda n: st.tuples(rows(n), st.none(), rows(n)))
several = st.lists(st.integers(1, 3), min_size=1, max_size=6).flatmap(
    lambda counts: st.tuples(
        rows(len(counts)),
        st.permutations([image for image, count in enumerate(counts) for _ in range(count)]),
        rows(sum(counts)),
    )
)


@settings(max_examples=100)
@given(one_each | several, st.integers(1, 14))
def test_ranks_equal_brute_force_with_ties_for_any_block(drawn, block):
    images, image_of, texts = drawn
    images, texts = torch.tensor(images).float(), torch.tensor(texts).float()
    owners = range(len(texts)) if image_of is None else image_of
    got = recall_ranks(images, texts, block, image_of)
    assert tuple(ranks.tolist() for ranks in got.values()) == literal_ranks(images, texts, owners)


def test_duplicates_count_as_ties():
    rows = torch.nn.functional.normalize(torch.randn(10, 64, generator=torch.Generator().manual_seed(2)), dim=1)
    twice = torch.cat([rows, rows * (1 + 1e-7)])  # even after rounding to single precision
    got = recall_at_k(twice, twice, ks=(1, 2))
    assert got == {"text_to_image": {"R@1": 0.0, "R@2": 100.0}, "image_to_text": {"R@1": 0.0, "R@2": 100.0}}


def one_by_one(backbone, records, images):
    with torch.no_grad():
        pixels = [backbone.preprocess(images.open(record.image))[None] for record in records]
        texts = [backbone.encode_text(backbone.tokenize([record.caption])) for record in records]
        return torch.cat([backbone.encode_image(image) for image in pixels]), torch.cat(texts)


def settings_of(tmp_path, *encoders, **changes) -> RetrievalConfig:
    settings = {"data": str(PHOTOGRAPHS), "images": skimage.data_dir, "output": str(tmp_path / "out"), "batch_size": 4}
    return RetrievalConfig(list(encoders), **(settings | changes))


def test_the_report_holds_numbers_and_left_out_pairs(tiny_clip, tmp_path):
    entries = json.loads(PHOTOGRAPHS.read_text())
    data = tmp_path / "data.json"
    data.write_text(json.dumps([entries[0], dict(entries[0], image="no-such.png"), {"image": "x.png"}, *entries[1:6]]))
    another = save_tiny_clip(tmp_path / r"$\x$", seed=5, tokenizer=byte_tokenizer(77))  # the figure reads no formula
    report = evaluate_retrieval(settings_of(tmp_path, tiny_clip, another, data=str(data), limit=6))
    assert report == json.loads((tmp_path / "out" / "retrieval.json").read_text())
    assert report["images"] == report["captions"] == 5 and report["digests"]["data"] == path_digest(data)
    assert [bad["kind"] for bad in report["left_out"]] == ["no caption", "missing image"]
    first, second = report["encoders"]
    assert second == r"$\x$" and list(report["digests"]["encoders"]) == [first, second]
    recalls = []
    for name, numbers in zip((tiny_clip, another), report["encoders"].values(), strict=True):
        backbone, records = load_backbone(name).eval(), read_data_file(PHOTOGRAPHS).records[:5]
        recalls.append(recall_at_k(*one_by_one(backbone, records, ImageFolder(skimage.data_dir))))
        assert numbers["recall_percent"] == recalls[-1]
        lengths = [backbone.tokenizer.count(record.caption) for record in records]
        assert numbers["captions_longer_than_context"] == sum(length > 77 for length in lengths) > 0
    line = report["compared"][0]
    difference = recalls[1]["text_to_image"]["R@1"] - recalls[0]["text_to_image"]["R@1"]
    assert (line["a"], line["b"], line["difference"]) == (second, first, pytest.approx(difference))


def test_toy_scenes_are_resampled_by_family_in_both_directions(tmp_path):
    config = RetrievalConfig(["toy/clip"], str(tmp_path), data="toy/test", limit=6)
    session = PairSession("retrieval", config)
    [result] = session.by_encoder(partial(retrieval.retrieve, session)).values()
    families = ["test/000000"] * 4 + ["test/000004"] * 2
    assert result["groups"] == dict.fromkeys(retrieval.DIRECTIONS, families)
    [numbers] = evaluate_retrieval(config)["encoders"].values()
    for way in retrieval.DIRECTIONS:
        for k in retrieval.KS:
            expected = hits_interval(retrieval.hits(result["ranks"][way], k), families)
            assert numbers["interval_percent"][way][f"R@{k}"] == expected


def test_mean_r_is_the_mean_of_three_recalls_with_an_interval_over_images():
    # of the captions of every other image one is first and one third; the captions of the others are not found
    images = [*"abcdef"]
    result = {"ranks": {"text_to_image": [1, 3, 20] * 3, "image_to_text": [1, 7] * 3}}
    result["groups"] = {"text_to_image": [*"aabccdeef"], "image_to_text": images}
    mean_r, limits = retrieval.mean_recall(result)
    assert mean_r == pytest.approx({"text_to_image": 500 / 9, "image_to_text": 200 / 3, "both": 550 / 9})
    # 1.6% of the samples draw no image whose captions are found, 9% draw one, and likewise of the others
    expected = {"text_to_image": [500 / 21, 2500 / 33], "image_to_text": [400 / 9, 800 / 9]}
    expected["both"] = np.mean([*expected.values()], axis=0)
    assert limits == {name: pytest.approx(interval) for name, interval in expected.items()}
    with pytest.raises(AssertionError, match="order of their images"):
        retrieval.mean_recall(result | {"groups": result["groups"] | {"image_to_text": images[::-1]}})


HELD_OUT = 6  # as in `helpers.training_runs.config`


@pytest.fixture(scope="module")
def lineage(finished_run, world, tmp_path_factory):
    """The finished run's data and others; a run from its model on the others, ablations of that one's best and of the
    finished run's base, both on the finished run's data.
    """
    folder = tmp_path_factory.mktemp("lineage")
    other = folder / "data.json"
    other.write_text(Path(world[1]).read_text() + "\n")
    base = (str(finished_run / "last"), str(other), world[2])
    train(train_config(base, folder / "run", keep_best=5, max_steps=1, eval_every=1))
    for name, model in (("ablated", str(folder / "run" / "best")), ("searched", world[0])):
        ablate(AblateConfig(model, str(folder / name), *world[1:], limit=21, search="bp", epochs=1))
    digests = [data_digest(file, read_captions(file)) for file in (world[1], other)]
    return SimpleNamespace(folder=folder, first=digests[0], other=digests[1], data=[world[1], str(other)])


def test_what_a_model_has_seen_goes_through_its_bases(lineage, tmp_path):
    def seen(path):
        return read_seen(EncoderSpec.parse(path))

    base, pairs = [(HELD_OUT, 24)], 24
    assert seen(lineage.folder / "run") == {lineage.first: base, lineage.other: [(HELD_OUT + 5, pairs)]}
    assert seen(lineage.folder / "run" / "best") == {lineage.first: base, lineage.other: base}  # it was chosen, too
    assert seen(lineage.folder / "ablated") == {lineage.first: [(0, 21), *base], lineage.other: base}
    for to in ("open_clip", "transformers", "clip"):
        export(ExportConfig(str(tmp_path / to), str(lineage.folder / "run" / "best"), to))
        assert seen(tmp_path / to) == {lineage.first: base, lineage.other: base}
    assert seen(tmp_path / "transformers" / "text_encoder") == seen(tmp_path / "transformers")
    weights = tmp_path / "open_clip" / "open_clip_model.safetensors"
    assert seen(weights) == seen(f"ViT-B-16:{weights}") == seen(tmp_path / "open_clip")


@pytest.mark.usefixtures("blank_figures")
def test_held_out_pairs_are_those_that_no_encoder_has_seen(lineage, world, tmp_path):
    """A search of heads is no training run, and the pairs that chose `best/` are seen by it alone."""
    images = str(Path(lineage.data[0]).with_name("images"))
    encoders = {name: str(lineage.folder / name) for name in ("searched", "ablated", "run/best", "run/last")}

    def evaluated(data, *names, **settings):
        given = [encoders[name] for name in names]
        return evaluate_retrieval(RetrievalConfig(given, str(tmp_path), data, images, **settings))

    first, other = lineage.data
    report = evaluated(first, "searched", "run/last")
    assert list(report["trained_on"].values()) == [21, 18] and "21 of these 24 pairs" in report["notes"][0]
    report = evaluated(first, "searched", held_out=True)
    assert report["images"] == 3 and list(report["trained_on"].values()) == [0]
    last, both = (evaluated(other, *names, held_out=True) for names in (["run/last"], ["run/last", "run/best"]))
    assert (last["images"], both["images"]) == (11, 6)
    # Evaluations that read captions alone, too.
    captions = AttentionConfig([encoders["searched"]], str(tmp_path), first, held_out=True)
    assert evaluate_attention(captions)["captions"] == 3
    encoders["base"] = world[0]
    for name, message in (("ablated", "Each of the 24 pairs of .*: ablated"), ("base", "None of the encoders was")):
        with pytest.raises(UserError, match=message):
            evaluated(first, name, held_out=True)
