"""Sentence edits, recall under them against brute force, and the share of it that is kept."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.literal import literal_ranks
from helpers.tiny_clip import byte_tokenizer, save_tiny_clip
from helpers.tiny_data import caption, make_tiny_data
from PIL import Image

from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.eval.caption_edits import EDITS, LOSING, edit_caption
from debias_diffusion.eval.intervals import hits_interval, paired_difference
from debias_diffusion.eval.options import RobustnessConfig
from debias_diffusion.eval.retrieval import DIRECTIONS
from debias_diffusion.eval.robustness import evaluate_robustness, share_difference, share_kept
from debias_diffusion.text.sentences import split_sentences

# By edit, the sentences that are left of captions of one to five; 0 is the padding.
EDITED = {
    "keep": "1 12 123 1234 12345",
    "move2": "1 21 213 2134 21345",
    "move4": "1 21 321 4231 42315",
    "remove": "1 2 23 234 2345",
    "first2": "1 12 12 12 12",
    "swap2": "1 21 21 21 21",
    "first": "1 1 1 1 1",
    "after50": "1 21 213 2314 23145",
    "after100": "1 21 231 2341 23451",
    "padding5": "000001 0000012 0000012 0000012 0000012",
}


@pytest.mark.parametrize("edit", EDITED)
def test_edits_of_one_to_five_sentences(edit):
    sentences = ["A cat sits here.", "Its fur is red!", "Is it asleep?", "The wall is 2.5 m high.", "No one is there"]
    for length, digits in enumerate(EDITED[edit].split(), 1):
        expected = " ".join(["This is a photo.", *sentences][int(digit)] for digit in digits)
        assert edit_caption(" ".join(sentences[:length]), edit) == expected


@pytest.mark.filterwarnings("error")  # samples may hold nothing to divide by
def test_share_in_closed_form():
    before, after = [100, 0, 100, 100, 0, 100] * 2, [0, 0, 100, 0, 0, 0] * 2
    found, _ = quarter = share_kept(after, before)
    assert found["share"] == 25.0 and found["low"] == 0.0 <= 25 < found["high"] <= 100
    assert share_kept(before, before)[0] == {"share": 100.0, "low": None, "high": None}  # all samples are alike
    assert share_kept([100, 0], [0, 0])[0] == {"share": None, "low": None, "high": None}
    ahead = share_difference(share_kept(before, before), quarter)
    assert ahead["difference"] == 75.0
    assert (ahead["low"], ahead["high"]) == pytest.approx((100 - found["high"], 100.0))


@pytest.fixture(scope="module")
def several(tmp_path_factory, coarse_results):
    root = tmp_path_factory.mktemp("several")
    make_tiny_data(root, 6)
    (root / "images").rename(root / "flickr30k-images")
    captions = {f"{image}.png": [caption(image), caption(10 + image), caption(image)] for image in range(5)}
    captions["1.png"][1] = "Here is one sentence"
    (root / "flickr30k-images" / "5.png").write_text("no image")
    lines = [f"{name}#{n}\t{text}\n" for name, texts in captions.items() for n, text in enumerate(texts)]
    (root / "results_20130124.token").write_text("".join([*lines, "5.png#0\tNot to be opened. Nor this.\n"]))
    settings = {"context_length": 248, "tokenizer": byte_tokenizer(248)}
    clips = [save_tiny_clip(root / f"clip-{seed}", seed=seed, **settings) for seed in range(2)]
    config = RobustnessConfig(clips, str(root), dataset="flickr30k", root=str(root), max_bad=0.2, batch_size=4)
    return SimpleNamespace(root=root, config=config, captions=captions, report=evaluate_robustness(config))


IMAGE_OF = [image for image in range(5) for _ in range(3)]
GROUPS = {"text_to_image": IMAGE_OF, "image_to_text": range(5)}


def by_hand(name: str, several) -> tuple[dict, dict]:
    """By edit, one image and one edited caption at a time, of each variant: the hits by direction, and the cosines."""
    backbone, hits, cosines = load_backbone(name).eval(), {}, {}
    paths = [several.root / "flickr30k-images" / image for image in several.captions]
    captions = [split_sentences(text) for texts in several.captions.values() for text in texts]
    with torch.no_grad():
        images = torch.cat([backbone.encode_image(backbone.preprocess(Image.open(path))[None]) for path in paths])
        for edit, kind in EDITS.items():
            hits[edit], cosines[edit] = [], []
            for variant in kind.variants:
                edited = [backbone.tokenize([" ".join(variant(list(sentences)))]) for sentences in captions]
                texts = torch.cat([backbone.encode_text(tokens) for tokens in edited])
                ranks = literal_ranks(images, texts, IMAGE_OF)
                succeeded = [[100.0 * (rank == 1) for rank in of_way] for of_way in ranks]
                hits[edit].append(dict(zip(DIRECTIONS, succeeded, strict=True)))
                cosines[edit].append(torch.cosine_similarity(images[IMAGE_OF].double(), texts.double()).tolist())
    return hits, cosines


def test_numbers_equal_brute_force_with_several_captions_an_image(several):
    report, config = several.report, several.config
    assert (report["images"], report["captions"], report["one_sentence_captions"]) == (5, 15, 1)
    assert "1 of 15 captions have a single sentence" in report["notes"][0]
    for name, numbers in zip(config.encoders, report["encoders"].values(), strict=True):
        hits, cosines = by_hand(name, several)
        found = {
            edit: {way: np.mean([one[way] for one in variants], axis=0) for way in DIRECTIONS}
            for edit, variants in hits.items()
        }
        for edit, way in itertools.product(EDITS, DIRECTIONS):
            assert numbers["recall_at_1_percent"][edit][way] == pytest.approx(found[edit][way].mean())
            assert numbers["interval_percent"][edit][way] == hits_interval(found[edit][way], GROUPS[way])
            if edit in LOSING:
                expected = paired_difference(found[EDITS[edit].base][way], found[edit][way], GROUPS[way])
                assert numbers["drop_points"][edit][way] == pytest.approx(expected)
        for way in DIRECTIONS:
            kept = share_kept(found["remove"][way], found["keep"][way], GROUPS[way])[0]
            assert numbers["kept_without_summary_percent"][way] == kept
        for edit, values in cosines.items():
            mean = np.mean(values, axis=0)
            assert numbers["similarity"][edit]["mean"] == pytest.approx(mean.mean(), abs=1e-6)
