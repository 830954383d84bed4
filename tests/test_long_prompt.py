"""Long prompts through SDXL: diffusers' own results where it has any, and a literal reading of the layout elsewhere."""

import warnings

import pytest
import torch
from diffusers import StableDiffusionXLPipeline as Stock
from helpers import tiny_sdxl
from helpers.draw import OTHER, SHORT, add_lora
from helpers.tiny_sdxl import assemble, assemble_copy
from helpers.vocabulary import BOS, EOS, SIZE
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline as Ours
from debias_diffusion.text.chunks import positions_for, split_text


def words(count: int, end: str = "") -> str:
    """A text of `count` tokens, one a word; `end` counts as one."""
    vocabulary = ("red", "cat", "blue", "sofa", "tree", "house", "sky")
    texts = [vocabulary[i % len(vocabulary)] for i in range(count - bool(end))]
    return " ".join(texts) + end


pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def stock(parts):
    return assemble(Stock, parts)


@pytest.fixture(scope="module")
def ours(parts):
    """Both encoders have 77 positions."""
    return assemble(Ours, parts)


@pytest.fixture(scope="module")
def long(parts):
    """The first encoder has 248 positions."""
    return assemble(Ours, parts, text_encoder=tiny_sdxl.stretched(parts["text_encoder"], 248))


def texts_of(pipe, text):
    return [plan.parts[0].tokens for plan in pipe._read((text,), None, False).prompts.encoders]


def chunks_of(tokens, slots, overlap=False):
    return [
        [tokens.ids[at] for at in chunk.read]
        for chunk in split_text(tokens, slots, "overlap" if overlap else "separate")
    ]


# ---- prompts that fit: diffusers' own results, bit for bit


def same(a, b):
    return (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize(
    "call",
    [
        {"prompt": [SHORT, OTHER, ""], "negative_prompt": ["", "blurry", "!"], "num_images_per_prompt": 2},
        {"prompt": words(75), "prompt_2": "dragon", "negative_prompt": words(75, ".")},
        {"prompt": "a cat! < and a dog!!", "negative_prompt": "!"},
    ],
)
def test_short_prompts_draw_from_the_embeddings_of_diffusers(stock, ours, call):
    assert all(map(same, stock.encode_prompt(**call), ours.encode_prompt(**call)))


@pytest.mark.parametrize("zeros", [True, False])
def test_zeros_for_an_absent_negative_as_in_diffusers(stock, ours, zeros):
    pipes = [type(pipe)(**pipe.components, force_zeros_for_empty_prompt=zeros) for pipe in (stock, ours)]
    expected, got = [pipe.encode_prompt(SHORT) for pipe in pipes]
    assert all(map(same, expected, got))
    assert (got[1] == 0).all() == zeros and (got[3] == 0).all() == zeros


# ---- lengths


@pytest.mark.parametrize(
    ("lengths", "table"),
    [
        ((77, 77), {0: 77, 75: 77, 76: 152, 150: 152, 151: 227}),
        ((248, 77), {75: 77, 76: 152, 151: 227, 226: 248, 246: 248, 247: 494, 493: 740}),
        ((10, 5), {0: 5, 3: 5, 4: 8, 6: 8, 7: 10, 8: 10, 9: 18}),
    ],
)
def test_lengths(lengths, table):
    for order in (lengths, lengths[::-1]):
        assert {n: positions_for(n, list(order)) for n in table} == table


def test_the_layout_and_the_embeddings_have_the_longer_length_of_the_texts_that_are_used(ours, long):
    for pipe, prompt, call, positions in (
        (long, words(80), {"negative_prompt": "blurry"}, 152),
        (long, "cat", {"negative_prompt": words(160)}, 227),
        (long, words(300), {}, 494),
        (ours, "cat", {"negative_prompt": "", "negative_prompt_2": words(80)}, 152),
        (ours, ["cat", words(160)], {}, 227),
        (ours, "cat", {"negative_prompt": words(200), "do_classifier_free_guidance": False}, 77),
    ):
        embeds = pipe.encode_prompt(prompt, **call)
        assert pipe.prompt_layout(prompt, **call).positions == embeds[0].shape[1] == positions
        assert embeds[1] is None or embeds[1].shape == embeds[0].shape
    zeros = ours.encode_prompt("cat", negative_prompt=None, negative_prompt_2=words(200))
    assert zeros[1].shape[1] == 77 and not zeros[1].any() and not zeros[3].any()


def test_a_cut_layout_holds_the_tokens_before_cutting(long):
    assert long.prompt_layout(words(300))[:3] == (300, 494, (2, 8))
    cut = type(long)(**long.components).set_long_prompt(reading="cut", strict=True)
    assert cut.prompt_layout(words(300), negative_prompt=words(100))[:4] == (300, 77, (1, 1), 77)
    assert all(map(same, cut.encode_prompt(words(300)), cut.encode_prompt(words(75))))


# ---- layout


def layout_by_hand(tokenizer, encoder, tokens, length, overlap=False):
    """[length, width]: every chunk encoded alone, its hidden states picked one by one."""
    context_length = min(encoder.config.max_position_embeddings, length)

    def run(text):
        pads = [tokenizer.pad_token_id] * (context_length - len(text) - 2)
        ids = [tokenizer.bos_token_id, *text, tokenizer.eos_token_id, *pads]
        return encoder(torch.tensor([ids]), output_hidden_states=True).hidden_states[-2][0]

    states = []
    for chunk in split_text(tokens, context_length - 2, "overlap" if overlap else "separate"):
        out = run([tokens.ids[at] for at in chunk.read])
        states += [*out[: not states], *out[1 + chunk.reread : 1 + len(chunk.read)]]
    states += out[1 + len(chunk.read) :]
    empty = run([])
    while len(states) < length:
        states += empty[1:]
    return torch.stack(states[:length])


def pair_by_hand(pipe, tokens, length, overlap=False):
    """The same of both encoders; `tokens` of each."""
    sources = ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2))
    parts = [layout_by_hand(*source, own, length, overlap) for source, own in zip(sources, tokens, strict=True)]
    return torch.cat(parts, dim=-1)


CONTEXT_LENGTHS = [(77, 77), (248, 77), (20, 9), (9, 20), (5, 5), (4, 12)]


@pytest.fixture(scope="module")
def pipe_of_lengths(parts):
    encoders = [
        (tiny_sdxl.text_encoder(positions=a), tiny_sdxl.text_encoder_2(positions=b)) for a, b in CONTEXT_LENGTHS
    ]
    pipes = [assemble(Ours, parts, text_encoder=first, text_encoder_2=second) for first, second in encoders]
    return dict(zip(CONTEXT_LENGTHS, pipes, strict=True))


# One token each, with everything a cut looks at.
TOKENS = st.lists(st.sampled_from([" cat", " red", " sky", ",", ".", ";", "!", ' ."', "\n\nblue", " 3", " étang"]))


@settings(max_examples=20)
@given(
    lengths=st.sampled_from(CONTEXT_LENGTHS),
    texts=st.tuples(TOKENS, TOKENS),
    repeat=st.integers(1, 30),
    overlap=st.booleans(),
)
def test_layout_is_the_literal_one(pipe_of_lengths, lengths, texts, repeat, overlap):
    pipe = pipe_of_lengths[lengths].set_long_prompt(reading="overlap" if overlap else "separate")
    texts = ["".join(text * repeat)[: 12 * min(lengths)] for text in texts]
    embeds, negatives, pooled, _ = pipe.encode_prompt(texts, negative_prompt="grey")
    plans = pipe._read((texts,), None, False).prompts.encoders
    tokens = list(zip(*([part.tokens for part in plan.parts] for plan in plans), strict=True))
    longest, length = max(len(own.ids) for row in tokens for own in row), embeds.shape[1]
    assert length == positions_for(longest, list(lengths)) >= longest + 2
    for row in range(2):
        expected = pair_by_hand(pipe, tokens[row], length, overlap)
        torch.testing.assert_close(embeds[row], expected, rtol=1e-4, atol=1e-4)
        first = chunks_of(tokens[row][1], min(lengths[1], length) - 2)[0]
        alone = pipe.text_encoder_2(torch.tensor([[BOS, *first, EOS]])).text_embeds[0]
        torch.testing.assert_close(pooled[row], alone, rtol=1e-4, atol=1e-4)
    grey = pair_by_hand(pipe, texts_of(pipe, "grey"), length)
    torch.testing.assert_close(negatives[1], grey, rtol=1e-4, atol=1e-4)


# ---- textual inversions


@pytest.fixture
def inverted(parts):
    """Both encoders know the textual inversions "<x>" of six vectors and "<y>" of one."""
    pipe = assemble_copy(Ours, parts)
    tiny_sdxl.add_inversions(pipe, {"<x>": 6, "<y>": 1})
    return pipe


def test_the_vectors_of_a_textual_inversion_stay_together(inverted, parts):
    group = [SIZE + i for i in range(6)]
    for before in range(20):
        tokens = texts_of(inverted, f"{words(before)} <x> <y> <x>, {words(9)}")[0]
        assert tokens.ids[before : before + 13] == [*group, SIZE + 6, *group]
        pieces = chunks_of(tokens, 8)
        assert sum(piece[i : i + 6] == group for piece in pieces for i in range(len(piece))) == 2
    # more vectors than slots: cut all the same, and nothing lost
    assert [len(piece) for piece in chunks_of(texts_of(inverted, "<x>")[0], 4)] == [4, 2]
    stock = Stock(**inverted.components)
    assert all(map(same, stock.encode_prompt("a <x> <y>, <x>"), inverted.encode_prompt("a <x> <y>, <x>")))


@pytest.mark.parametrize("reading", ["overlap", "cut", "a1111", "comfyui"])
def test_pooled_embeddings_are_of_the_end_and_not_of_an_inversion(inverted, reading):
    """Unless diffusers' are wanted, which are of the highest id with the `eos_token_id` of SDXL's published files."""
    encoder, states = inverted.text_encoder_2, []
    hook = encoder.text_model.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    inverted.set_long_prompt(reading=reading)
    as_diffusers = reading in ("overlap", "cut")

    def pooled_at(place):
        return encoder.text_projection(states[0][0, place])

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        short = inverted.encode_prompt("red <x> cat", do_classifier_free_guidance=False)[2][0]
    assert torch.allclose(short, pooled_at(7 if as_diffusers else 9), atol=1e-6)
    assert ["eos_token_id 2" in str(warning.message) for warning in warned] == [True] * as_diffusers
    states.clear()
    if reading in ("overlap", "a1111"):  # of several rows, the end is used in every reading
        long = inverted.encode_prompt("red <x> cat", negative_prompt=words(100))[2][0]
        assert torch.allclose(long, pooled_at(9), atol=1e-6)
    hook.remove()


# ---- options, state, errors


def test_the_negative_prompt_follows_clip_skip_by_an_option(stock, parts):
    pipe, call = assemble(Ours, parts), {"prompt": SHORT, "negative_prompt": OTHER, "clip_skip": 1}
    default, followed = stock.encode_prompt(**call), stock.encode_prompt(OTHER, clip_skip=1)[0]
    assert torch.equal(pipe.encode_prompt(**call)[1], default[1]) and not torch.equal(default[1], followed)
    got = pipe.set_long_prompt(negative_clip_skip=True).encode_prompt(**call)
    assert torch.equal(got[0], default[0]) and torch.equal(got[1], followed)


def test_embeddings_that_are_given_beside_a_text(stock, ours):
    """The prompt's with a negative text, and the other way round; as diffusers, and with its length."""
    embeds, negative, pooled, negative_pooled = stock.encode_prompt([SHORT, OTHER], negative_prompt=["grey", "old"])
    for encoded, texts in (
        ({"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}, {"negative_prompt": ["grey", "old"]}),
        ({"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}, {"negative_prompt": "grey"}),
        (
            {"negative_prompt_embeds": negative, "negative_pooled_prompt_embeds": negative_pooled},
            {"prompt": [SHORT, ""]},
        ),
    ):
        call = {"prompt": None} | encoded | texts
        expected = ours.encode_prompt([SHORT, OTHER], negative_prompt=texts.get("negative_prompt", ["grey", "old"]))
        got = ours.encode_prompt(**call)
        assert same(got[1], expected[1]) and same(got[3], expected[3])
        assert "prompt" in texts or (same(got[0], embeds) and same(got[2], pooled))
    long = ours.encode_prompt(words(80), negative_prompt="grey")
    got = ours.encode_prompt(None, negative_prompt="grey", prompt_embeds=long[0], pooled_prompt_embeds=long[2])
    assert all(map(same, got, long))


SCALES = {"text_encoder": 0.3, "text_encoder_2": 0.1}


def test_lora_scale_holds_for_one_call_and_survives_an_error(parts):
    scale = 0.7
    stock, pipe = (assemble_copy(cls, parts) for cls in (Stock, Ours))
    layers = [add_lora(p.components[name], part) for p in (pipe, stock) for name, part in SCALES.items()][:2]
    before = [layer.scaling["default"] for layer in layers]
    full, scaled = pipe.encode_prompt(SHORT), pipe.encode_prompt(SHORT, lora_scale=scale)
    assert all(map(same, scaled, stock.encode_prompt(SHORT, lora_scale=scale)))

    def fail(*_):
        assert [layer.scaling["default"] for layer in layers] == [scale * part for part in before]
        raise RuntimeError("out of memory")

    hook = pipe.text_encoder_2.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        pipe.encode_prompt(SHORT, lora_scale=scale)
    hook.remove()
    assert [layer.scaling["default"] for layer in layers] == before
    assert torch.equal(pipe.encode_prompt(SHORT)[0], full[0]) and not torch.equal(scaled[0], full[0])


def test_errors(ours, parts):
    embeds, _, pooled, _ = ours.encode_prompt("cat")
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    for prompt, call, message in (
        (["a", "b"], {"negative_prompt": ["a", "b", "c"]}, "one batch size, got 2 and 3"),
        ("cat", {"clip_skip": 3}, "`clip_skip` is 3, but must be from 0 to 2"),
        ([], {}, "the batch of prompts is empty"),
        ("a", {"prompt_2": [7]}, "a prompt must be text, got 7"),
        (None, given | {"negative_prompt": words(80)}, "takes 82 positions, .* does not fit the 77 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.encode_prompt(prompt, **call)
    with pytest.raises(
        TypeError, match="'negative_clipskip' is no option of long prompts, which are reading, emphasis"
    ):
        ours.set_long_prompt(negative_clipskip=True)
    without = assemble(Ours, parts, text_encoder=None, text_encoder_2=None)
    with pytest.raises(ValueError, match="`text_encoder_2` is None: give `prompt_embeds`"):
        without.encode_prompt("cat")
    assert torch.equal(without.encode_prompt(None, **given)[0], embeds)
