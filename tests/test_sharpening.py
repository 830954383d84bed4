"""`sharpen`: cross-attention of long prompts, against attention written out."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import diffusers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import CycleDiffusionPipeline, StableDiffusionPanoramaPipeline, StableDiffusionXLPipeline
from diffusers.models.attention_processor import Attention, AttnProcessor, SlicedAttnProcessor
from helpers import tiny_sdxl
from helpers.draw import LONG, OTHER, SHORT, draw, embed
from helpers.matrix import Pipelines
from helpers.tiny_sdxl import assemble, assemble_copy
from peft import LoraConfig

from debias_diffusion.pipelines import (
    LongPromptOptions,
    StableDiffusionXLLongPromptPipeline,
    sharpened,
    with_long_prompts,
)
from debias_diffusion.pipelines.rendering.images import encode_batch, render_batch
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt
from debias_diffusion.pipelines.sharpening import sharpening_mask

pytestmark = pytest.mark.usefixtures("no_grad")
POWER = 2.0
GREY = "The grey house is old, the window is blue. " * 11  # as long as LONG, with fewer words
SIZE = {"height": 32, "width": 32}


@pytest.fixture
def pipe(parts):
    """Of models that a test may change."""
    return assemble_copy(StableDiffusionXLLongPromptPipeline, parts)


def cross_attentions(unet):
    return [module for name, module in unet.named_modules() if name.endswith("attn2") and module.is_cross_attention]


def traces(pipe):
    """What is set on the UNet's modules."""
    return [(sorted(vars(module)), vars(module).get("forward")) for module in pipe.unet.modules()]


# ---- written out


def raised(weights, words):
    """The words' probabilities to a power, divided so that their sum stays."""
    weights = weights.clone()
    chosen = weights[..., words]
    powers = chosen**POWER
    weights[..., words] = powers * chosen.sum(-1, keepdim=True) / powers.sum(-1, keepdim=True)
    return weights


@contextmanager
def written_out(unet, words_of):
    """diffusers' processors, with attention to texts of more than 77 positions written out."""
    plain, texts = F.scaled_dot_product_attention, []

    def attention(q, k, v, attn_mask=None, **how):
        if not texts or k.shape[2] != texts[-1].shape[1]:  # an image's places, or an IP-Adapter's image
            return plain(q, k, v, attn_mask, **how)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return torch.stack([raised(row, words) for row, words in zip(weights, words_of(texts[-1]), strict=True)]) @ v

    def note(module, args, kwargs):
        text = kwargs["encoder_hidden_states"]
        text = text[0] if isinstance(text, tuple) else text
        texts[:] = [text] if text.shape[1] > 77 else []

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in cross_attentions(unet)]
    hooks += [module.register_forward_hook(lambda *_: texts.clear()) for module in cross_attentions(unet)]
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain
        for hook in hooks:
            hook.remove()


def counted_words(pipe, texts):
    """From rows that a UNet reads, their words: by the tokens of the text whose embeddings are nearest."""

    def words_of(rows):
        length, words = rows.shape[1], []
        embeds = embed(copy.copy(pipe).set_long_prompt(positions=length), texts)["prompt_embeds"]
        tokenizers = [part for name, part in pipe.components.items() if name.startswith("tokenizer")]
        counts = [max(len(each(text, add_special_tokens=False).input_ids) for each in tokenizers) for text in texts]
        for row in rows:
            distances = (embeds - row).abs().amax((1, 2))
            assert distances.min() < 1e-4 or not row.any()
            count = counts[distances.argmin()]
            words.append((torch.arange(length) > 0) & (torch.arange(length) <= count))
        return words

    return words_of


def differ(pipe, texts, run, unlike_plain=1e-5):
    """How far `run(pipe)` with `sharpen` is from what is written out, which is unlike what it is without."""
    plain = run(pipe.set_long_prompt())
    with written_out(pipe.unet, counted_words(pipe, texts)):
        expected = run(pipe)
    ours = run(pipe.set_long_prompt(sharpen=POWER))
    assert np.array_equal(run(pipe.set_long_prompt()), plain)
    assert np.abs(expected - plain).max() > unlike_plain
    return np.abs(ours - expected).max()


@pytest.mark.parametrize("sink", [0.0, 8.0])
@pytest.mark.parametrize("powers", [POWER, None])
def test_the_mask_raises_words_and_leaves_others(sink, powers):
    """To the last bits of float64, however much BOS gets."""
    torch.manual_seed(0)
    attn = Attention(8, 6, heads=2, dim_head=4).double()
    attn.to_k.weight.mul_(6)
    hidden, text = torch.randn(2, 5, 8).double(), torch.randn(2, 80, 6).double()
    words = torch.zeros(2, 80, dtype=torch.bool)
    words[:, 1:] = True
    if powers is None:
        words[1, 30:] = False
        powers = torch.where(words, POWER, 1.0)
    q, k = (
        layer(states).unflatten(-1, (2, 4)).transpose(1, 2)
        for layer, states in ((attn.to_q, hidden), (attn.to_k, text))
    )
    other = torch.zeros(2, 1, 80).double()
    other[..., 0] = sink
    logits = q @ k.mT / 2 + other[:, None]
    mask = sharpening_mask(attn, hidden, text, powers, other if sink else None).view(2, 2, 5, 80)
    ours = (q @ k.mT / 2 + mask).softmax(-1)
    expected = torch.stack([raised(row, chosen) for row, chosen in zip(logits.softmax(-1), words, strict=True)])
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-15)
    kept = logits.softmax(-1)[..., 0]
    torch.testing.assert_close(ours[..., 0], kept, rtol=0, atol=2e-15)
    assert (kept.mean() > 0.6) == bool(sink)


def cut_guidance(pipe, index, timestep, tensors):
    """After the first step there is no negative row."""
    pipe._guidance_scale = 1.0
    return {name: tensors[name].chunk(2)[-1] for name in tensors}


CUT = {
    "callback_on_step_end": cut_guidance,
    "callback_on_step_end_tensor_inputs": ["prompt_embeds", "add_text_embeds", "add_time_ids"],
}
CALLS = {
    "three prompts": {"prompt": [LONG, SHORT, GREY]},
    "two images, a long negative prompt": {"prompt": SHORT, "num_images_per_prompt": 2, "negative_prompt": GREY},
    "no guidance": {"prompt": LONG, "guidance_scale": 1.0},
    "guidance for one step": {"prompt": LONG, "negative_prompt": GREY, **CUT},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_attention_is_as_written_out(pipe, call):
    assert differ(pipe, [LONG, SHORT, GREY, ""], lambda pipe: draw(pipe, **call)) < 1e-5


CLASSES = {
    "StableDiffusionXLControlNetPipeline": {},
    "StableDiffusionXLPAGPipeline": {"pag_scale": 2.0},  # each prompt three times
    "StableDiffusionXLInstructPix2PixPipeline": {},  # a prompt, and twice the negative one
    "StableDiffusionPipeline": {},
    "AnimateDiffPipeline": {"prompt": [LONG, GREY]},  # which repeats each for the frames
}


@pytest.mark.parametrize("name", CLASSES)
def test_pipelines_that_arrange_rows_in_their_own_way(name):
    both = Pipelines(name)
    call = {"prompt": LONG} | CLASSES[name]
    prompts = [call["prompt"]] if isinstance(call["prompt"], str) else call["prompt"]
    call["negative_prompt"] = [OTHER] * len(prompts)
    assert differ(both.ours, [LONG, GREY, OTHER, ""], lambda pipe: both.draw(pipe, **call)) < 1e-4


@pytest.mark.parametrize("cls", [StableDiffusionPanoramaPipeline, CycleDiffusionPipeline])
def test_pipelines_with_several_views_or_prompts(cls):
    """A batch of views of one prompt; and the prompt of the image that is changed."""
    parts, call = tiny_sdxl.sd15_parts(), {"height": 64, "width": 128, "view_batch_size": 2}
    if cls is CycleDiffusionPipeline:
        parts["scheduler"] = diffusers.DDIMScheduler.from_config(parts["scheduler"].config)
        call = {"image": tiny_sdxl.picture(), "source_prompt": GREY, "strength": 0.9, "eta": 0.1}
    pipe = with_long_prompts(assemble(cls, parts | {"requires_safety_checker": False}))

    def run(pipe):
        torch.manual_seed(0)
        return draw(pipe, LONG, **call)

    assert differ(pipe, [LONG, GREY, ""], run) < 1e-4


def with_lora(pipe):
    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(target_modules=["attn2.to_q", "attn2.to_k", "to_out.0"], init_lora_weights=False))


def with_ip_adapter(pipe):
    adapter = tiny_sdxl.ip_adapter(pipe.unet)
    pipe.load_ip_adapter(adapter, subfolder=None, weight_name=None, image_encoder_folder=None)
    return {"ip_adapter_image_embeds": [torch.randn((2, 1, 24), generator=torch.Generator().manual_seed(0))]}


def with_hooks(pipe):
    """As offloading has them: they replace `forward` of each layer."""
    for layer in cross_attentions(pipe.unet):
        add_hook_to_module(layer, ModelHook())


def fused(pipe):
    pipe.fuse_qkv_projections(vae=False)


@pytest.mark.parametrize("prepare", [with_lora, with_ip_adapter, with_hooks, fused])
def test_sharpening_with_other_things_in_the_unet(pipe, prepare):
    call = prepare(pipe) or {}
    before = traces(pipe)
    assert differ(pipe, [LONG, ""], lambda pipe: draw(pipe, LONG, **call)) < 1e-5
    assert traces(pipe) == before


@pytest.mark.parametrize("processor", [AttnProcessor(), SlicedAttnProcessor(1)])
def test_other_processors(pipe, processor):
    expected = draw(pipe.set_long_prompt(sharpen=POWER), LONG)
    pipe.unet.set_attn_processor(processor)
    assert np.abs(draw(pipe, LONG) - expected).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_precisions(pipe, dtype):
    """No worse than attention that is not sharpened."""
    options = {power: pipe.set_long_prompt(sharpen=power) and draw(pipe, LONG) for power in (1.0, POWER)}
    pipe.to(dtype)
    errors = [np.abs(draw(pipe.set_long_prompt(sharpen=power), LONG) - options[power]).max() for power in (1.0, POWER)]
    assert errors[1] < 1.5 * errors[0] + 1e-5


def test_words_of_each_reading(pipe):
    """By the tokens of each chunk: neither BOS nor EOS nor pads are words, inside chunks either."""
    count = len(pipe.tokenizer(LONG, add_special_tokens=False).input_ids)
    at = lambda *spans: [any(start <= place < stop for start, stop in spans) for place in range(spans[-1][-1])]  # noqa: E731
    starts = {"overlap": (1, 1 + count), "separate": (1, 1 + count), "kohya": (1, 1 + count), "cut": (1, 76)}
    for reading in ("overlap", "separate", "kohya", "a1111", "comfyui"):
        layout = pipe.set_long_prompt(reading=reading).prompt_layout([LONG, SHORT], negative_prompt=GREY)
        long, short, *_ = layout.words
        spans = (
            [starts[reading]]
            if reading in starts
            else [(77 * chunk + 1, 77 * chunk + 1 + tokens) for chunk, (_, tokens) in enumerate(layout.texts[0])]
        )
        assert [*long] == at(*spans, (len(long), len(long))) and sum(long) == count
        repeats = 1 + (reading in ("a1111", "comfyui"))  # of a chunk, where that leaves attention as it is
        assert sum(short) == repeats * len(pipe.tokenizer(SHORT, add_special_tokens=False).input_ids)
        assert len({len(row) for row in layout.words}) == 1


# ---- where nothing changes


@pytest.mark.parametrize(("options", "prompt"), [({"sharpen": POWER}, SHORT), ({"sharpen": 1.0}, LONG)])
def test_short_prompts_and_a_power_of_one_stay_as_they_are(pipe, options, prompt):
    plain = draw(pipe, prompt)
    assert np.array_equal(draw(pipe.set_long_prompt(**options), prompt), plain)


def test_nothing_stays_behind(pipe):
    before, plain = traces(pipe), draw(pipe, LONG)

    def fail(*_):
        assert traces(pipe) != before
        raise KeyboardInterrupt

    pipe.set_long_prompt(sharpen=POWER)
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, LONG, callback_on_step_end=fail)
    assert traces(pipe) == before
    assert np.array_equal(draw(pipe.set_long_prompt(), LONG), plain)


# ---- pipelines that share a UNet


def sharing(pipe, cls=StableDiffusionXLLongPromptPipeline):
    return assemble(cls, pipe.components, scheduler=copy.deepcopy(pipe.scheduler))


def in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("run", [lambda work: work(), in_thread])
def test_a_plain_pipeline_in_a_step_of_a_sharpened_one(pipe, run):
    embeds, images = embed(pipe, LONG), []
    plain = draw(sharing(pipe, StableDiffusionXLPipeline), **embeds)
    alone = draw(pipe.set_long_prompt(sharpen=POWER), LONG)

    def preview(pipe, *_):
        images.append(run(lambda: draw(sharing(pipe, StableDiffusionXLPipeline), **embeds)))
        return {}

    assert np.array_equal(draw(pipe, LONG, callback_on_step_end=preview), alone)
    assert len(images) == 2 and all(np.array_equal(image, plain) for image in images)


def test_contexts(pipe):
    """Of several UNets, but not twice of one; a pipeline's own power holds instead of the context's."""
    other = assemble(StableDiffusionXLLongPromptPipeline, {**pipe.components, "unet": tiny_sdxl.unet(seed=1)})
    plain, short = draw(pipe, LONG), draw(pipe, SHORT)
    other_sharp = draw(other.set_long_prompt(sharpen=POWER), LONG)
    with written_out(pipe.unet, lambda rows: [torch.arange(rows.shape[1]) > 0] * len(rows)):
        expected = draw(pipe, LONG)
    with sharpened(other.unet, 3.0), sharpened(pipe.unet, POWER), sharpened(pipe.unet, 1.0):
        with pytest.raises(ValueError, match="sharpened in this thread already"), sharpened(pipe.unet, POWER):
            pass
        assert np.abs(draw(pipe, LONG) - expected).max() < 1e-5
        assert np.array_equal(draw(other, LONG), other_sharp)
        assert np.array_equal(in_thread(lambda: draw(pipe, LONG)), plain)
        assert np.array_equal(draw(pipe, SHORT), short)
    assert np.array_equal(draw(pipe, LONG), plain)


def test_a_context_with_words(pipe):
    """Of the rows of the UNet's batch; other lengths are refused."""
    layout = pipe.prompt_layout(LONG, negative_prompt=GREY)
    words = torch.tensor(layout.words).flip(0)  # the negative row comes first
    expected = draw(pipe.set_long_prompt(sharpen=POWER), LONG, negative_prompt=GREY)
    with sharpened(pipe.set_long_prompt().unet, POWER, words):
        assert np.array_equal(draw(pipe, LONG, negative_prompt=GREY), expected)
        with pytest.raises(ValueError, match=r"`words` is \[2, 152\], but the UNet reads 2 rows of 302 positions"):
            draw(pipe, LONG + LONG)


# ---- rows that were encoded elsewhere


def test_embeddings_that_are_passed_in(pipe):
    """With the words of `prompt_layout` as if they were encoded there; without, all but BOS are words."""
    embeds, texts = embed(pipe, LONG, negative_prompt=GREY), {"prompt": LONG, "negative_prompt": GREY}
    with written_out(pipe.unet, lambda rows: [torch.arange(rows.shape[1]) > 0] * len(rows)):
        all_but_bos = draw(pipe, **embeds)
    call = {"num_images_per_prompt": 2}
    expected = draw(pipe.set_long_prompt(sharpen=POWER), **texts, **call)
    assert np.array_equal(draw(pipe, **embeds, words=pipe.prompt_layout(**texts).words, **call), expected)
    with pytest.warns(UserWarning, match="embeddings that this call did not encode") as warned:
        assert np.abs(draw(pipe, **embeds) - all_but_bos).max() < 1e-5
    assert sum("this call did not encode" in str(each.message) for each in warned) == 1


@pytest.mark.parametrize(("reading", "bos"), [("overlap", {0}), ("a1111", {0, 77})])
def test_rows_that_a_callback_edits(pipe, reading, bos):
    """All but the BOS of each chunk are words then, and the image is drawn."""

    def edit(pipe, index, timestep, tensors):
        return {"prompt_embeds": tensors["prompt_embeds"] * 1.01}

    call = {"callback_on_step_end": edit, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    plan, steps = pipe.set_long_prompt(reading=reading).prompt_layout(LONG, negative_prompt=GREY), iter(range(99))

    def words_of(rows):
        if next(steps) < len(cross_attentions(pipe.unet)):  # of the first step
            return torch.tensor(plan.words).flip(0)
        return [torch.tensor([place not in bos for place in range(rows.shape[1])])] * len(rows)

    with written_out(pipe.unet, words_of):
        expected = draw(pipe, LONG, negative_prompt=GREY, **call)
    pipe.set_long_prompt(reading=reading, sharpen=POWER)
    with pytest.warns(UserWarning, match="embeddings that this call did not encode") as warned:
        assert np.abs(draw(pipe, LONG, negative_prompt=GREY, **call) - expected).max() < 1e-5
    assert sum("this call did not encode" in str(each.message) for each in warned) == 1


def test_scheduled_prompts(pipe):
    """Each step's text has its own words; the renderer's parts, too."""
    prompt, calls = f"[{LONG}:{GREY}:0.5]", iter(range(99))
    first, then = (pipe.set_long_prompt(reading="a1111").prompt_layout(text).words[0] for text in (LONG, GREY))

    def words_of(rows):
        positive = first if next(calls) < len(cross_attentions(pipe.unet)) else then
        return [torch.zeros(rows.shape[1], dtype=torch.bool), torch.tensor(positive)]  # zeros are negative

    with written_out(pipe.unet, words_of):
        expected = draw(pipe, prompt, **SIZE)
    options = {"reading": "a1111", "sharpen": POWER}
    ours = draw(pipe.set_long_prompt(**options), prompt, **SIZE)
    assert np.abs(ours - expected).max() < 1e-5
    sampling = Sampling(steps=2, guidance_scale=5.0, long_prompt=LongPromptOptions(**options), **SIZE)
    [image] = render_batch(pipe, encode_batch(pipe, [ImagePrompt(prompt)], sampling), [0], sampling)
    assert np.array_equal(image, draw(pipe, prompt, output_type="pil", **SIZE)[0])


def test_the_renderer_passes_words_on(pipe):
    sampling = Sampling(steps=2, guidance_scale=5.0, long_prompt=LongPromptOptions(sharpen=POWER), **SIZE)
    prompt = ImagePrompt(LONG, negative_prompt=GREY)
    [expected] = draw(pipe.set_long_prompt(sharpen=POWER), LONG, negative_prompt=GREY, output_type="pil", **SIZE)
    [image] = render_batch(pipe, encode_batch(pipe, [prompt], sampling), [0], sampling)
    assert np.array_equal(image, expected)


@pytest.mark.parametrize("power", [0.0, 4.1, math.nan])
def test_what_cannot_be_is_refused(pipe, power):
    for refuse in (partial(pipe.set_long_prompt, sharpen=power), sharpened(pipe.unet, power).__enter__):
        with pytest.raises(ValueError, match="sharpen is .*, but must be a number above 0 and at most 4"):
            refuse()
