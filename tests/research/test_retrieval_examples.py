"""The page of captions that encoders disagree on, with whatever a caption or a name holds."""

import html
import json
import re

import numpy as np
import torch
from helpers.tiny_clip import byte_tokenizer, save_tiny_clip
from helpers.tiny_data import entry
from PIL import Image

from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.json_files import read_data_file
from debias_diffusion.encoders.loading import load_backbone
from research.evaluations.options import ExamplesConfig
from research.evaluations.retrieval_examples import evaluate_examples

HOSTILE = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }} red square"
COUNT = 12


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
    given = {"data": str(tmp_path / "data.json"), "images": str(tmp_path / "images")}
    report = evaluate_examples(ExamplesConfig(encoders, str(tmp_path), **given, batch_size=4, examples=COUNT))
    page = (tmp_path / "retrieval-examples.html").read_text()
    assert "<script" not in page and "<b>" not in page and "{{ 7 * 7 }}" in page
    first = []  # by encoder, the image that each caption has first
    records, images = read_data_file(given["data"]).records, ImageFolder(given["images"])
    for name in encoders:
        backbone = load_backbone(name).eval()
        with torch.no_grad():
            pixels = [backbone.preprocess(images.open(record.image))[None] for record in records]
            features = (
                torch.cat([*map(backbone.encode_image, pixels)]),
                backbone.encode_text(backbone.tokenize(captions)),
            )
        of_images, of_texts = (torch.nn.functional.normalize(part, dim=1) for part in features)
        first.append((of_texts @ of_images.T).argmax(dim=1).tolist())
    right = [index for index, (a, b) in enumerate(zip(*first, strict=True)) if a == index != b]
    assert report["encoders"]["a"]["right"] == {"b": len(right)} and right
    section = page.split("<h2>")[1]
    assert section.startswith("a is right, b is wrong</h2>") and f"<p>{len(right)} of {COUNT} captions" in section
    for article, index in zip(section.split("<article>")[1:], right, strict=True):
        assert html.unescape(re.search("<p>(.*?)</p>", article)[1]) == captions[index]
        drawn = [html.unescape(name) for name in re.findall(r"<br>(.*?)</figcaption>", article)]
        assert drawn == [names[index], names[first[1][index]]]
