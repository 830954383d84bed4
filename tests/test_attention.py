"""What EOT attends to: the numbers against the paper's equations, and the evaluation that draws them."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.text_encoders import open_clip_states
from helpers.tiny_clip import tiny_clip, tiny_siglip

from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.encoders.text_encoders import to_transformers, write_text_encoder
from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import (
    AttentionConfig,
    CaptionReader,
    evaluate_attention,
    load_caption_reader,
    look_at_captions,
)
from debias_diffusion.eval.caption_edits import edit_caption
from debias_diffusion.eval.eot_attention import eot_attention
from debias_diffusion.eval.intervals import mean_interval

CAPTIONS = [
    "A cat.",
    "Two red squares and a star stand on a table, and behind them is a window.",
    "This picture shows three cats. One is black! Is the second grey? The third sleeps. The wall behind is pale blue.",
    "It is flat.",
    "A dog sits. " * 40,  # longer than the 77 positions
]
QUANTITIES = ("before_softmax", "after_softmax")


@pytest.fixture(scope="module")
def backbone():
    return tiny_clip().double().eval()


@pytest.fixture(scope="module")
def long_backbone():
    return tiny_clip(seed=1, context_length=248).eval()


def reader_of(backbone):
    return CaptionReader(backbone, backbone.tokenizer, torch.device("cpu"))


def by_hand(backbone, caption):
    """Before the softmax, standardised over the text, and after it: equations 1 and 2 from SOT to EOT."""
    row = backbone.tokenize([caption]).padded()
    end = int(row[0].argmax()) + 1
    last = backbone.model.transformer.resblocks[-1]
    with torch.no_grad():
        (*_, before_last, _), _ = open_clip_states(backbone.model, row)
        projected = last.ln_1(before_last[0]) @ last.attn.in_proj_weight.T + last.attn.in_proj_bias
    query, key, _ = projected.chunk(3, dim=-1)
    width, scores = last.attn.embed_dim // last.attn.num_heads, []
    for head in range(last.attn.num_heads):
        part = slice(head * width, (head + 1) * width)
        scores.append(key[:end, part] @ query[end - 1, part] / math.sqrt(width))
    weights = [score.exp() / score.exp().sum() for score in scores]
    text = (sum(scores) / len(scores))[1:-1]
    before = (sum(scores) / len(scores) - text.mean()) / text.std(correction=0)
    return before, sum(weights) / len(weights)


def test_attention_and_its_means_are_the_equations(backbone):
    expected = [by_hand(backbone, caption) for caption in CAPTIONS]
    attention = eot_attention(backbone, backbone.tokenize(CAPTIONS))
    for index, by_equation in enumerate(expected):
        end = len(by_equation[0])
        assert attention.ends[index] == end and by_equation[0].max() - by_equation[0].min() > 0.1  # not all alike
        for name, values, after_eot in zip(QUANTITIES, by_equation, (-torch.inf, 0), strict=True):
            got = getattr(attention, name)[index]
            torch.testing.assert_close(got[:end], values, rtol=0, atol=1e-9)
            assert got[end:].eq(after_eot).all()
        assert attention.is_text[index].nonzero().flatten().tolist() == list(range(1, end - 1))
    found = look_at_captions(reader_of(backbone), CAPTIONS, range(len(CAPTIONS)), 2, "")
    for which, name in enumerate(QUANTITIES):
        at_slots = [
            [values[which][slot].item() for values in expected if slot < len(values[which]) - 1]
            for slot in range(1, 76)
        ]
        assert found["captions_at_position"] == [len(held) for held in at_slots]
        assert found[name]["positions"] == pytest.approx([sum(held) / len(held) for held in at_slots], abs=1e-9)
        for end, slot in (("sot", 0), ("eot", -1)):
            of_end = sum(values[which][slot].item() for values in expected) / len(CAPTIONS)
            assert found[name][end] == pytest.approx(of_end, abs=1e-9)


def test_where_no_attention_from_eot_can_be_known_it_is_refused():
    siglip, average = tiny_siglip(), tiny_clip()
    average.pooling = "average"
    for encoder, message in ((siglip, "SigLIP"), (average, "average pooling")):
        with pytest.raises(UserError, match=message):
            eot_attention(encoder, encoder.tokenize(["a cat"]))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory, long_backbone):
    """An open_clip folder of 77 positions, and a transformers folder of 248."""
    folder = tmp_path_factory.mktemp("encoders")
    tiny_clip().save(folder / "short")
    write_text_encoder(*to_transformers(long_backbone), folder / "long")
    return [str(folder / "short"), str(folder / "long")]


def write_captions(path, captions):
    entries = [{"image": "not/there.png", "conversations": [{}, {"value": caption}]} for caption in captions]
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.fixture(scope="module")
def evaluated(encoders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    data = write_captions(folder / "data.json", CAPTIONS)
    prompt = "A grey cat costs $5 or $6, zyxwvutily."
    config = AttentionConfig(encoders, str(folder / "out"), data, prompt=prompt, batch_size=2)
    return config, evaluate_attention(config)


def test_the_file_holds_what_each_encoder_looks_at(evaluated, long_backbone):
    config, report = evaluated
    assert report == json.loads(Path(config.output, "attention.json").read_text())
    assert all(Path(config.output, name).is_file() for name in ("attention.png", "attention_prompt.png"))
    looked = {label: found["attention"] for label, found in report["encoders"].items()}
    assert [found["keep"]["cut_captions"] for found in looked.values()] == [1, 0]
    for edit in ("keep", "move4"):
        captions = [edit_caption(text, edit) for text in CAPTIONS]
        expected = look_at_captions(reader_of(long_backbone), captions, range(5), 5, "")
        for name in QUANTITIES:
            assert looked["long"][edit][name]["positions"] == pytest.approx(expected[name]["positions"], abs=1e-5)
    assert looked["long"]["keep"]["before_softmax"]["positions"] != expected["before_softmax"]["positions"]


def test_bands_are_of_all_text_in_them_and_draw_whole_images(long_backbone, encoders):
    reader, captions = load_caption_reader(EncoderSpec.parse(encoders[1]), torch.device("cpu")), CAPTIONS[1:4] * 4
    rows = [eot_attention(long_backbone, long_backbone.tokenize([caption])).before_softmax[0] for caption in captions]
    for image_of in (range(12), [caption // 2 for caption in range(12)]):
        values = torch.cat([row[1:-1][:25] for row in rows]).tolist()
        images = [image for row, image in zip(rows, image_of, strict=True) for _ in row[1:-1][:25]]
        found = look_at_captions(reader, captions, image_of, batch_size=2, title="")["before_softmax"]
        assert found["bands"]["1-25"] == pytest.approx(sum(values) / len(values), abs=1e-5)
        assert found["band_intervals"]["1-25"] == pytest.approx(mean_interval(values, images), abs=1e-5)
        assert found["bands"]["101-"] is found["band_intervals"]["101-"] is None


def test_a_prompt_word_by_word(evaluated, long_backbone):
    found, prompt = evaluated[1]["encoders"]["long"]["prompt"], evaluated[0].prompt
    words = found["words"]
    assert [word["word"] for word in words] == "a grey cat costs $ 5 or $ 6 , zyxwvutily .".split()
    assert words[-2]["tokens"] > 1 and words[-1]["position"] == words[-2]["position"] + words[-2]["tokens"]
    attention = eot_attention(long_backbone, long_backbone.tokenize([prompt]))
    tokens = slice(words[-2]["position"], words[-1]["position"])
    assert words[-2]["before_softmax"] == pytest.approx(attention.before_softmax[0, tokens].mean().item(), abs=1e-5)
    assert words[-2]["after_softmax"] == pytest.approx(attention.after_softmax[0, tokens].sum().item(), abs=1e-6)
    every = [found["sot"], found["eot"], *words]
    assert sum(word["after_softmax"] for word in every) == pytest.approx(1.0, abs=1e-5)
