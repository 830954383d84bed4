"""Schemes of reading: weights and BREAK, their syntax and what they do to embeddings; chunks as kohya trains."""

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
from debias_diffusion.text.prompt import _WARNED
from debias_diffusion.text.prompt_tokens import tokenize_text
from debias_diffusion.text.schedules import find_schedules, text_at
from debias_diffusion.text.weighting import find_unread, take_out

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


@pytest.mark.parametrize("pieces", ["x{}y", ":1{}x", "BREAK:{}x", "<x:{}", "{{{}", "[x|{}y", "[a:{}", "x :{} y"])
def test_long_texts_take_time_in_proportion(pieces):
    """What is quadratic takes hours for these; a signal ends that."""

    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    try:
        for sign in "+- 1([|:":
            prompt = pieces.format(sign * 30_000)
            for reading in ("overlap", "a1111", "comfyui"):
                with suppress(ValueError):
                    parse_prompt(prompt, reading, "comfyui")
            (
                find_unread(prompt, [], weights=True),
                text_at(prompt, 1, 4),
                find_schedules(prompt),
                take_out(prompt, "a1111"),
            )
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- other programs' syntax

UNREAD = {
    "a [cat:dog:0.5]": "[cat:dog:0.5]",
    "a [cat|dog] on a sofa": "[cat|dog]",
    "a cat AND a dog": "AND",
    "a {red|blue} cat": "{red|blue}",
    '("a cat", "a dog").blend(0.5, 0.5)': ".blend(",
    "a cat <lora:style:0.8>": "<lora:style:0.8>",
    "a cat <lyco:style:0.8>": "<lyco:style:0.8>",
    "a cat <hypernet:style:0.8>": "<hypernet:style:0.8>",
    "a cat\nSteps: 20, Sampler: Euler": "Steps: 20,",
    '--prompt "a cat" --seed 7': "--prompt",
    "a cat at night --ar 16:9": "--ar",
}
READ = ["A CAT AND A DOG", r"a \[cat|dog\]", "[a cat] {a dog}", "rock and roll, 10:30", "snake_case __init__", "4 < 5"]
READ += ["ratio [4:3]", "a cat -- a dog", "<3 <b>"]
# What may be a weight elsewhere, and is prose here.
PROSE = [
    "a C++ book",
    "Notepad--",
    "(fig. 2:1)",
    "price: $5.00 (approx: 3)",
    "BREAK a leg",
    "(scale:1.0)",
    "A+ and B++",
]
WEIGHTED = [
    "a (red:1.3) cat",
    r"rem \(re\)",
    "a cat++, here",
    "a cat BREAK a dog",
    "((red)) cat",
    "(a cat)++",
    "(a:.5)",
]


def test_other_programs_syntax_is_named_truly_and_once_a_process(weighting):
    for prompt, named in UNREAD.items():
        layout = weighting.prompt_layout(prompt, prompt, negative_prompt=prompt)
        assert len(layout.warnings) == 1 and f"{named!r} " in layout.warnings[0], prompt
        assert "read as text" not in layout.warnings[0]  # with weights on, [cat|dog] is not
        for count in (1, 0):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                weighting.encode_prompt(prompt, negative_prompt=prompt)
            assert [str(warning.message) for warning in warned] == list(layout.warnings)[:count]
        _WARNED.clear()


def test_weights_that_are_text_are_named_and_prose_is_not(pipe, weighting):
    for prompt in WEIGHTED:
        assert "are read as text: the option emphasis=" in pipe.prompt_layout(prompt).warnings[0], prompt
        none = Ours(**pipe.components).set_long_prompt(emphasis="none")
        assert weighting.prompt_layout(prompt).warnings == none.prompt_layout(prompt).warnings == ()
    for prompt in READ:
        assert weighting.prompt_layout(prompt).warnings == (), prompt
    for prompt in (*PROSE, *READ[:1], *READ[2:], "a red cat (small), state-of-the-art"):
        assert pipe.prompt_layout(prompt).warnings == (), prompt
    a1111 = Ours(**pipe.components).set_long_prompt(reading="a1111")
    for prompt in (*WEIGHTED, *PROSE, "ratio [4:3]", "a [cat:dog:0.5]", "a [cat|dog]"):
        assert a1111.prompt_layout(prompt).warnings == (), prompt


def test_and_warns_where_a1111_would_join(pipe):
    a1111 = Ours(**pipe.components).set_long_prompt(reading="a1111")
    assert "'AND' does not join" in a1111.prompt_layout("ROCK AND ROLL").warnings[0]
    assert a1111.prompt_layout("a cat", negative_prompt="a dog AND a house").warnings == ()


# ---- strengths of BREAK


@pytest.mark.parametrize("breaks", ["concatenate", "average"])
def test_strengths_beyond_numbers_are_refused(parts, breaks):
    pipe = tiny_sdxl.assemble(Ours, parts).set_long_prompt(emphasis="comfyui", breaks=breaks)
    # the last of "average": shares of 1000 and -999
    prompts = ["(red:60) BREAK:2 (red:60)"] if breaks == "concatenate" else ["a BREAK:-0.999 b"]
    for prompt in ("(red:100) cat BREAK:100000", "(a:0) BREAK:70000 b", "a BREAK:1e9 b", "a BREAK:-101 b", *prompts):
        with pytest.raises(ValueError, match="must be from -100 to 100"):
            pipe.encode_prompt(prompt)


def test_strengths_of_the_parts_that_are_kept_add_up(parts):
    pipe = tiny_sdxl.assemble(Ours, parts).set_long_prompt(emphasis="comfyui", breaks="average")
    with pytest.raises(ValueError, match="add up to 0"):
        pipe.encode_prompt("a red cat BREAK:-1 a blue sofa BREAK:0.5 ")
    embeds = pipe.encode_prompt("a red cat BREAK:-0.5 a sofa BREAK:-0.5 BREAK:3 ")[0]
    assert torch.equal(embeds, pipe.encode_prompt("a red cat BREAK:-0.5 a sofa")[0])
    assert [part.strength for part in parse_prompt("a BREAK:1girl", "overlap", "comfyui")] == [1, 1]


# ---- in the pipeline


@pytest.fixture(scope="module")
def pipe(parts):
    long = tiny_sdxl.text_encoder(positions=248)
    return tiny_sdxl.assemble(Ours, parts, text_encoder=long)


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
        chunks = split_text(tokenize_text(f"{before}cat{after}", tokenizer), slots)
        begin = next(chunk.read.start for chunk in chunks if at - 1 in chunk.kept)
        empty_states.append(empty[at - begin])
    empty = torch.cat(empty_states)
    torch.testing.assert_close(weighted[0, at], empty + weight * (plain[0, at] - empty), rtol=1e-4, atol=1e-5)


def test_weights_of_a_word_of_several_tokens_and_of_an_inversion(parts):
    pipe = tiny_sdxl.assemble_copy(Ours, parts)
    tiny_sdxl.add_inversions(pipe, {"<x>": 3})
    plan = pipe.set_long_prompt(emphasis="comfyui")._read(("a (<x>:1.5) supercalifragilistic++",), None, False)
    tokens = plan.prompts.encoders[0].parts[0].tokens
    assert tokens.weights[:4] == [1, 1.5, 1.5, 1.5] and len(tokens.weights) == len(tokens.ids) > 6
    assert tokens.weights[4:] == [pytest.approx(1.21)] * (len(tokens.ids) - 4)
