"""The page of captions that encoders disagree on, with whatever a caption or a name holds."""

import html
import json
import re

import numpy as np
from helpers.tiny_clip import byte_tokenizer, save_tiny_clip
from helpers.tiny_data import entry
from PIL import Image

from research.evaluations.options import ExamplesConfig
from research.evaluations.retrieval_examples import disagreements, evaluate_examples

HOSTILE = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }} red square"
COUNT = 12


def test_disagreements_are_first_ranks_of_one_encoder_alone():
    found = disagreements({"a": [1, 1, 2, 3], "b": [1, 2, 1, 1]})
    assert {pair: rows.tolist() for pair, rows in found.items()} == {("a", "b"): [1], ("b", "a"): [2, 3]}


def test_the_page_shows_the_captions_and_both_images_escaped(tmp_path):
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    names, captions = ([text.format(index) for index in range(COUNT)] for text in ("{} & <b>.png", "{} red square"))
    captions = [f"{HOSTILE} {caption}" for caption in captions]
    for name in names:
        Image.fromarray(random.integers(0, 256, (40, 400, 3), dtype=np.uint8)).save(tmp_path / "images" / name)
    (tmp_path / "data.json").write_text(json.dumps([*map(entry, names, captions)]))
    tokenizer = byte_tokenizer(77)
    encoders = [save_tiny_clip(tmp_path / name, seed=seed, tokenizer=tokenizer) for seed, name in enumerate("ab")]
    data = {"data": str(tmp_path / "data.json"), "images": str(tmp_path / "images")}
    report = evaluate_examples(ExamplesConfig(encoders, str(tmp_path), **data, batch_size=4, examples=COUNT))
    page = (tmp_path / "retrieval-examples.html").read_text()
    assert "<script" not in page and "<b>" not in page and "{{ 7 * 7 }}" in page
    section, count = page.split("<h2>")[1], report["encoders"]["a"]["right"]["b"]
    assert section.startswith("a is right, b is wrong</h2>") and f"<p>{count} of {COUNT} captions" in section
    articles = section.split("<article>")[1:]
    assert len(articles) == count > 0
    for article in articles:
        index = captions.index(html.unescape(re.search("<p>(.*?)</p>", article)[1]))
        own, other = (html.unescape(name) for name in re.findall(r"<br>(.*?)</figcaption>", article))
        assert own == names[index] != other in names
