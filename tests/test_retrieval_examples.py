"""The page of captions that one encoder retrieves and another does not."""

import html
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tiny_clip import byte_tokenizer, save_tiny_clip
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.retrieval_examples import disagreements, nearest_strangers
from debias_diffusion.models.loading import load_backbone

HOSTILE = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }} red square"
COUNT = 12


def test_disagreements_are_all_captions_that_one_has_first_and_the_other_has_not():
    ranks = {"a": [1, 1, 2, 1, 9], "b": [1, 2, 1, 3, 9]}
    both = {(part.right, part.wrong): part for part in disagreements(ranks, 5)}
    assert both["a", "b"].queries == [1, 3] and both["b", "a"].queries == [2]
    assert [part.total for part in disagreements(ranks, 1)] == [2, 1]
    some = disagreements({"a": [1] * 99, "b": [2] * 99}, 10)[0]
    assert len(set(some.queries)) == 10 and some == disagreements({"a": [1] * 99, "b": [2] * 99}, 10)[0]


def test_nearest_strangers_are_never_the_captions_own_image():
    random = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(count, 5, generator=random) for count in (7, 9))
    own = [3, 0, 0, 6, 2, 1, 5, 4, 4]
    for text, image, nearest in zip(texts, own, nearest_strangers(images, texts, own), strict=True):
        cosines = [float(torch.cosine_similarity(text, other, dim=0)) for other in images]
        assert nearest == max((row for row in range(7) if row != image), key=cosines.__getitem__)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    random = np.random.default_rng(0)
    (folder / "images").mkdir()
    entries = []
    for index in range(COUNT):
        name = f"{index} & <b>.png"
        Image.fromarray(random.integers(0, 256, (40, 400, 3), dtype=np.uint8)).save(folder / "images" / name)
        entries.append({"image": name, "conversations": [{}, {"value": f"{HOSTILE} {index}"}]})
    (folder / "data.json").write_text(json.dumps(entries))
    tokenizer = byte_tokenizer(77)
    encoders = [save_tiny_clip(folder / name, seed=seed, tokenizer=tokenizer) for seed, name in enumerate(["a", "b"])]
    config = RetrievalConfig(
        encoders, str(folder / "out"), str(folder / "data.json"), str(folder / "images"), examples=COUNT
    )
    report = evaluate_retrieval(config)
    page = (folder / "out" / "retrieval_examples.html").read_text()
    return SimpleNamespace(folder=folder, encoders=encoders, report=report, page=page)


def test_the_page_shows_the_captions_and_both_images(evaluated):
    sections = evaluated.page.split("<h2>")[1:]
    assert [section[: section.index("</h2>")] for section in sections] == [
        "a is right, b is wrong",
        "b is right, a is wrong",
    ]
    features = []
    for name in evaluated.encoders:
        backbone = load_backbone(name).eval()
        with torch.no_grad():
            pixels = [Image.open(evaluated.folder / "images" / f"{index} & <b>.png") for index in range(COUNT)]
            images = backbone.encode_image(torch.stack([backbone.preprocess(image) for image in pixels]))
            texts = backbone.encode_text(backbone.tokenize([f"{HOSTILE} {index}" for index in range(COUNT)]))
        cosine = torch.nn.functional.normalize(texts, dim=1) @ torch.nn.functional.normalize(images, dim=1).T
        features.append(cosine.argmax(dim=1).tolist())
    shown = 0
    for section, (right, wrong) in zip(sections, (features, features[::-1]), strict=True):
        expected = [index for index in range(COUNT) if right[index] == index != wrong[index]]
        assert f"<p>{len(expected)} of {COUNT} captions" in section
        articles = section.split("<article>")[1:]
        for article, index in zip(articles, expected, strict=True):
            assert html.unescape(re.search("<p>(.*?)</p>", article)[1]) == f"{HOSTILE} {index}"
            names = [html.unescape(name) for name in re.findall(r"<br>(.*?)</figcaption>", article)]
            assert names == [f"{index} & <b>.png", f"{wrong[index]} & <b>.png"]
            assert article.count('src="data:image/jpeg;base64,') == 2
            shown += 1
    assert shown > 0


def test_all_text_on_it_is_escaped(evaluated):
    assert "<script" not in evaluated.page and "<b>" not in evaluated.page and "{{ 7 * 7 }}" in evaluated.page
    assert "&lt;script&gt;" in evaluated.page


def test_without_examples_there_is_no_page_and_with_one_encoder_an_error(evaluated, tmp_path):
    settings = {"data": str(evaluated.folder / "data.json"), "images": str(evaluated.folder / "images")}
    report = evaluate_retrieval(RetrievalConfig(evaluated.encoders, str(tmp_path / "out"), **settings))
    assert not (tmp_path / "out" / "retrieval_examples.html").exists()
    assert report["encoders"] == evaluated.report["encoders"]
    with pytest.raises(UserError, match="examples is 3 with 1 encoder"):
        RetrievalConfig(evaluated.encoders[:1], str(tmp_path / "out"), examples=3, **settings)
