"""Long prompts through SDXL: diffusers' own results where it has any, and a literal reading of the layout elsewhere."""

import logging
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
from debias_diffusion.text.chunks import Cut, positions_for, split_text


def words(count: int, end: str = "") -> str:
    """A text of `count` tokens, one a word; `end` counts as one."""
    vocabulary = ("red", "cat", "blue", "sofa", "tree", "house", "sky")
    texts = [vocabulary[i % len(vocabulary)] for i in range(count - bool(end))]
    return " ".join(texts) + end


pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def base():
    return tiny_sdxl.sdxl_parts()


@pytest.fixture(scope="module")
def stock(base):
    return assemble(Stock, base)


@pytest.fixture(scope="module")
def ours(base):
    """Both encoders have 77 positions."""
    return assemble(Ours, base)


@pytest.fixture(scope="module")
def long(base):
    """The first encoder has 248 positions."""
    return assemble(Ours, base, text_encoder=tiny_sdxl.stretched(base["text_encoder"], 248))


def texts_of(pipe, text):
    """The text's tokens, per encoder."""
    return [batch[0] for batch in pipe._reader.tokenize(text, None)]


def chunks_of(tokens, slots, overlap=False):
    """The ids of each chunk."""
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
        {"prompt": "a cat! <|endoftext|> and a dog!!", "negative_prompt": "!"},
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


def test_embeddings_passed_in_are_kept_and_fix_the_length(stock, ours):
    embeds, negative, pooled, negative_pooled = stock.encode_prompt(SHORT, negative_prompt="blurry")
    given = {"prompt": None, "prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    calls = [
        given | {"negative_prompt": OTHER},
        {"prompt": OTHER, "negative_prompt_embeds": negative, "negative_pooled_prompt_embeds": negative_pooled},
        given,
        {"prompt": SHORT, "do_classifier_free_guidance": False},
    ]
    for call in calls:
        assert all(map(same, stock.encode_prompt(**call), ours.encode_prompt(**call)))
    long, expected, pooled, _ = ours.encode_prompt(words(100), negative_prompt="grey")
    given |= {"prompt_embeds": long, "pooled_prompt_embeds": pooled}
    assert torch.equal(ours.encode_prompt(**given, negative_prompt="grey")[1], expected)


# ---- lengths


@pytest.mark.parametrize(
    ("lengths", "table"),
    [
        ((77, 77), {0: 77, 75: 77, 76: 152, 150: 152, 151: 227, 225: 227, 226: 302, 301: 377}),
        ((248, 77), {75: 77, 76: 152, 151: 227, 226: 248, 246: 248, 247: 494, 492: 494, 493: 740}),
        ((248,), {0: 77, 76: 152, 226: 248, 247: 494}),
        ((10, 5), {0: 5, 3: 5, 4: 8, 6: 8, 7: 10, 8: 10, 9: 18}),
    ],
)
def test_lengths(lengths, table):
    for order in (lengths, lengths[::-1]):
        assert {n: positions_for(n, list(order)) for n in table} == table


def test_prompt_and_negative_share_the_longer_length(ours, long):
    for prompt, negative, positions in ((words(80), "blurry", 152), ("cat", words(160), 227)):
        embeds, negatives, pooled, negative_pooled = long.encode_prompt(prompt, negative_prompt=negative)
        assert embeds.shape == negatives.shape == (1, positions, 72)
        assert pooled.shape == negative_pooled.shape == (1, tiny_sdxl.POOLED_WIDTH)
    # any text of any encoder counts
    for call in ({"prompt_2": words(80)}, {"negative_prompt": "", "negative_prompt_2": words(80)}):
        assert ours.encode_prompt("cat", **call)[0].shape[1] == 152
    assert ours.encode_prompt(["cat", words(160)])[0].shape == (2, 227, 72)
    # but not one that is not used
    embeds, _, pooled, _ = ours.encode_prompt("cat")
    given = {"negative_prompt_embeds": embeds, "negative_pooled_prompt_embeds": pooled}
    for prompt, call, positions in (("cat", {"negative_prompt": words(200)}, 77), (words(200), given, 227)):
        assert ours.encode_prompt(prompt, **call, do_classifier_free_guidance=False)[0].shape[1] == positions
    zeros = ours.encode_prompt("cat", negative_prompt=None, negative_prompt_2=words(200))
    assert zeros[1].shape[1] == 77 and not zeros[1].any() and not zeros[3].any()


def test_prompt_layout_says_what_encode_prompt_does(base, long):
    pipe = assemble(Ours, base)
    assert pipe.prompt_layout("cat")[:3] == (1, 77, (1, 1))
    assert pipe.prompt_layout(words(120, ".")).chunks == (3, 3)
    assert pipe.set_long_prompt(reading="separate").prompt_layout(words(120, ".")).chunks == (2, 2)
    assert long.prompt_layout(words(300))[:3] == (300, 494, (2, 8))
    assert long.prompt_layout("cat", negative_prompt=words(100))[:3] == (1, 152, (1, 1))


def test_a_cut_layout_holds_the_tokens_before_cutting(long):
    cut = type(long)(**long.components).set_long_prompt(reading="cut", strict=True)
    assert cut.prompt_layout(words(300), negative_prompt=words(100))[:4] == (300, 77, (1, 1), 77)
    assert cut.prompt_layout("cat") == (1, 77, (1, 1), 77, (("", 0),) * 2, ((("cat", 1),),) * 2, (), ())
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
        states += [*out[: not states], *out[1 + chunk.again : 1 + len(chunk.read)]]
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


CONTEXT_LENGTHS = [(77, 77), (248, 77), (248, 248), (20, 9), (9, 20), (5, 5), (4, 12)]


@pytest.fixture(scope="module")
def pipe_of_lengths(base):
    """One pipeline for each pair of context lengths."""
    encoders = [
        (tiny_sdxl.text_encoder(positions=a), tiny_sdxl.text_encoder_2(positions=b)) for a, b in CONTEXT_LENGTHS
    ]
    pipes = [assemble(Ours, base, text_encoder=first, text_encoder_2=second) for first, second in encoders]
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
    tokens = list(zip(*pipe._reader.tokenize(texts, None), strict=True))
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


def test_one_forward_an_encoder_and_never_past_its_context_length(long):
    shapes = []
    hooks = [
        encoder.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
        for encoder in (long.text_encoder, long.text_encoder_2)
    ]
    long.encode_prompt([words(300), "cat"], negative_prompt="grey")
    for hook in hooks:
        hook.remove()
    # chunks of both prompts and one empty one; then those of both negatives and one empty one
    assert shapes == [(2 + 1 + 1, 248), (8 + 1 + 1, 77), (2 + 1, 248), (2 + 1, 77)]


# ---- cuts


@pytest.mark.parametrize(
    ("text", "first_chunk"),
    [
        # eight slots, so a cut may stand after 4 to 8 tokens
        ("red red red red red red red red", "red red red red red red red red"),
        ("red red red red. red, red red red red", "red red red red."),
        ("red red red red red! red red red red", "red red red red red!"),
        ("red red red. red. red red red red", "red red red. red."),  # of two sentences' ends the later
        ('red red red (red.") red, red red red', 'red red red (red.")'),
        ("red red red )) red, red red red red", "red red red )) red,"),  # brackets alone end nothing
        ("red red red red\nred, red red red red", "red red red red"),
        ("red. red red, red; red red red red red", "red. red red, red;"),  # that sentence's end wastes too much
        ("red red red red, red red red red", "red red red red,"),
        ("red red red red red red red red red", "red red red red red red red red"),
        ("red red red 3.5 red red red red", "red red red 3.5 red red"),  # a number's point ends no sentence
        ("red red red red red red red supercalifragilistic", "red red red red red red red"),  # a word stays whole
        ("red,red,red,red red,red,red,red", "red,red,red,red"),  # nor does a comma without a space
    ],
)
def test_a_chunk_ends_at_the_best_place(ours, text, first_chunk):
    first = ours.tokenizer.decode(chunks_of(texts_of(ours, text)[0], 8)[0])
    assert first.replace(" ", "") == first_chunk.replace(" ", "").replace("\n", "")


any_text = given(
    text=st.text(alphabet=st.sampled_from("ab c,.;!? 3\n。é😀<|>"), max_size=300), slots=st.integers(1, 20)
)


@any_text
def test_any_text_is_cut_without_loss_or_waste(ours, text, slots):
    tokens = texts_of(ours, text)[0]
    assert tokens.ids == ours.tokenizer(text, add_special_tokens=False).input_ids
    pieces = chunks_of(tokens, slots)
    assert [token for piece in pieces for token in piece] == tokens.ids
    assert all(slots / 2 <= len(piece) <= slots for piece in pieces[:-1])
    assert len(pieces[-1]) <= slots


@any_text
def test_overlapping_chunks_keep_every_token_once_and_know_what_came_before(ours, text, slots):
    tokens = texts_of(ours, text)[0]
    chunks = split_text(tokens, slots)
    assert [at for chunk in chunks for at in chunk.kept] == list(range(len(tokens.ids)))
    assert all(chunk.read.stop == chunk.kept.stop and len(chunk.read) <= slots for chunk in chunks)
    apart = split_text(tokens, slots, "separate")
    assert chunks[0].again == 0 and chunks[0].kept == apart[0].kept and len(chunks) <= 2 * len(apart)
    for chunk in chunks[1:]:
        assert 0 < len(chunk.kept) <= slots - slots // 4 and chunk.again >= slots // 4
        if chunk.read.start:  # at the best place of those where it may begin, and at the first of them
            places = range(chunk.read.stop - slots, chunk.kept.start - slots // 4 + 1)
            best = max(tokens.cuts[at - 1] for at in places)
            assert chunk.read.start == next(at for at in places if tokens.cuts[at - 1] == best)


def test_overlap_takes_at_most_twice_the_chunks(ours):
    # No chunk of the last word alone; and sentences of 25 tokens would each take a chunk: 7 rows instead of 3.
    for text, kept in ((words(150), [75, 37, 38]), ((words(25, ".") + " ") * 9, [75, 50, 50, 50])):
        assert [len(chunk.kept) for chunk in split_text(texts_of(ours, text)[0], 75)] == kept


def test_nothing_is_read_across_a_break(ours):
    pipe = type(ours)(**ours.components).set_long_prompt(emphasis="comfyui")
    tokens = pipe._reader.tokenize(f"{words(100)} BREAK {words(100)}", None)[0][0]
    chunks = split_text(tokens, 75)
    second = next(number for number, chunk in enumerate(chunks) if chunk.kept.start == 100)
    assert chunks[second].read.start == 100 and [chunk.again > 0 for chunk in chunks] == [False, True, False, True]


@pytest.fixture
def inverted(base):
    """Both encoders know the textual inversions "<x>" of six vectors and "<y>" of one."""
    pipe = assemble_copy(Ours, base)
    tiny_sdxl.add_inversions(pipe, {"<x>": 6, "<y>": 1})
    return pipe


def test_the_vectors_of_a_textual_inversion_stay_together(inverted, base):
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


@pytest.mark.parametrize("reading", ["overlap", "separate", "cut", "a1111", "kohya", "comfyui"])
def test_pooled_embeddings_are_of_the_end_and_not_of_an_inversion(inverted, reading):
    """Unless diffusers' are wanted, which are of the highest id with the `eos_token_id` of SDXL's published files."""
    encoder, states = inverted.text_encoder_2, []
    hook = encoder.text_model.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    inverted.set_long_prompt(reading=reading)
    as_diffusers = reading in ("overlap", "separate", "cut")

    def pooled_at(place):
        return encoder.text_projection(states[0][0, place])

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        short = inverted.encode_prompt("red <x> cat", do_classifier_free_guidance=False)[2][0]
    assert torch.allclose(short, pooled_at(7 if as_diffusers else 9), atol=1e-6)
    assert ["eos_token_id 2" in str(warning.message) for warning in warned] == [True] * as_diffusers
    states.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        negative = words(100) if reading not in ("cut", "kohya") else "red"
        if reading != "cut":
            long = inverted.encode_prompt("red <x> cat", negative_prompt=negative)[2][0]
            assert torch.allclose(long, pooled_at(9), atol=1e-6)
    hook.remove()


def test_names_of_inversions_may_end_in_a_number(base):
    pipe = assemble_copy(Ours, base)
    tiny_sdxl.add_inversions(pipe, {"style_2": 2, "style_3": 1, "style": 1})
    ids, cuts, *_ = texts_of(pipe, "style_2 style_3 style style_2 ！")[0]
    assert ids[:6] == [SIZE, SIZE + 1, SIZE + 2, SIZE + 3, SIZE, SIZE + 1]
    assert cuts[:6] == [Cut.NEVER, Cut.WORD, Cut.WORD, Cut.WORD, Cut.NEVER, Cut.WORD]
    assert set(cuts[6:-1]) == {Cut.TOKEN} and cuts[-1] == Cut.SENTENCE  # of one character


def test_no_warning_of_texts_that_are_read_in_full(inverted, caplog):
    """That ids past the context length fail, and that a text was cut, holds for stock use, and there is still said."""
    prompt = f"{words(200)} <x> and {words(200)} (red:1.2)"
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers", "debias_diffusion")]
    for logger in loggers:
        caplog.set_level(logging.WARNING, logger.name)  # where another test has silenced it
        logger.addHandler(caplog.handler)
    try:
        inverted.set_long_prompt(emphasis="comfyui").encode_prompt(prompt, negative_prompt=prompt)
        assert caplog.records == []
        Stock(**inverted.components).encode_prompt(prompt)
        assert "indexing errors" in caplog.text and "truncated" in caplog.text
    finally:
        for logger in loggers:
            logger.removeHandler(caplog.handler)


# ---- options, state, errors


def test_the_negative_prompt_follows_clip_skip_by_an_option(stock, base):
    pipe, call = assemble(Ours, base), {"prompt": SHORT, "negative_prompt": OTHER, "clip_skip": 1}
    default, followed = stock.encode_prompt(**call), stock.encode_prompt(OTHER, clip_skip=1)[0]
    assert torch.equal(pipe.encode_prompt(**call)[1], default[1]) and not torch.equal(default[1], followed)
    got = pipe.set_long_prompt(negative_clip_skip=True).encode_prompt(**call)
    assert torch.equal(got[0], default[0]) and torch.equal(got[1], followed)


SCALES = {"text_encoder": 0.3, "text_encoder_2": 0.1}


@pytest.mark.parametrize("scale", [0.7, 0.0])
def test_lora_scale_holds_for_one_call_and_survives_an_error(base, scale):
    stock, pipe = (assemble_copy(cls, base) for cls in (Stock, Ours))
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


def test_errors(ours, base):
    embeds, _, pooled, _ = ours.encode_prompt("cat")
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    for prompt, call, message in (
        (["a", "b"], {"negative_prompt": ["a", "b", "c"]}, "one batch size, got 2 and 3"),
        (["a", "b"], {"prompt_2": ["a"]}, "one batch size, got 2 and 1"),
        ("cat", {"clip_skip": -1}, "`clip_skip` is -1"),
        ("cat", {"clip_skip": 3}, "`clip_skip` is 3, but must be from 0 to 2"),
        ("a cat \ud83d", {}, "surrogates not allowed"),
        ([], {}, "the batch of prompts is empty"),
        (["a", None], {}, "a prompt must be text, got None"),
        ("a", {"prompt_2": [7]}, "a prompt must be text, got 7"),
        (None, given | {"negative_prompt": words(80)}, "takes 82 positions, .* does not fit the 77 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.encode_prompt(prompt, **call)
    with pytest.raises(TypeError, match="unexpected keyword argument 'negative_clipskip'"):
        ours.set_long_prompt(negative_clipskip=True)
    without = assemble(Ours, base, text_encoder=None, text_encoder_2=None)
    with pytest.raises(ValueError, match="`text_encoder_2` is None, so no prompt can be encoded"):
        without.encode_prompt("cat")
    assert torch.equal(without.encode_prompt(None, **given)[0], embeds)
