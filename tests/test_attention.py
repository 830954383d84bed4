"""What EOT attends to: the numbers against plain loops, and the evaluation that draws them."""

import functools
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.text_encoders import open_clip_states
from helpers.tiny_clip import CONFIG, byte_tokenizer, registered, tiny_clip, tiny_siglip
from PIL import Image

from debias_diffusion.attention import PositionMeans, eot_attention
from debias_diffusion.encoders import EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import (
    BANDS,
    AttentionConfig,
    evaluate_attention,
    load_reader,
    look_at_captions,
    plot,
    plot_prompt,
    split_words,
)
from debias_diffusion.eval.intervals import mean_interval
from debias_diffusion.eval.robustness import edit_caption
from debias_diffusion.eval.session import read_source
from debias_diffusion.interchange.text_encoders import to_transformers
from debias_diffusion.interchange.transformers_folder import write_text_encoder
from debias_diffusion.jobs import JOB
from debias_diffusion.tokens import CaptionTokenizer, clip_tokenizer

CAPTIONS = [
    "A cat.",
    "Two red squares and a star stand on a table, and behind them is a window.",
    "This picture shows three cats. One is black! Is the second grey? The third sleeps. The wall behind is pale blue.",
    "It is flat.",
    "A dog sits. " * 40,  # longer than the window of 77
]


@pytest.fixture(scope="module")
def backbone():
    return tiny_clip().double().eval()


@pytest.fixture(scope="module")
def long_backbone():
    return tiny_clip(seed=1, context_length=248).eval()


def by_hand(backbone, caption):
    """(before, after) softmax, lists from SOT to EOT: equations 1 and 2 for one caption, from open_clip's own forward
    up to the last block."""
    row = backbone.tokenize([caption]).padded()
    eot = int(row[0].argmax())
    last = backbone.model.transformer.resblocks[-1]
    with torch.no_grad():
        (*_, before_last, _), _ = open_clip_states(backbone.model, row)
        states = last.ln_1(before_last)[0].tolist()
        weight, bias = last.attn.in_proj_weight.tolist(), last.attn.in_proj_bias.tolist()
    width, heads = last.attn.embed_dim, last.attn.num_heads
    head_width = width // heads

    def projected(state, out):
        return sum(w * x for w, x in zip(weight[out], state, strict=True)) + bias[out]

    before, after = [0.0] * (eot + 1), [0.0] * (eot + 1)
    for head in range(heads):
        rows = range(head * head_width, (head + 1) * head_width)
        query = [projected(states[eot], out) for out in rows]
        scores = []
        for state in states[: eot + 1]:
            key = [projected(state, width + out) for out in rows]
            scores.append(sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(head_width))
        total = sum(math.exp(score) for score in scores)
        for slot, score in enumerate(scores):
            before[slot] += score / heads
            after[slot] += math.exp(score) / total / heads
    return before, after


def test_equals_query_times_key_by_hand(backbone):
    attention = eot_attention(backbone, backbone.tokenize(CAPTIONS))
    assert attention.before_softmax.shape == attention.after_softmax.shape == (len(CAPTIONS), 77)
    for index, caption in enumerate(CAPTIONS):
        before, after = by_hand(backbone, caption)
        assert attention.ends[index] == len(before)
        assert max(before) - min(before) > 0.1  # there is something to tell apart
        expected = torch.tensor([before, after], dtype=torch.double)
        got = torch.stack([attention.before_softmax[index], attention.after_softmax[index]])[:, : len(before)]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
        end = len(before)
        assert attention.before_softmax[index, end:].eq(-torch.inf).all()
        assert attention.after_softmax[index, end:].eq(0).all()
        assert attention.is_text[index].tolist() == [True] * end + [False] * (77 - end)


def test_the_hidden_scale_is_the_product_over_all_heads_by_the_root_of_the_hidden_dimension(backbone):
    tokens = backbone.tokenize(CAPTIONS)
    hidden, head = (eot_attention(backbone, tokens, scale) for scale in ("hidden", "head"))
    last = backbone.model.transformer.resblocks[-1]
    with torch.no_grad():
        (*_, before_last, _), _ = open_clip_states(backbone.model, tokens.padded())
        query, key, _ = (last.ln_1(before_last) @ last.attn.in_proj_weight.T + last.attn.in_proj_bias).chunk(3, dim=-1)
    for index, end in enumerate(hidden.ends.tolist()):
        expected = key[index, :end] @ query[index, end - 1] / math.sqrt(last.attn.embed_dim)  # equation 2
        torch.testing.assert_close(hidden.before_softmax[index, :end], expected, rtol=0, atol=1e-9)
        assert (expected - head.before_softmax[index, :end]).abs().max() > 0.1
    assert torch.equal(hidden.after_softmax, head.after_softmax)
    with pytest.raises(UserError, match="scale must be one of head, hidden, got 'width'"):
        eot_attention(backbone, tokens, "width")


def test_other_captions_and_what_follows_eot_change_nothing(backbone):
    tokens = backbone.tokenize(CAPTIONS[:4])
    together = eot_attention(backbone, tokens)
    others = eot_attention(backbone, replace(tokens, pad=123))
    assert not torch.equal(tokens.padded(), replace(tokens, pad=123).padded())
    for index, caption in enumerate(CAPTIONS[:4]):
        end = int(together.ends[index])
        alone = eot_attention(backbone, backbone.tokenize([caption]))
        for name in ("before_softmax", "after_softmax"):
            expected = getattr(together, name)[index, :end]
            assert getattr(alone, name).shape == (1, end)
            torch.testing.assert_close(getattr(alone, name)[0], expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(getattr(others, name)[index, :end], expected, rtol=0, atol=1e-12)


def test_pads_before_the_text_are_looked_at_and_are_no_text(backbone):
    ids = backbone.tokenizer.text_ids(CAPTIONS[:2])
    for before_sot in (False, True):
        tokens = backbone.tokenizer.batch(ids, [3, 0], pads_before_sot=before_sot)
        attention = eot_attention(backbone, tokens)
        end = len(ids[0]) + 5
        assert attention.ends[0] == end and attention.before_softmax[0, :end].isfinite().all()
        pads = {0, 1, 2} if before_sot else {1, 2, 3}
        assert [slot for slot in range(end) if not attention.is_text[0, slot]] == sorted(pads)
        assert attention.is_text[1].sum() == len(ids[1]) + 2
        torch.testing.assert_close(attention.after_softmax.sum(dim=1), torch.ones(2, dtype=torch.double))


@pytest.mark.parametrize("projection", [False, True])
def test_a_transformers_encoder_gives_the_same_and_what_it_says_itself(backbone, projection):
    encoder, _ = to_transformers(backbone, projection)
    tokens = backbone.tokenize(CAPTIONS)
    got, expected = eot_attention(encoder, tokens), eot_attention(backbone, tokens)
    for name in ("before_softmax", "after_softmax"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=1e-9)
    encoder.set_attn_implementation("eager")
    # [batch, heads, slots, slots] of the last layer
    weights = encoder(tokens.padded(), output_attentions=True).attentions[-1]
    from_eot = weights[torch.arange(len(tokens)), :, got.ends - 1].mean(dim=1)
    torch.testing.assert_close(got.after_softmax, from_eot, rtol=0, atol=1e-6)
    attention = getattr(encoder, "text_model", encoder).encoder.layers[-1].self_attn
    assert not attention.q_proj._forward_hooks and not attention.k_proj._forward_hooks
    half = eot_attention(encoder.bfloat16(), tokens).after_softmax  # half precision is multiplied in single
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected.after_softmax.float(), rtol=0, atol=0.02)


def test_without_a_mask_or_without_eot_it_is_refused(tmp_path):
    siglip = tiny_siglip()
    siglip.save(tmp_path / "siglip")
    with pytest.raises(UserError, match="SigLIP has no causal mask.*not read at EOT.*Give a CLIP"):
        load_reader(EncoderSpec.parse(tmp_path / "siglip"), torch.device("cpu"))
    with pytest.raises(UserError, match="SigLIP has no causal mask"):
        eot_attention(siglip, siglip.tokenize(["a cat"]))
    average = tiny_clip(tokenizer=byte_tokenizer(77))
    average.pooling = "average"
    with pytest.raises(UserError, match="average pooling"):
        eot_attention(average, average.tokenize(["a cat"]))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_means_are_equation_3(backbone, batch_size):
    means = PositionMeans(77)
    for start in range(0, len(CAPTIONS), batch_size):
        means.add(eot_attention(backbone, backbone.tokenize(CAPTIONS[start : start + batch_size])))
    rows = [by_hand(backbone, caption) for caption in CAPTIONS]
    for which, name in enumerate(("before_softmax", "after_softmax")):
        expected = []
        for slot in range(77):
            held = [row[which][slot] for row in rows if slot < len(row[which])]
            assert means.counts[slot] == len(held)
            expected.append(sum(held) / len(held))
        torch.testing.assert_close(means.means(name), torch.tensor(expected, dtype=torch.double), rtol=0, atol=1e-9)
        assert means.eot(name) == pytest.approx(sum(row[which][-1] for row in rows) / len(rows), abs=1e-9)
    assert means.captions == len(CAPTIONS) and len(set(means.counts.tolist())) > 2


def test_broken_weights_are_told():
    broken = tiny_clip(tokenizer=byte_tokenizer(77))
    broken.model.transformer.resblocks[-1].attn.in_proj_bias.data[:] = torch.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        PositionMeans(77).add(eot_attention(broken, broken.tokenize(["a cat"])))


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
    return folder / "out", evaluate_attention(config)


@pytest.mark.usefixtures("blank_figures")
def test_scales_share_a_cache_and_not_its_results(encoders, tmp_path):
    data = write_captions(tmp_path / "data.json", CAPTIONS)
    reports = [
        evaluate_attention(AttentionConfig(encoders[:1], str(tmp_path / "out"), data, prompt="A cat.", scale=scale))
        for scale in ("head", "hidden", "head")
    ]
    head, hidden, again = (next(iter(report["encoders"].values())) for report in reports)
    assert head == again
    for edit in ("keep", "move4"):
        first, second = (result["attention"][edit] for result in (head, hidden))
        expected = [2.0 * value for value in first["before_softmax"]["positions"]]  # of four heads
        assert second["before_softmax"]["positions"] == pytest.approx(expected, abs=1e-6)
        assert second["after_softmax"] == first["after_softmax"]
    assert hidden["prompt"]["eot"]["before_softmax"] == pytest.approx(2 * head["prompt"]["eot"]["before_softmax"])
    assert len(reports[1]["notes"]) == len(reports[0]["notes"]) + 1


def attention_of(report):
    return {label: found["attention"] for label, found in report["encoders"].items()}


def test_the_file_holds_what_each_encoder_looks_at(evaluated, long_backbone):
    output, report = evaluated
    assert report == json.loads((output / "attention.json").read_text())
    assert report["evaluation"] == "attention" and report["compared"] == []
    assert report["captions"] == len(CAPTIONS) and report["left_out"] == []
    assert len(set(report["digests"]["encoders"].values())) == 2
    looked = attention_of(report)
    assert [found["keep"]["window"] for found in looked.values()] == [77, 248]
    assert [found["keep"]["cut_captions"] for found in looked.values()] == [1, 0]
    for edit in ("keep", "move4"):
        means = PositionMeans(248)
        means.add(eot_attention(long_backbone, long_backbone.tokenize([edit_caption(text, edit) for text in CAPTIONS])))
        found = looked["long"][edit]
        assert found["captions_at_position"] == means.counts[1 : len(means.means("before_softmax"))].tolist()
        for name in ("before_softmax", "after_softmax"):
            sot, *positions = means.means(name).tolist()
            assert found[name]["sot"] == pytest.approx(sot, abs=1e-5)
            assert found[name]["positions"] == pytest.approx(positions, abs=1e-5)
    kept, moved = (looked["long"][edit]["before_softmax"]["positions"] for edit in ("keep", "move4"))
    assert max(abs(a - b) for a, b in zip(kept, moved, strict=True)) > 0.01


def test_bands_are_means_over_all_text_in_them(evaluated):
    _, report = evaluated
    for found in attention_of(report).values():
        numbers, counts = found["keep"]["after_softmax"], found["keep"]["captions_at_position"]
        for first, last in BANDS:
            held = counts[first - 1 : last]
            total = sum(v * n for v, n in zip(numbers["positions"][first - 1 : last], held, strict=True))
            expected = total / sum(held) if held else None
            assert numbers["bands"][f"{first}-{last or ''}"] == pytest.approx(expected)
            ends = numbers["band_intervals"][f"{first}-{last or ''}"]
            assert (ends is None) == (expected is None) and (ends is None or ends[0] <= expected <= ends[1])
        # All the attention there is: of each caption 1
        whole = sum(v * n for v, n in zip(numbers["positions"], counts, strict=True)) + counts[0] * numbers["sot"]
        assert whole == pytest.approx(len(CAPTIONS), abs=1e-5)
    short, long = (attention_of(report)[label]["keep"]["after_softmax"]["bands"]["101-"] for label in ("short", "long"))
    assert short is None and long > 0


def test_intervals_draw_images_with_all_their_captions(long_backbone, encoders):
    reader, captions = load_reader(EncoderSpec.parse(encoders[1]), torch.device("cpu")), CAPTIONS[1:4]
    look = functools.partial(look_at_captions, reader, captions, batch_size=2, title="")
    owners = [0, 0, 1]
    rows = [eot_attention(long_backbone, long_backbone.tokenize([caption])).before_softmax[0] for caption in captions]
    for image_of in (owners, [0, 1, 2]):
        # each token of positions 1 to 25 with its caption's image
        values = [(value, image) for row, image in zip(rows, image_of, strict=True) for value in row[1:26].tolist()]
        expected = mean_interval(*zip(*values, strict=True))
        assert look(image_of)["before_softmax"]["band_intervals"]["1-25"] == pytest.approx(expected, abs=1e-5)
    assert look(owners)["before_softmax"]["positions"] == look([0, 1, 2])["before_softmax"]["positions"]


def test_the_encoder_and_how_it_reads_decide_what_is_found_again(encoders):
    short, long = (load_reader(EncoderSpec.parse(name), torch.device("cpu")) for name in encoders)
    assert short.depends(["a cat"]) == load_reader(EncoderSpec.parse(encoders[0]), torch.device("cpu")).depends(
        ["a cat"]
    )
    other = CaptionTokenizer(byte_tokenizer(77), 77, short.tokenizer.markers)
    other_pad = CaptionTokenizer(short.tokenizer.tokenizer, 77, replace(short.tokenizer.markers, pad=7))
    known = [
        short.depends(["a cat"]),
        short.depends(["a dog"]),
        long.depends(["a cat"]),
        replace(short, tokenizer=other).depends(["a cat"]),
        replace(short, tokenizer=other_pad).depends(["a cat"]),
    ]
    long.encoder.config.hidden_act = "quick_gelu"
    known.append(long.depends(["a cat"]))
    assert all(one != two for one, two in itertools.combinations(known, 2))
    assert str(encoders[1]) not in json.dumps(known)  # wherever it lies


@pytest.mark.usefixtures("blank_figures")
def test_every_caption_of_a_benchmark_is_read(encoders, tmp_path):
    folder, names = tmp_path / "flickr30k", ("1.jpg", "2.jpg")
    (folder / "flickr30k-images").mkdir(parents=True)
    for name in names:
        (folder / "flickr30k-images" / name).write_bytes(b"no image is opened")
    lines = [f"{name}#{number}\tMan {number} of {name} sits.\n" for name in names for number in range(5)]
    (folder / "results_20130124.token").write_text("".join(lines))
    settings = {"dataset": "flickr30k", "root": str(folder)}
    report = evaluate_attention(AttentionConfig(encoders[1:], str(tmp_path / "out"), **settings))
    assert report["captions"] == 10 and "prompt" not in report["encoders"]["long"]
    assert not (tmp_path / "out" / "attention_prompt.png").exists()
    config = AttentionConfig(encoders[1:], str(tmp_path / "out"), limit=1, **settings)
    pairs, every = (read_source(replace(config, limit=limit), only_captions=True) for limit in (1, "auto"))
    assert pairs.captions == [f"Man {number} of 1.jpg sits." for number in range(5)] and pairs.image_of == [0] * 5
    assert pairs.digest != report["digests"]["data"] == every.digest
    (folder / "results_20130124.token").write_text("".join(lines + ["no caption\n"] * 2))
    with pytest.raises(UserError, match="2 of 12 records.*share of 0.1"):
        read_source(replace(config, max_bad=0.1), only_captions=True)
    assert len(read_source(replace(config, max_bad=0.2), only_captions=True).bad) == 2


def test_data_are_read_to_a_limit_and_bad_records_have_a_largest_share(tmp_path):
    data = write_captions(tmp_path / "data.json", [*CAPTIONS, "", " "])
    config = AttentionConfig(["toy/clip"], str(tmp_path / "out"), data, limit=2, max_bad=0.3)
    pairs = read_source(config, only_captions=True)
    assert pairs.captions == CAPTIONS[:2] and pairs.image_of == [0, 1] and len(pairs.bad) == 2
    with pytest.raises(UserError, match="2 of 7 records"):
        read_source(replace(config, max_bad=0.2), only_captions=True)
    many = replace(config, data=write_captions(tmp_path / "many.json", [f"cat {number}" for number in range(1001)]))
    for limit, count in (("auto", 1000), (None, 1001)):
        assert len(read_source(replace(many, limit=limit), only_captions=True).captions) == count


def test_a_model_with_weights_by_name(tmp_path):
    backbone = tiny_clip(quick_gelu=True, tokenizer=clip_tokenizer(77)).eval()
    torch.save(backbone.model.state_dict(), tmp_path / "weights.pt")
    with registered(tmp_path / "configs", **{"tiny-quickgelu": CONFIG | {"quick_gelu": True}}):
        reader = load_reader(EncoderSpec.parse(f"tiny-quickgelu:{tmp_path / 'weights.pt'}"), torch.device("cpu"))
    got, expected = (eot_attention(own, backbone.tokenize(CAPTIONS)) for own in (reader.encoder, backbone))
    assert torch.equal(got.before_softmax, expected.before_softmax)


def test_the_plot_draws_each_encoder_by_token_position(evaluated):
    output, report = evaluated
    figure = plot(attention_of(report), report["captions"])
    panels = itertools.product(("before_softmax", "after_softmax"), ("keep", "move4"))
    for axes, (quantity, edit) in zip(figure.axes, panels, strict=True):
        assert len(axes.lines) == 4  # of each encoder one for many captions and one for few
        for index, found in enumerate(attention_of(report).values()):
            drawn = {}
            for line in axes.lines[2 * index : 2 * index + 2]:
                drawn |= dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
            scale = 100 if quantity == "after_softmax" else 1
            expected = [scale * value for value in found[edit][quantity]["positions"]]
            assert list(drawn) == list(range(1, len(expected) + 1))
            assert list(drawn.values()) == pytest.approx(expected)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["short (77 positions)", "long (248 positions)"]
    quantities = {name: {"positions": [0.1, 0.2, 0.3, 0.4, 0.5]} for name in ("before_softmax", "after_softmax")}
    few = {"window": 8, "captions_at_position": [20, 20, 2, 1, 1], **quantities}
    lines = plot({"mine": {"keep": few, "move4": few}}, 20).axes[0].lines  # positions of few captions are dotted
    assert [(line.get_linestyle(), list(line.get_xdata())) for line in lines] == [("-", [1, 2, 3]), (":", [3, 4, 5])]
    for name in ("attention.png", "attention_prompt.png"):
        with Image.open(output / name) as image:
            assert image.format == "PNG" and len(image.convert("RGB").getcolors(1 << 24)) > 10


def test_a_prompt_word_by_word(evaluated, long_backbone):
    _, report = evaluated
    found = report["encoders"]["long"]["prompt"]
    words = found["words"]
    assert [word["word"] for word in words] == "a grey cat costs $ 5 or $ 6 , zyxwvutily .".split()
    assert words[-2]["tokens"] > 1 and words[-1]["position"] == words[-2]["position"] + words[-2]["tokens"]
    attention = eot_attention(long_backbone, long_backbone.tokenize([report["settings"]["prompt"]]))
    assert found["tokens"] == attention.ends[0] and found["window"] == 248
    own = slice(words[-2]["position"], words[-1]["position"])
    assert words[-2]["before_softmax"] == pytest.approx(attention.before_softmax[0, own].mean().item(), abs=1e-5)
    assert words[-2]["after_softmax"] == pytest.approx(attention.after_softmax[0, own].sum().item(), abs=1e-6)
    every = [found["sot"], found["eot"], *words]
    assert sum(word["after_softmax"] for word in every) == pytest.approx(1.0, abs=1e-5)
    assert found["eot"]["before_softmax"] == pytest.approx(attention.before_softmax[0, -1].item(), abs=1e-5)


def test_the_words_are_shaded_by_their_share(evaluated):
    told = (("$\\frac$", 0.4), ("two", 0.1), ("three", 0.0))
    words = [{"word": word, "after_softmax": share} for word, share in told]
    ends = {name: {"after_softmax": 0.25} for name in ("sot", "eot")}
    figure = plot_prompt({"mine": {"window": 77, "tokens": 99, "words": words * 20, **ends}})
    axes = figure.axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert "mine: the first 77 of 99 tokens; SOT 25.0%, EOT 25.0%" in texts and texts.count("$\\frac$") == 20
    shades = [bar.get_facecolor()[3] for bar in axes.patches[-3:]]
    assert shades == pytest.approx([1.0, 0.5, 0.0])
    figure.canvas.draw()  # a dollar sign begins no formula: this one is broken
    inside = axes.get_window_extent()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 for box in boxes)
    lines = {}
    for box in boxes:
        lines.setdefault(round(box.y0 / 10), []).append(box)
    for line in lines.values():
        assert all(left.x1 <= right.x0 + 1 for left, right in itertools.pairwise(line))


def test_words_of_several_tokens():
    tokenizer = byte_tokenizer(77)
    ids = tokenizer("a red cat", add_special_tokens=False)["input_ids"]
    assert split_words(tokenizer, ids) == [("a", 1), ("red", 3), ("cat", 3)]
    assert split_words(tokenizer, ids[:-1]) == [("a", 1), ("red", 3), ("ca", 2)]  # cut by the window
    assert split_words(tokenizer, []) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "  \n"}, "holds no words"),
        ({"data": "nowhere.json"}, "are not there"),
        ({"dataset": "docci"}, "'docci' needs the folder that it lies in. Give either --data"),
        ({"root": "somewhere"}, "The root 'somewhere' is of a benchmark, and none is named"),
        ({"data": "toy/test", "dataset": "docci", "root": "somewhere"}, "Give either"),
        ({"dataset": "doci", "root": "somewhere"}, "Did you mean docci"),
    ],
)
def test_what_cannot_be_used_is_refused(encoders, tmp_path, settings, message):
    given = {"encoders": encoders[1:], "output": str(tmp_path), "prompt": "a cat"} | settings
    with pytest.raises(UserError, match=message):
        evaluate_attention(AttentionConfig(**given))
    assert not [path for path in tmp_path.iterdir() if path.name != JOB]
