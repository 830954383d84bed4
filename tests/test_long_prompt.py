"""Long prompts through SDXL: diffusers' own results where it has any, and a literal reading of the layout elsewhere."""

import json
import logging

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import OTHER, SHORT, add_lora, draw, load
from helpers.tiny_sdxl import assemble, assemble_copy
from helpers.vocabulary import BOS, EOS, SIZE
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.chunks import Cut, positions_for, split_text
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.tokens import clip_tokenizer


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
    return assemble(StableDiffusionXLPipeline, base)


@pytest.fixture(scope="module")
def ours(base):
    """Both encoders have 77 positions."""
    return assemble(StableDiffusionXLLongPromptPipeline, base)


@pytest.fixture(scope="module")
def long(base):
    """The first encoder has 248 positions."""
    return assemble(
        StableDiffusionXLLongPromptPipeline, base, text_encoder=tiny_sdxl.stretched(base["text_encoder"], 248)
    )


def texts_of(pipe, text):
    """The text's tokens, per encoder."""
    return [batch[0] for batch in pipe._tokenize(text, None)]


def chunks_of(tokens, slots):
    """The ids of each chunk."""
    return [[tokens.ids[at] for at in piece.read] for piece in split_text(tokens, slots, overlap=False)]


# ---- prompts that fit: diffusers' own results, bit for bit

SHORT_CALLS = {
    "batch": {"prompt": [SHORT, OTHER, ""]},
    "batch and negatives": {"prompt": [SHORT, OTHER], "negative_prompt": ["", "blurry"], "num_images_per_prompt": 2},
    "75 tokens": {"prompt": words(75), "negative_prompt": words(75, ".")},
    "special tokens as text": {"prompt": "a cat! <|endoftext|> and a dog!!", "negative_prompt": "!"},
}


@pytest.mark.parametrize("call", SHORT_CALLS.values(), ids=SHORT_CALLS)
def test_short_prompts_draw_the_same_image_as_diffusers(stock, ours, call):
    call = {"prompt": SHORT, **call}
    images = draw(stock, **call)
    assert np.array_equal(draw(ours, **call), images)
    assert not np.array_equal(draw(ours, **call | {"prompt_2": "dragon"}), images)


def same(a, b):
    return (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("zeros", [True, False])
def test_zeros_for_an_absent_negative_as_in_diffusers(stock, ours, zeros):
    pipes = [type(pipe)(**pipe.components, force_zeros_for_empty_prompt=zeros) for pipe in (stock, ours)]
    expected, got = [pipe.encode_prompt(SHORT) for pipe in pipes]
    assert all(map(same, expected, got))
    assert (got[1] == 0).all() == zeros and (got[3] == 0).all() == zeros


@pytest.mark.parametrize("prompt_2", [None, OTHER])
def test_without_the_first_encoder_as_in_diffusers(base, prompt_2):
    pipes = [
        assemble(cls, base, text_encoder=None, tokenizer=None)
        for cls in (StableDiffusionXLPipeline, StableDiffusionXLLongPromptPipeline)
    ]
    expected, got = [pipe.encode_prompt(SHORT, prompt_2, negative_prompt="blurry") for pipe in pipes]
    assert all(map(same, expected, got))
    assert got[0].shape == (1, 77, tiny_sdxl.WIDTH_2)
    assert pipes[1].encode_prompt(words(100))[0].shape == (1, 152, tiny_sdxl.WIDTH_2)


def test_embeddings_passed_in_as_in_diffusers(stock, ours):
    prompt_embeds, negative, pooled, negative_pooled = stock.encode_prompt(SHORT, negative_prompt="blurry")
    calls = [
        {"prompt": None, "prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled, "negative_prompt": OTHER},
        {"prompt": OTHER, "negative_prompt_embeds": negative, "negative_pooled_prompt_embeds": negative_pooled},
        {"prompt": None, "prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled},
        {"prompt": SHORT, "do_classifier_free_guidance": False},
    ]
    for call in calls:
        assert all(map(same, stock.encode_prompt(**call), ours.encode_prompt(**call)))


def test_a_long_first_encoder_reads_short_prompts_at_77(ours, long):
    embeds, _, pooled, _ = long.encode_prompt(SHORT)
    assert embeds.shape[1] == 77
    ids = long.tokenizer(SHORT, padding="max_length", max_length=248, return_tensors="pt").input_ids
    at_248 = long.text_encoder(ids, output_hidden_states=True).hidden_states[-2][:, :77]
    torch.testing.assert_close(embeds[..., :32], at_248, rtol=1e-5, atol=1e-5)
    # and what is stretched keeps the positions it had
    torch.testing.assert_close(embeds, ours.encode_prompt(SHORT)[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(pooled, ours.encode_prompt(SHORT)[2])


# ---- lengths


@pytest.mark.parametrize(
    ("lengths", "table"),
    [
        ((77, 77), {0: 77, 75: 77, 76: 152, 150: 152, 151: 227, 225: 227, 226: 302, 300: 302, 301: 377}),
        (
            (248, 77),
            {0: 77, 75: 77, 76: 152, 150: 152, 151: 227, 225: 227, 226: 248, 246: 248, 247: 494, 492: 494, 493: 740},
        ),
        ((77, 248), {75: 77, 76: 152, 226: 248, 247: 494}),
        ((248,), {0: 77, 76: 152, 226: 248, 247: 494}),
        ((248, 248), {0: 77, 76: 152, 226: 248, 246: 248, 247: 494, 493: 740}),
        ((10, 5), {0: 5, 3: 5, 4: 8, 6: 8, 7: 10, 8: 10, 9: 18}),
    ],
)
def test_lengths(lengths, table):
    assert {n: positions_for(n, list(lengths)) for n in table} == table


def test_prompt_and_negative_share_the_longer_length(ours, long):
    for prompt, negative, positions in ((words(80), "blurry", 152), ("cat", words(160), 227)):
        embeds, negatives, pooled, negative_pooled = long.encode_prompt(prompt, negative_prompt=negative)
        assert embeds.shape == negatives.shape == (1, positions, 72)
        assert pooled.shape == negative_pooled.shape == (1, tiny_sdxl.POOLED_WIDTH)
    # any text of any encoder counts
    assert ours.encode_prompt("cat", prompt_2=words(80))[0].shape[1] == 152
    assert ours.encode_prompt("cat", negative_prompt="", negative_prompt_2=words(80))[0].shape[1] == 152
    assert ours.encode_prompt(["cat", words(160)])[0].shape == (2, 227, 72)


def test_a_negative_that_is_not_used_does_not_count(ours):
    unused = ours.encode_prompt("cat", negative_prompt=words(200), do_classifier_free_guidance=False)
    assert unused[0].shape[1] == 77
    assert unused[1] is None and unused[3] is None
    embeds, _, pooled, _ = ours.encode_prompt("cat")
    unused = ours.encode_prompt(
        words(200),
        do_classifier_free_guidance=False,
        negative_prompt_embeds=embeds,
        negative_pooled_prompt_embeds=pooled,
    )
    assert unused[0].shape[1] == 227
    # zeros, because the negative prompt itself is absent
    zeroed = ours.encode_prompt("cat", negative_prompt=None, negative_prompt_2=words(200))
    assert zeroed[1].shape[1] == 77 and (zeroed[1] == 0).all() and (zeroed[3] == 0).all()
    assert ours.encode_prompt(words(100))[1].shape[1] == 152


def test_prompt_layout_says_what_encode_prompt_does(ours, long):
    assert ours.prompt_layout("cat")[:3] == (1, 77, (1, 1))
    assert long.prompt_layout(words(143))[:3] == (143, 152, (1, 3))
    assert long.prompt_layout(words(300))[:3] == (300, 494, (2, 8))
    assert long.prompt_layout("cat", negative_prompt=words(100))[:3] == (1, 152, (1, 1))
    assert long.prompt_layout("cat", negative_prompt=words(100), do_classifier_free_guidance=False)[1] == 77


def test_a_cut_layout_holds_the_tokens_before_cutting(long):
    cut = type(long)(**long.components).set_long_prompt(reading="cut", strict=True)
    assert cut.prompt_layout(words(300), negative_prompt=words(100)) == (300, 77, (1, 1), 77)
    assert cut.prompt_layout("cat") == (1, 77, (1, 1), 77)
    got, expected = cut.encode_prompt(words(300)), cut.encode_prompt(words(75))
    assert all(map(same, got, expected))


# ---- layout


def layout_by_hand(tokenizer, encoder, tokens, length, layer, overlap=False):
    """[length, width]: every chunk encoded alone, its hidden states picked one by one."""
    window = min(encoder.config.max_position_embeddings, length)
    pad = tokenizer.pad_token_id

    def run(text):
        ids = [tokenizer.bos_token_id, *text, tokenizer.eos_token_id] + [pad] * (window - len(text) - 2)
        assert len(ids) == window
        return encoder(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]

    states = []
    pieces = chunks_of(tokens, window - 2)
    if overlap:
        pieces = [[tokens.ids[at] for at in chunk.read] for chunk in split_text(tokens, window - 2)]
        new = [len(chunk.kept) for chunk in split_text(tokens, window - 2)]
    for number, piece in enumerate(pieces):
        out = run(piece)
        again = len(piece) - new[number] if overlap else 0
        states += [*out[: not states], *out[1 + again : 1 + len(piece)]]
    states += out[1 + len(piece) :]
    empty = run([])
    while len(states) < length:
        states += empty[1:]
    return torch.stack(states[:length])


CONTEXT_LENGTHS = [(77, 77), (248, 77), (248, 248), (20, 9), (9, 20), (5, 5), (4, 12)]


@pytest.fixture(scope="module")
def pipe_of_lengths(base):
    """One pipeline for each pair of context lengths."""
    return {
        lengths: assemble(
            StableDiffusionXLLongPromptPipeline,
            base,
            text_encoder=tiny_sdxl.text_encoder(positions=lengths[0]),
            text_encoder_2=tiny_sdxl.text_encoder_2(positions=lengths[1]),
        )
        for lengths in CONTEXT_LENGTHS
    }


# One token each, with everything a cut looks at.
TOKENS = st.lists(st.sampled_from([" cat", " red", " sky", ",", ".", ";", "!", ' ."', "\n\nblue", " 3", " étang"]))


@settings(max_examples=30)
@given(
    lengths=st.sampled_from(CONTEXT_LENGTHS),
    texts=st.tuples(TOKENS, TOKENS),
    repeat=st.integers(1, 30),
    overlap=st.booleans(),
)
def test_layout_is_the_literal_one(pipe_of_lengths, lengths, texts, repeat, overlap):
    pipe = pipe_of_lengths[lengths].set_long_prompt(reading="overlap" if overlap else "separate")
    texts = ["".join(text * repeat)[:900] for text in texts]
    embeds, negatives, pooled, _ = pipe.encode_prompt(texts, negative_prompt="grey")
    tokens = pipe._tokenize(texts, None)
    longest = max(len(text.ids) for batch in tokens for text in batch)
    assert embeds.shape[1] == positions_for(longest, list(lengths)) >= longest + 2
    sources = ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2))
    for row in range(2):
        parts = [
            layout_by_hand(*source, tokens[i][row], embeds.shape[1], -2, overlap) for i, source in enumerate(sources)
        ]
        torch.testing.assert_close(embeds[row], torch.cat(parts, dim=-1), rtol=1e-4, atol=1e-4)
        first = chunks_of(tokens[1][row], min(lengths[1], embeds.shape[1]) - 2)[0]
        alone = pipe.text_encoder_2(torch.tensor([[BOS, *first, EOS]])).text_embeds[0]
        torch.testing.assert_close(pooled[row], alone, rtol=1e-4, atol=1e-4)
    grey = pipe._tokenize("grey", None)
    parts = [layout_by_hand(*source, grey[i][0], embeds.shape[1], -2) for i, source in enumerate(sources)]
    torch.testing.assert_close(negatives[1], torch.cat(parts, dim=-1), rtol=1e-4, atol=1e-4)


def test_short_and_long_prompts_in_clips_own_vocabulary():
    """All other tests have the small one; here words and marks are of as many tokens as in SDXL."""
    parts = tiny_sdxl.sdxl_parts(vocabulary=clip_tokenizer)
    stock, pipe = (assemble(cls, parts) for cls in (StableDiffusionXLPipeline, StableDiffusionXLLongPromptPipeline))
    assert all(map(same, stock.encode_prompt(OTHER, SHORT), pipe.encode_prompt(OTHER, SHORT)))
    text = "An étagère of antiquarian books!! stands beside the (old) sofa; dust, 3.5 cm of it, lies on all. " * 7
    tokens = pipe._tokenize(text, None)
    assert len(parts["tokenizer"]) == 49408 and 180 < len(tokens[0][0].ids) < 225
    for overlap in (True, False):
        embeds = pipe.set_long_prompt(reading="overlap" if overlap else "separate").encode_prompt(text)[0][0]
        assert len(embeds) == 227
        halves = [
            layout_by_hand(tokenizer, encoder, tokens[i][0], 227, -2, overlap)
            for i, (tokenizer, encoder) in enumerate(
                [(pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)]
            )
        ]
        torch.testing.assert_close(embeds, torch.cat(halves, dim=-1), rtol=1e-4, atol=1e-4)


def test_one_forward_an_encoder_and_never_past_its_context_length(long):
    shapes = {"first": [], "second": []}
    hooks = [
        encoder.register_forward_pre_hook(lambda _, args, name=name: shapes[name].append(tuple(args[0].shape)))
        for name, encoder in (("first", long.text_encoder), ("second", long.text_encoder_2))
    ]
    try:
        long.encode_prompt([words(300), "cat"], negative_prompt="grey")
    finally:
        for hook in hooks:
            hook.remove()
    # chunks of both prompts and one empty one; then those of both negatives and one empty one
    assert shapes == {"first": [(2 + 1 + 1, 248), (2 + 1, 248)], "second": [(8 + 1 + 1, 77), (2 + 1, 77)]}


# ---- cuts


def split(pipe, text, slots):
    """The text's chunks, decoded."""
    tokens = texts_of(pipe, text)[0]
    pieces = chunks_of(tokens, slots)
    assert [token for piece in pieces for token in piece] == tokens.ids
    assert all(0 < len(piece) <= slots for piece in pieces)
    return [pipe.tokenizer.decode(piece) for piece in pieces]


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
        ("红。红红红，红红红红红红", None),
    ],
)
def test_a_chunk_ends_at_the_best_place(ours, text, first_chunk):
    first = split(ours, text, 8)[0]
    if first_chunk is not None:
        assert first.replace(" ", "") == first_chunk.replace(" ", "").replace("\n", "")


def test_a_character_of_several_tokens_ends_with_the_last_of_them(ours):
    ids, cuts, _ = texts_of(ours, "red ！ red")[0]
    assert len(ids) > 3
    assert cuts == [Cut.WORD, *[Cut.TOKEN] * (len(ids) - 3), Cut.SENTENCE, Cut.SENTENCE]


def test_a_chunk_without_a_good_place_is_full(ours):
    tokens = texts_of(ours, "supercalifragilisticexpialidocious" * 20)[0]
    assert [len(piece) for piece in chunks_of(tokens, 10)][:-1] == [10] * ((len(tokens.ids) - 1) // 10)


@settings(max_examples=100)
@given(text=st.text(alphabet=st.sampled_from("ab c,.;!? 3\n。é😀<|>"), max_size=300), slots=st.integers(1, 20))
def test_any_text_is_cut_without_loss_or_waste(ours, text, slots):
    tokens = texts_of(ours, text)[0]
    assert tokens.ids == ours.tokenizer(text, add_special_tokens=False).input_ids
    pieces = chunks_of(tokens, slots)
    assert [token for piece in pieces for token in piece] == tokens.ids
    assert all(slots / 2 <= len(piece) <= slots for piece in pieces[:-1])
    assert len(pieces[-1]) <= slots


@settings(max_examples=200)
@given(text=st.text(alphabet=st.sampled_from("ab c,.;!? 3\n。é😀<|>"), max_size=300), slots=st.integers(1, 20))
def test_overlapping_chunks_keep_every_token_once_and_know_what_came_before(ours, text, slots):
    tokens = texts_of(ours, text)[0]
    chunks = split_text(tokens, slots)
    assert [at for chunk in chunks for at in chunk.kept] == list(range(len(tokens.ids)))
    assert all(chunk.read.stop == chunk.kept.stop and len(chunk.read) <= slots for chunk in chunks)
    assert chunks[0].again == 0 and chunks[0].kept == split_text(tokens, slots, overlap=False)[0].kept
    for chunk in chunks[1:]:
        assert 0 < len(chunk.kept) <= max(1, slots // 2) and chunk.again >= slots // 4
        # It begins at the best place of those where it may, and at the first of them.
        places = range(chunk.read.stop - slots, chunk.kept.start - slots // 4 + 1)
        assert chunk.read.start in places or chunk.read.start == 0
        if chunk.read.start:
            assert all(
                tokens.cuts[at - 1] < tokens.cuts[chunk.read.start - 1] for at in places if at < chunk.read.start
            )
            assert all(tokens.cuts[at - 1] <= tokens.cuts[chunk.read.start - 1] for at in places)


def test_nothing_is_read_across_a_break(ours):
    pipe = type(ours)(**ours.components).set_long_prompt(weighting=True)
    tokens = pipe._tokenize(f"{words(100)} BREAK {words(100)}", None)[0][0]
    chunks = split_text(tokens, 75)
    second = next(number for number, chunk in enumerate(chunks) if chunk.kept.start == 100)
    assert chunks[second].read.start == 100 and [chunk.again > 0 for chunk in chunks] == [False, True, False, True]


def test_overlap_changes_nothing_within_one_chunk_and_the_late_states_of_several(ours):
    pipe = type(ours)(**ours.components)
    short, long = [pipe.encode_prompt(text)[0] for text in (SHORT, words(120, "."))]
    plain = [pipe.set_long_prompt(reading="separate").encode_prompt(text)[0] for text in (SHORT, words(120, "."))]
    assert torch.equal(short, plain[0]) and torch.equal(long[:, :76], plain[1][:, :76])
    assert long.shape == plain[1].shape and not torch.allclose(long[:, 80:120], plain[1][:, 80:120], atol=1e-3)
    assert pipe.prompt_layout(words(120, ".")).chunks == (2, 2)
    assert pipe.set_long_prompt().prompt_layout(words(120, ".")).chunks == (3, 3)


@pytest.fixture
def inverted(base):
    """Both encoders know the textual inversions "<x>" of six vectors and "<y>" of one."""
    pipe = assemble_copy(StableDiffusionXLLongPromptPipeline, base)
    tiny_sdxl.add_inversions(pipe, {"<x>": 6, "<y>": 1})
    return pipe


def test_the_vectors_of_a_textual_inversion_stay_together(inverted, base):
    group = [SIZE + i for i in range(6)]
    for before in range(20):
        tokens = texts_of(inverted, f"{words(before)} <x> <y> <x>, {words(9)}")[0]
        assert tokens.ids[before : before + 13] == [*group, SIZE + 6, *group]
        pieces = chunks_of(tokens, 8)
        assert all(len(piece) <= 8 for piece in pieces)
        assert sum(piece[i : i + 6] == group for piece in pieces for i in range(len(piece))) == 2
    # more vectors than slots: cut all the same, and nothing lost
    assert [len(piece) for piece in chunks_of(texts_of(inverted, "<x>")[0], 4)] == [4, 2]

    prompt = f"{words(72)} <x> and {words(20)}"
    embeds = inverted.encode_prompt(prompt)[0]
    assert embeds.shape[1] == 152
    stock = assemble(
        StableDiffusionXLPipeline,
        base,
        **{name: getattr(inverted, name) for name in ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2")},
    )
    assert all(map(same, stock.encode_prompt("a <x> <y>, <x>"), inverted.encode_prompt("a <x> <y>, <x>")))


def test_names_of_inversions_may_end_in_a_number(base):
    pipe = assemble_copy(StableDiffusionXLLongPromptPipeline, base)
    tiny_sdxl.add_inversions(pipe, {"style_2": 2, "style_3": 1, "style": 1})
    tokens = texts_of(pipe, "style_2 style_3 style style_2")[0]
    assert tokens.ids == [SIZE, SIZE + 1, SIZE + 2, SIZE + 3, SIZE, SIZE + 1]
    assert tokens.cuts == [Cut.NEVER, Cut.WORD, Cut.WORD, Cut.WORD, Cut.NEVER, Cut.SENTENCE]


def test_no_warning_of_texts_that_are_read_in_full(inverted, caplog):
    """That ids past the window "will result in indexing errors" holds for stock use, and there is still said."""
    prompt = f"{words(200)} <x> and {words(200)} (red:1.2)"
    logger = logging.getLogger("transformers")
    caplog.set_level(logging.WARNING, "transformers")  # where another test has silenced it
    logger.addHandler(caplog.handler)
    try:
        inverted.encode_prompt(prompt, negative_prompt=prompt)
        inverted.set_long_prompt(weighting=True).encode_prompt(prompt)
        inverted.prompt_layout(prompt)
        assert caplog.records == []
        inverted.tokenizer(prompt)
        assert "indexing errors" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


# ---- options, state, errors


def test_the_negative_prompt_follows_clip_skip_by_an_option(stock, base):
    pipe = assemble(StableDiffusionXLLongPromptPipeline, base)
    call = {"prompt": SHORT, "negative_prompt": OTHER, "clip_skip": 1}
    default = stock.encode_prompt(**call)
    followed = stock.encode_prompt(OTHER, clip_skip=1)[0]
    assert not torch.equal(default[1], followed)
    assert torch.equal(pipe.encode_prompt(**call)[1], default[1])
    assert pipe.set_long_prompt(negative_clip_skip=True) is pipe
    got = pipe.encode_prompt(**call)
    assert torch.equal(got[0], default[0]) and torch.equal(got[1], followed)
    assert torch.equal(pipe.set_long_prompt().encode_prompt(**call)[1], default[1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'negative_clipskip'"):
        pipe.set_long_prompt(negative_clipskip=True)


@pytest.mark.parametrize("scale", [0.7, 0.0])
def test_lora_scale_holds_for_one_call_and_survives_an_error(base, scale):
    pipe = assemble_copy(StableDiffusionXLLongPromptPipeline, base)
    layers = [add_lora(pipe.text_encoder, 0.3), add_lora(pipe.text_encoder_2, 0.1)]
    before = [layer.scaling["default"] for layer in layers]
    full = pipe.encode_prompt(SHORT)
    scaled = pipe.encode_prompt(SHORT, lora_scale=scale)
    assert not torch.equal(scaled[0][..., :32], full[0][..., :32])
    assert not torch.equal(scaled[0][..., 32:], full[0][..., 32:])
    assert [layer.scaling["default"] for layer in layers] == before == pytest.approx([0.3, 0.1])
    seen = []

    def fail(*_):
        seen.extend(layer.scaling["default"] for layer in layers)
        raise RuntimeError("out of memory")

    hook = pipe.text_encoder_2.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        pipe.encode_prompt(SHORT, lora_scale=scale)
    hook.remove()
    assert seen == [scale * part for part in before]
    assert [layer.scaling["default"] for layer in layers] == before
    assert torch.equal(pipe.encode_prompt(SHORT)[0], full[0])


def test_lora_layers_as_in_diffusers(base):
    pipes = [assemble_copy(cls, base) for cls in (StableDiffusionXLPipeline, StableDiffusionXLLongPromptPipeline)]
    for pipe in pipes:
        add_lora(pipe.text_encoder), add_lora(pipe.text_encoder_2)
    expected, got = [pipe.encode_prompt(SHORT, lora_scale=0.7) for pipe in pipes]
    assert all(map(same, expected, got)) and not torch.equal(pipes[1].encode_prompt(SHORT)[0], got[0])


def test_a_saved_pipeline_loads_as_diffusers_own_and_as_ours(long, tmp_path):
    long.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "StableDiffusionXLPipeline"
    automatic, again = load(DiffusionPipeline, tmp_path), load(StableDiffusionXLLongPromptPipeline, tmp_path)
    assert type(automatic) is StableDiffusionXLPipeline
    assert automatic.text_encoder.config.max_position_embeddings == 248
    assert np.array_equal(draw(again, words(120)), draw(long, words(120)))


def test_errors(ours, stock, base):
    with pytest.raises(ValueError, match="one batch size, got 2 and 3"):
        ours.encode_prompt(["a", "b"], negative_prompt=["a", "b", "c"])
    with pytest.raises(ValueError, match="one batch size, got 2 and 1"):
        ours.encode_prompt(["a", "b"], prompt_2=["a"])
    for skip in (-1, 3, 50):
        with pytest.raises(ValueError, match=f"`clip_skip` is {skip}, but must be from 0 to 2"):
            ours.encode_prompt("cat", clip_skip=skip)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        ours.encode_prompt("a cat \ud83d")
    with pytest.raises(ValueError, match="the batch of prompts is empty"):
        ours.encode_prompt([])
    embeds, _, pooled, _ = ours.encode_prompt("cat")
    with pytest.raises(ValueError, match="text of 80 tokens, BOS and EOS do not fit the 77 positions"):
        ours.encode_prompt(None, prompt_embeds=embeds, pooled_prompt_embeds=pooled, negative_prompt=words(80))
    without = assemble(StableDiffusionXLLongPromptPipeline, base, text_encoder=None, text_encoder_2=None)
    with pytest.raises(ValueError, match="`text_encoder_2` is None, so no prompt can be encoded"):
        without.encode_prompt("cat")
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    assert torch.equal(without.encode_prompt(None, **given)[0], embeds)
    assert np.array_equal(draw(without, **given), draw(ours, "cat"))


def test_long_embeddings_passed_in_fix_the_length(ours):
    embeds, _, pooled, _ = ours.encode_prompt(words(100))
    given = {"prompt": None, "prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    assert torch.equal(
        ours.encode_prompt(**given, negative_prompt="grey")[1],
        ours.encode_prompt(words(100), negative_prompt="grey")[1],
    )
