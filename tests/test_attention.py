"""What EOT attends to: the numbers against the paper's equations, and the evaluation that draws them."""

import copy
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.text_encoders import open_clip_states
from helpers.tiny_clip import byte_tokenizer, tiny_clip, tiny_siglip

from debias_diffusion.data.caption_edits import edit_caption
from debias_diffusion.encoders.attention import eot_attention
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.encoders.transformers_folder import write_text_encoder
from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import (
    AttentionConfig,
    CaptionReader,
    evaluate_attention,
    load_caption_reader,
    look_at_captions,
    split_words,
)
from debias_diffusion.eval.intervals import mean_interval
from debias_diffusion.eval.session import read_source
from debias_diffusion.text.tokens import CaptionTokenizer

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
    # The equations divide the product over all heads by another root, which changes nothing.
    hidden = key[:end] @ query[end - 1] / math.sqrt(last.attn.embed_dim)
    torch.testing.assert_close(before, (hidden - hidden[1:-1].mean()) / hidden[1:-1].std(correction=0))
    return before, sum(weights) / len(weights)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_attention_and_its_means_are_the_equations(backbone, batch_size):
    expected = [by_hand(backbone, caption) for caption in CAPTIONS]
    for start in range(0, len(CAPTIONS), batch_size):
        tokens = backbone.tokenize(CAPTIONS[start : start + batch_size])
        attention = eot_attention(backbone, tokens)
        for index, (before, after) in enumerate(expected[start : start + batch_size]):
            end = len(before)
            assert attention.ends[index] == end and before.max() - before.min() > 0.1  # not all alike
            got = [attention.before_softmax, attention.after_softmax]
            for values, by_equation in zip(got, (before, after), strict=True):
                torch.testing.assert_close(values[index, :end], by_equation, rtol=0, atol=1e-9)
            assert attention.before_softmax[index, end:].eq(-torch.inf).all()
            assert attention.after_softmax[index, end:].eq(0).all()
            assert attention.is_text[index].nonzero().flatten().tolist() == list(range(1, end - 1))
    reader = CaptionReader(backbone, backbone.tokenizer, torch.device("cpu"))
    found = look_at_captions(reader, CAPTIONS, range(len(CAPTIONS)), batch_size, "")
    for which, name in enumerate(QUANTITIES):
        for slot in range(1, 76):
            held = [values[which][slot].item() for values in expected if slot < len(values[which]) - 1]
            assert found["captions_at_position"][slot - 1] == len(held)
            assert found[name]["positions"][slot - 1] == pytest.approx(sum(held) / len(held), abs=1e-9)
        for end, slot in (("sot", 0), ("eot", -1)):
            of_end = sum(values[which][slot].item() for values in expected) / len(CAPTIONS)
            assert found[name][end] == pytest.approx(of_end, abs=1e-9)
    counts = found["captions_at_position"]
    assert len(set(counts)) > 2 and len(counts) == len(found["after_softmax"]["positions"]) == 75


def test_products_of_another_scale_are_compared_alike(backbone):
    """As of an encoder whose q k are three times as large: the curve before the softmax is the same."""
    louder, tokens = copy.deepcopy(backbone), backbone.tokenize(CAPTIONS)
    last = louder.model.transformer.resblocks[-1].attn
    with torch.no_grad():
        last.in_proj_weight[: last.embed_dim] *= 3
        last.in_proj_bias[: last.embed_dim] *= 3
    one, other = eot_attention(backbone, tokens), eot_attention(louder, tokens)
    torch.testing.assert_close(one.before_softmax, other.before_softmax)
    assert (one.after_softmax - other.after_softmax).abs().max() > 0.01
    assert eot_attention(backbone, backbone.tokenize([""])).before_softmax[0, :2].tolist() == [0, 0]  # of no text


@pytest.mark.parametrize(("before_sot", "pads"), [(False, [1, 2, 3]), (True, [0, 1, 2])])
def test_pads_before_the_text_are_looked_at_and_are_no_text(backbone, before_sot, pads):
    ids = backbone.tokenizer.text_ids(CAPTIONS[:2])
    attention = eot_attention(backbone, backbone.tokenizer.batch(ids, [3, 0], pads_before_sot=before_sot))
    end = len(ids[0]) + 5
    assert attention.ends[0] == end and attention.before_softmax[0, :end].isfinite().all()
    sot = ({*range(4)} - {*pads}).pop()
    assert [slot for slot in range(end) if not attention.is_text[0, slot]] == [*sorted([sot, *pads]), end - 1]
    torch.testing.assert_close(attention.after_softmax.sum(dim=1), torch.ones(2, dtype=torch.double))


@pytest.mark.parametrize("projection", [False, True])
def test_a_transformers_encoder_gives_the_same_and_what_it_says_itself(backbone, projection):
    encoder, _ = to_transformers(backbone, projection)
    tokens = backbone.tokenize(CAPTIONS)
    got, expected = eot_attention(encoder, tokens), eot_attention(backbone, tokens)
    for name in QUANTITIES:
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=1e-9)
    encoder.set_attn_implementation("eager")
    # [batch, heads, slots, slots] of the last layer
    weights = encoder(tokens.padded(), output_attentions=True).attentions[-1]
    from_eot = weights[torch.arange(len(tokens)), :, got.ends - 1].mean(dim=1)
    torch.testing.assert_close(got.after_softmax, from_eot, rtol=0, atol=1e-6)
    half = eot_attention(encoder.bfloat16(), tokens).after_softmax  # half precision is multiplied in single
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected.after_softmax.float(), rtol=0, atol=0.02)


def test_where_no_attention_from_eot_can_be_known_it_is_refused():
    siglip, average, broken = tiny_siglip(), tiny_clip(), tiny_clip()
    average.pooling = "average"
    broken.model.transformer.resblocks[-1].attn.in_proj_bias.data[:] = torch.nan
    for encoder, message in (
        (siglip, "SigLIP has no causal mask.*not read at EOT.*Give a CLIP"),
        (average, "average pooling"),
        (broken, "NaN or infinite"),
    ):
        with pytest.raises(UserError, match=message):
            eot_attention(encoder, encoder.tokenize(["a cat"]))


# ---- the evaluation


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
    assert report["captions"] == len(CAPTIONS) and report["left_out"] == report["compared"] == []
    looked = {label: found["attention"] for label, found in report["encoders"].items()}
    assert [found["keep"]["window"] for found in looked.values()] == [77, 248]
    assert [found["keep"]["cut_captions"] for found in looked.values()] == [1, 0]
    reader = CaptionReader(long_backbone, long_backbone.tokenizer, torch.device("cpu"))
    for edit in ("keep", "move4"):
        expected = look_at_captions(reader, [edit_caption(text, edit) for text in CAPTIONS], range(5), 5, "")
        for name in QUANTITIES:
            assert looked["long"][edit][name]["positions"] == pytest.approx(expected[name]["positions"], abs=1e-5)
    kept, moved = (looked["long"][edit]["before_softmax"]["positions"] for edit in ("keep", "move4"))
    assert max(abs(a - b) for a, b in zip(kept, moved, strict=True)) > 0.01


def test_bands_are_of_all_text_in_them_and_draw_whole_images(long_backbone, encoders):
    reader, captions = load_caption_reader(EncoderSpec.parse(encoders[1]), torch.device("cpu")), CAPTIONS[1:4]
    rows = [eot_attention(long_backbone, long_backbone.tokenize([caption])).before_softmax[0] for caption in captions]
    for image_of in ([0, 0, 1], [0, 1, 2]):
        # each token of positions 1 to 25 with its caption's image
        values, images = zip(
            *((value, image) for row, image in zip(rows, image_of, strict=True) for value in row[1:-1][:25].tolist()),
            strict=True,
        )
        found = look_at_captions(reader, captions, image_of, batch_size=2, title="")["before_softmax"]
        assert found["bands"]["1-25"] == pytest.approx(sum(values) / len(values), abs=1e-5)
        assert found["band_intervals"]["1-25"] == pytest.approx(mean_interval(values, images), abs=1e-5)
        assert found["bands"]["101-"] is found["band_intervals"]["101-"] is None


def test_the_encoder_and_how_it_reads_decide_what_is_found_again(encoders):
    def reader(number):
        return load_caption_reader(EncoderSpec.parse(encoders[number]), torch.device("cpu"))

    short, long = reader(0), reader(1)
    assert short.depends(["a cat"]) == reader(0).depends(["a cat"])
    known = [short.depends(["a dog"]), long.depends(["a cat"])]
    padded = copy.deepcopy(short.tokenizer.tokenizer)
    padded.pad_token = "!"
    for tokenizer in (byte_tokenizer(77), padded):
        known.append(replace(short, tokenizer=CaptionTokenizer(tokenizer, 77)).depends(["a cat"]))
    long.encoder.config.hidden_act = "quick_gelu"
    known += [
        replace(long).depends(["a cat"]),
        short.depends(["a cat"]),
    ]
    assert all(one != two for one, two in itertools.combinations(known, 2))
    assert str(encoders[1]) not in json.dumps(known)  # wherever it lies


def test_captions_are_read_to_a_limit_without_their_images(tmp_path):
    data = write_captions(tmp_path / "data.json", [*(f"cat {number}" for number in range(1001)), "", " "])
    config = AttentionConfig(["toy/clip"], str(tmp_path), data, max_bad=0.01)
    for limit, count in (("auto", 1000), (None, 1001), (2, 2)):
        pairs = read_source(replace(config, limit=limit), only_captions=True)
        assert pairs.captions == [f"cat {number}" for number in range(count)] and len(pairs.bad) == 2


def test_a_prompt_word_by_word(evaluated, long_backbone):
    found, prompt = evaluated[1]["encoders"]["long"]["prompt"], evaluated[0].prompt
    words = found["words"]
    assert [word["word"] for word in words] == "a grey cat costs $ 5 or $ 6 , zyxwvutily .".split()
    assert words[-2]["tokens"] > 1 and words[-1]["position"] == words[-2]["position"] + words[-2]["tokens"]
    attention = eot_attention(long_backbone, long_backbone.tokenize([prompt]))
    assert found["tokens"] == attention.ends[0] and found["window"] == 248
    own = slice(words[-2]["position"], words[-1]["position"])
    assert words[-2]["before_softmax"] == pytest.approx(attention.before_softmax[0, own].mean().item(), abs=1e-5)
    assert words[-2]["after_softmax"] == pytest.approx(attention.after_softmax[0, own].sum().item(), abs=1e-6)
    every = [found["sot"], found["eot"], *words]
    assert sum(word["after_softmax"] for word in every) == pytest.approx(1.0, abs=1e-5)
    assert found["eot"]["before_softmax"] == pytest.approx(attention.before_softmax[0, -1].item(), abs=1e-5)
    ids = byte_tokenizer(77)("a red cat", add_special_tokens=False)["input_ids"]
    assert split_words(byte_tokenizer(77), ids[:-1]) == [("a", 1), ("red", 3), ("ca", 2)]  # cut at the context length
