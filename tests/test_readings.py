"""Readings of other programs: what they take out, repeat and average.

Their ids, cuts and weights are in conformance/. data/readings.json holds for test_conformance.py what the programs' own
code did: for each program and prompt, and for both of SDXL's encoders, the number of tokens of text in each row of 77,
the CRC32 of the ids whose states the UNet is given (as little-endian numbers of 16 bits), and the weights as
[weight, number of tokens]. `a1111_none` and `kohya_no_norm` have only what is unlike `a1111` and `kohya`.
"""

import pytest
import torch
from helpers import tiny_sdxl
from helpers.draw import LONG
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.text.chunks import PROGRAMS, Chunk, positions_of
from debias_diffusion.text.tokens import clip_tokenizer

READINGS = ("overlap", "separate", "cut", "a1111", "kohya", "comfyui")
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def pipe():
    return tiny_sdxl.assemble(StableDiffusionXLLongPromptPipeline, tiny_sdxl.sdxl_parts(vocabulary=clip_tokenizer))


def test_a1111_takes_out_comments_and_tags(pipe):
    prompt = "a red cat <lora:style:0.8> # on a sofa\n(by a window)<hypernet:x:1>, # <lora:y:1>\nseen < above"
    pipe.set_long_prompt(reading="a1111")
    embeds, negative = pipe.encode_prompt(prompt, negative_prompt="ugly # <lora:z:1>")[:2]
    expected = pipe.encode_prompt("a red cat (by a window), seen < above", negative_prompt="ugly")
    assert torch.equal(embeds, expected[0]) and torch.equal(negative, expected[1])
    taken_out = ("# on a sofa", "# <lora:y:1>", "<lora:style:0.8>", "<hypernet:x:1>")
    assert pipe.prompt_layout(prompt).taken_out == taken_out
    # A1111 reads tags in a negative prompt, and nobody else takes anything out.
    assert not torch.equal(pipe.encode_prompt("a", negative_prompt="ugly <lora:z:1>")[1], expected[1])
    assert "'<lora:z:1>' loads nothing" in pipe.prompt_layout("a", negative_prompt="ugly <lora:z:1>").warnings[0]
    layout = pipe.set_long_prompt(reading="comfyui").prompt_layout(prompt)
    assert layout.taken_out == () and "'<lora:style:0.8>' loads nothing" in layout.warnings[0]
    pipe.set_long_prompt()


def test_a_repeated_text_leaves_attention_as_it_is(pipe):
    states, query = torch.randn(1, 154, 8), torch.randn(1, 5, 8)
    chunks = [Chunk(range(75), range(75)), Chunk(range(75, 80), range(75, 80))]
    repeated = states[:, positions_of(chunks, 77, 6 * 77, "a1111")]
    attended = (scaled_dot_product_attention(query, keys, keys) for keys in (states, repeated))
    assert_close(*attended, atol=1e-6, rtol=0)
    pipe.set_long_prompt(reading="a1111")
    assert pipe.prompt_layout("cat " * 80, negative_prompt="cat " * 160).positions == 6 * 77


@pytest.mark.parametrize(("reading", "count"), [("overlap", 1), ("cut", 40)])
def test_parts_are_averaged_with_their_strengths(pipe, reading, count):
    pipe.set_long_prompt(emphasis="comfyui", breaks="average", reading=reading)
    red = "a (red:1.3) cat, " * count
    cat, bird = pipe.encode_prompt(red), pipe.encode_prompt("a blue bird")
    both = pipe.encode_prompt(f"{red}BREAK:3 a blue bird")
    for at in (0, 2):  # embeds and pooled
        assert_close(both[at], (cat[at] + 3 * bird[at]) / 4)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=str)
def test_half_precision_is_near_single_in_every_reading(pipe, dtype, error):
    half = tiny_sdxl.assemble_copy(type(pipe), pipe.components).to(dtype=dtype)
    for reading in READINGS:
        how = {"reading": reading, "emphasis": PROGRAMS.get(reading, "comfyui")}
        embeds = [
            each.set_long_prompt(**how).encode_prompt(f"A (small:1.3) cat. {LONG} BREAK A [dog].")
            for each in (half, pipe)
        ]
        for got, exact in zip(*embeds, strict=True):
            assert got.dtype == dtype and (got.float() - exact).norm() <= error * exact.norm(), reading


@pytest.mark.parametrize("split", [False, True])
def test_with_split_special_tokens_both_encoders_read_the_same_chunks(split, pipe):
    pipe.set_long_prompt(reading="separate", split_special_tokens=split)
    first, second = pipe.prompt_layout('"Stop!" ' + "red cat " * 60).texts
    assert (first == second) == split
