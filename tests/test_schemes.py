"""Schemes of reading: weights and BREAK, their syntax and what they do to embeddings; chunks as kohya trains."""

import re
import signal
import warnings
from contextlib import suppress

import pytest
import torch
from helpers import tiny_sdxl
from helpers.vocabulary import BOS, EOS
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion import parse_prompt
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline as Ours
from debias_diffusion.text.chunks import split_text
from debias_diffusion.text.reading import tokenize_text
from debias_diffusion.text.schedules import text_at
from debias_diffusion.text.weighting import has_weights, unread_syntax

pytestmark = pytest.mark.usefixtures("no_grad")


def parse_weights(prompt):
    return [part.runs for part in parse_prompt(prompt, "overlap", "comfyui")]


TEXTS = st.text(alphabet=st.sampled_from("ab 12.,:;()[]+-\\\n<>é猫"), max_size=40)


@given(TEXTS | st.text(max_size=40))
def test_any_text_has_a_meaning_and_loses_no_word(text):
    try:
        parts = parse_weights(text)
    except ValueError as error:
        assert "must be from -100 to 100" in str(error)
        return
    runs = [run for part in parts for run in part]
    assert all(run and abs(weight) <= 100 for run, weight in runs)
    read = "".join(run for run, _ in runs)
    for kept in ("a", "b", "é", "猫", "<", ";"):
        assert read.count(kept) == text.count(kept)


def test_weights_beyond_numbers_and_too_many_brackets_are_refused():
    for prompt in ("(" * 50 + "x", "x" + "+" * 20_000, f"(x:{'9' * 400})"):
        with pytest.raises(ValueError, match="the weight of 'x' is .* from -100 to 100"):
            parse_weights(prompt)
    for reading in ("overlap", "a1111", "kohya", "comfyui"):
        opened = [] if reading == "comfyui" else ["(x:1) " + "(x" * 20_000]  # there an open bracket is text
        for prompt in ("(" * 1200 + "x" + ")" * 1200, *opened):
            with pytest.raises(ValueError, match="more than 100 brackets"):
                parse_prompt(prompt, reading, "comfyui")


@pytest.mark.parametrize("pieces", ["x{}y", ":1{}x", "BREAK:{}x", "<x:{}", "__x{}", "[x|{}y"])
def test_long_texts_take_time_in_proportion(pieces):
    """What is quadratic takes hours for these; a signal ends that."""

    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    try:
        for sign in "+- 1([|:":
            prompt = pieces.format(sign * 60_000)
            for reading in ("overlap", "a1111", "comfyui"):
                with suppress(ValueError):
                    parse_prompt(prompt, reading, "comfyui")
            unread_syntax(prompt), has_weights(prompt), text_at(prompt, 1, 4)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- other programs' syntax

UNREAD = {
    "a [cat:dog:0.5]": "[cat:dog:0.5]",
    "a cat AND a dog": "AND",
    "a {red|blue} cat": "{red|blue}",
    "a __colour__ cat": "__colour__",
    '("a cat", "a dog").blend(0.5, 0.5)': ".blend(",
    "a cat <lora:style:0.8>": "<lora:style:0.8>",
    "a cat\nSteps: 20, Sampler: Euler": "Steps: 20,",
}
READ = ["A CAT AND A DOG", r"a \[cat|dog\]", "[a cat] {a dog}", "rock and roll, 10:30", "snake__case", "4 < 5"]


def test_other_programs_syntax_is_named_once_for_a_prompt(weighting):
    for prompt, named in UNREAD.items():
        with pytest.warns(UserWarning, match=re.escape(f"{named!r} is read as text: ")) as warned:
            weighting.prompt_layout(prompt, prompt, negative_prompt=prompt)
        assert len({str(warning.message) for warning in warned}) == 1


def test_weights_that_are_text_are_named_and_others_are_not(pipe, weighting):
    for prompt in ("a (red:1.3) cat", r"rem \(re\)", "a cat++, here", "a cat BREAK a dog", "((red)) cat"):
        with pytest.warns(UserWarning, match="are read as text. .*emphasis"):
            pipe.prompt_layout(prompt)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            weighting.prompt_layout(prompt)
            Ours(**pipe.components).set_long_prompt(emphasis="none").prompt_layout(prompt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for prompt in READ:
            weighting.prompt_layout(prompt)
        pipe.prompt_layout("a red cat (small), state-of-the-art")


# ---- strengths of BREAK


@pytest.mark.parametrize("breaks", ["concatenate", "average"])
def test_strengths_beyond_numbers_are_refused(base, breaks):
    pipe = tiny_sdxl.assemble(Ours, base).set_long_prompt(emphasis="comfyui", breaks=breaks)
    # the last of "average": shares of 1000 and -999
    prompts = ["(red:60) BREAK:2 (red:60)"] if breaks == "concatenate" else ["a BREAK:-0.999 b"]
    for prompt in ("(red:100) cat BREAK:100000", "(a:0) BREAK:70000 b", "a BREAK:1e9 b", "a BREAK:-101 b", *prompts):
        with pytest.raises(ValueError, match="must be from -100 to 100"):
            pipe.encode_prompt(prompt)


def test_strengths_of_the_parts_that_are_kept_add_up(base):
    pipe = tiny_sdxl.assemble(Ours, base).set_long_prompt(emphasis="comfyui", breaks="average")
    with pytest.raises(ValueError, match="add up to 0"):
        pipe.encode_prompt("a red cat BREAK:-1 a blue sofa BREAK:0.5 ")
    embeds = pipe.encode_prompt("a red cat BREAK:-0.5 a sofa BREAK:-0.5 BREAK:3 ")[0]
    assert torch.equal(embeds, pipe.encode_prompt("a red cat BREAK:-0.5 a sofa")[0])
    assert [part.strength for part in parse_prompt("a BREAK:1girl", "overlap", "comfyui")] == [1, 1]


# ---- in the pipeline


@pytest.fixture(scope="module")
def base():
    return tiny_sdxl.sdxl_parts()


@pytest.fixture(scope="module")
def pipe(base):
    long = tiny_sdxl.text_encoder(positions=248)
    return tiny_sdxl.assemble(Ours, base, text_encoder=long)


@pytest.fixture(scope="module")
def weighting(pipe):
    return Ours(**pipe.components).set_long_prompt(emphasis="comfyui")


def test_off_by_default_and_without_syntax_nothing_changes(pipe, weighting):
    text = "a (red:1.3) cat++ BREAK a dog"
    plain = pipe.encode_prompt("a red cat")
    assert pipe.prompt_layout(text).tokens == len(pipe.tokenizer(text, add_special_tokens=False).input_ids)
    for prompt in ("a red cat", "(a red cat:1)"):
        assert all(map(torch.equal, weighting.encode_prompt(prompt), plain))
    assert weighting.prompt_layout(text).tokens == 5
    ignoring = Ours(**pipe.components).set_long_prompt(emphasis="ignore")
    assert torch.equal(ignoring.encode_prompt("a (red:1.3) cat")[0], plain[0])


@pytest.mark.parametrize(("weight", "length"), [(1.3, 5), (-0.5, 120)])
def test_states_move_away_from_the_empty_prompt(pipe, weighting, weight, length):
    """By hand for a prompt within one chunk; in several each state moves by the empty one of its place."""
    before, after = "red " * (length - 3), " sky tree"
    plain, _, pooled, _ = pipe.encode_prompt(f"{before}cat{after}")
    weighted, _, pooled_weighted, _ = weighting.encode_prompt(f"{before}(cat:{weight}){after}")
    at = 1 + length - 3
    # Not bit for bit: the empty chunk is one row more in the encoder's batch.
    changed = ((plain - weighted).abs() > 1e-5).any(-1)[0].nonzero().flatten().tolist()
    assert changed == [at]
    torch.testing.assert_close(pooled_weighted, pooled, rtol=1e-5, atol=1e-6)
    empty_states = []
    for encoder, tokenizer in ((pipe.text_encoder, pipe.tokenizer), (pipe.text_encoder_2, pipe.tokenizer_2)):
        slots = min(encoder.config.max_position_embeddings, plain.shape[1]) - 2
        pads = [tokenizer.pad_token_id] * slots
        empty = encoder(torch.tensor([[BOS, EOS, *pads]]), output_hidden_states=True).hidden_states[-2][0]
        chunks = split_text(tokenize_text(f"{before}cat{after}", tokenizer)[0], slots)
        begin = next(chunk.read.start for chunk in chunks if at - 1 in chunk.kept)
        empty_states.append(empty[at - begin])
    empty = torch.cat(empty_states)
    torch.testing.assert_close(weighted[0, at], empty + weight * (plain[0, at] - empty), rtol=1e-4, atol=1e-5)


def test_weights_of_a_word_of_several_tokens_and_of_an_inversion(base):
    pipe = tiny_sdxl.assemble_copy(Ours, base)
    tiny_sdxl.add_inversions(pipe, {"<x>": 3})
    tokens = pipe.set_long_prompt(emphasis="comfyui")._reader.tokenize("a (<x>:1.5) supercalifragilistic++", None)[0][0]
    assert tokens.weights[:4] == [1, 1.5, 1.5, 1.5] and len(tokens.weights) == len(tokens.ids) > 6
    assert tokens.weights[4:] == [pytest.approx(1.21)] * (len(tokens.ids) - 4)
