"""`sharpen` and `sharpen_sentences`: cross-attention of long prompts, against hooks and attention written out."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import StableDiffusionXLPAGPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import LONG, SHORT, draw, embed
from helpers.tiny_sdxl import assemble, assemble_copy
from peft import LoraConfig

from debias_diffusion.pipelines import (
    LongPromptOptions,
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptControlNetPipeline,
    StableDiffusionXLLongPromptPipeline,
    sharpened,
    with_long_prompts,
)
from debias_diffusion.pipelines.rendering.images import encode_batch, render_batch
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt
from debias_diffusion.pipelines.sharpening import choose

pytestmark = pytest.mark.usefixtures("no_grad")
FACTOR = 2.0  # a power of two, by which rounding commutes
POWER = 3.0
EACH_OPTION = [{"sharpen": FACTOR}, {"sharpen_sentences": POWER}]


@pytest.fixture
def pipe(parts):
    """Of models that a test may change."""
    return assemble_copy(StableDiffusionXLLongPromptPipeline, parts)


def keys_of(unet):
    return [module.to_k for name, module in unet.named_modules() if name.endswith("attn2")]


def traces(pipe):
    """What is set on the UNet's modules, of which `forward` and processors may be."""
    own = [vars(module) for module in pipe.unet.modules()]
    return [(sorted(each), each.get("forward"), each.get("processor")) for each in own]


# ---- written out


def drawn_with_scaled_keys(pipe, prompt=LONG, **call):
    """The image where hooks double the keys, the plain way."""
    hooks = [layer.register_forward_hook(lambda module, inputs, keys: FACTOR * keys) for layer in keys_of(pipe.unet)]
    image = draw(pipe, prompt, **call)
    for hook in hooks:
        hook.remove()
    return image


class Literal:
    """diffusers' processor, written out, that raises the share of each sentence of the conditional rows."""

    def __init__(self, sentences, guided=True):
        self.sentences, self.guided = sentences, guided

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **_):
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            layer(states).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for layer, states in ((attn.to_q, hidden_states), (attn.to_k, text), (attn.to_v, text))
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        if encoder_hidden_states is not None:
            prompts = len(self.sentences)
            for row in range(prompts * self.guided, len(text)):
                self.raise_shares(weights[row], self.sentences[row % prompts])
        return attn.to_out[0]((weights @ v).transpose(1, 2).flatten(2))

    def raise_shares(self, weights, numbers):
        spans = [[at for at, of in enumerate(numbers) if of == number] for number in range(max(numbers) + 1)]
        shares = torch.stack([weights[..., span].sum(-1) for span in spans])
        raised = shares**POWER
        raised *= shares.sum(0) / raised.sum(0)
        for span, before, after in zip(spans, shares, raised, strict=True):
            weights[..., span] *= (after / before)[..., None]


def chosen(pipe, prompt=LONG, **call):
    """The image with `sharpen_sentences`, and the one that is written out."""
    ours = draw(pipe.set_long_prompt(sharpen_sentences=POWER), prompt, **call)
    images, before = call.get("num_images_per_prompt", 1), pipe.unet.attn_processors
    sentences = [row for row in pipe.prompt_layout(prompt).sentences for _ in range(images)]
    guided = call.get("guidance_scale", 5) > 1
    literal = {name: Literal(sentences, guided) if "attn2" in name else own for name, own in before.items()}
    pipe.set_long_prompt().unet.set_attn_processor(literal)
    expected = draw(pipe, prompt, **call)
    pipe.unet.set_attn_processor(before)
    return ours, expected


def test_the_keys_of_cross_attention_are_scaled(pipe):
    """Which is the formula's softmax(factor * q k^T / sqrt(d)) v."""
    for each in (pipe, assemble(StableDiffusionLongPromptPipeline, tiny_sdxl.sd15_parts())):
        expected, plain = drawn_with_scaled_keys(each), draw(each, LONG)
        sharp = draw(each.set_long_prompt(sharpen=FACTOR), LONG)
        assert np.array_equal(sharp, expected) and not np.array_equal(sharp, plain)


def test_shares_of_sentences_are_raised_and_nothing_else():
    weights = torch.rand((1, 2, 5, 9), generator=torch.Generator().manual_seed(0)).softmax(-1)
    numbers = torch.tensor([[-1, 0, 0, 1, 1, 1, 2, -1, -1]])
    member = (numbers[..., None] == torch.arange(3)).float()
    raised, words = choose(weights, member, 2.0), numbers[0] >= 0
    torch.testing.assert_close(raised.sum(-1), weights.sum(-1))
    assert torch.equal(raised[..., ~words], weights[..., ~words])
    before, after = ((of @ member[:, None]) for of in (weights, raised))
    torch.testing.assert_close(after / after.sum(-1, keepdim=True), before**2 / (before**2).sum(-1, keepdim=True))
    assert choose(torch.eye(9)[None, None], member, 2.0).isfinite().all()  # where no word is looked at


def test_the_layout_numbers_sentences(pipe):
    texts = [SHORT, *["The sky is grey, the house is old."] * 9, "In front of it stands a yellow bicycle."]
    counts = [len(pipe.tokenizer(text.lower(), add_special_tokens=False).input_ids) for text in texts]
    numbers = [number for number, count in enumerate(counts) for _ in range(count)]
    long, short = pipe.prompt_layout([LONG, SHORT]).sentences
    assert long == (-1, *numbers, *[-1] * (151 - len(numbers)))
    assert short == (-1, *[0] * counts[0], *[-1] * (151 - counts[0]))


@pytest.mark.parametrize(
    "call",
    [
        {"prompt": [LONG, SHORT, f"{SHORT} {LONG}"]},
        {"prompt": LONG, "num_images_per_prompt": 2, "negative_prompt": LONG[::-1]},
        {"prompt": LONG, "guidance_scale": 1.0},
    ],
)
def test_choosing_is_attention_written_out(pipe, call):
    ours, expected = chosen(pipe, **call)
    assert np.abs(ours - expected).max() < 1e-4 < 1e-3 < np.abs(ours - draw(pipe, **call)).max()


# ---- where nothing changes


@pytest.mark.parametrize(
    ("options", "prompt"),
    [*((each, SHORT) for each in EACH_OPTION), ({"sharpen": 1.0}, LONG), ({"sharpen_sentences": 1.0}, LONG)],
)
def test_short_prompts_and_a_factor_of_one_stay_as_they_are(pipe, options, prompt):
    plain = draw(pipe, prompt)
    assert np.array_equal(draw(pipe.set_long_prompt(**options), prompt), plain)


@pytest.mark.parametrize("options", EACH_OPTION)
def test_nothing_stays_behind(pipe, options):
    before, plain = traces(pipe), draw(pipe, LONG)

    def fail(*_):
        assert traces(pipe) != before
        raise KeyboardInterrupt

    pipe.set_long_prompt(**options)
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
    alone = draw(pipe.set_long_prompt(sharpen=FACTOR), LONG)

    def preview(pipe, *_):
        images.append(run(lambda: draw(sharing(pipe, StableDiffusionXLPipeline), **embeds)))
        return {}

    assert np.array_equal(draw(pipe, LONG, callback_on_step_end=preview), alone)
    assert len(images) == 2 and all(np.array_equal(image, plain) for image in images)


def test_contexts(pipe):
    """Of several UNets, but not twice of one; a pipeline's own factor holds instead of the context's."""
    other = assemble(StableDiffusionXLLongPromptPipeline, {**pipe.components, "unet": tiny_sdxl.unet(seed=1)})
    plain, sharp, other_sharp = draw(pipe, LONG), drawn_with_scaled_keys(pipe), drawn_with_scaled_keys(other)
    with sharpened(other.unet, 3.0), sharpened(pipe.unet, FACTOR), sharpened(pipe.unet, 1.0):
        with pytest.raises(ValueError, match="sharpened in this thread already"), sharpened(pipe.unet, FACTOR):
            pass
        assert np.array_equal(draw(pipe, LONG), sharp)
        assert np.array_equal(draw(other.set_long_prompt(sharpen=FACTOR), LONG), other_sharp)
        assert np.array_equal(in_thread(lambda: draw(pipe, LONG)), plain)
    assert np.array_equal(draw(pipe, LONG), plain)


# ---- with other things in the UNet


def with_lora(pipe):
    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(target_modules=["attn2.to_q", "attn2.to_k", "to_out.0"], init_lora_weights=False))


def with_ip_adapter(pipe):
    adapter = tiny_sdxl.ip_adapter(pipe.unet)
    pipe.load_ip_adapter(adapter, subfolder=None, weight_name=None, image_encoder_folder=None)
    return {"ip_adapter_image_embeds": [torch.randn((2, 1, 24), generator=torch.Generator().manual_seed(0))]}


def with_hooks(pipe):
    """As offloading has them: they replace `forward` of each layer."""
    for layer in keys_of(pipe.unet):
        add_hook_to_module(layer, ModelHook())


@pytest.mark.parametrize("prepare", [with_lora, with_ip_adapter, with_hooks])
def test_sharpening_with_other_things_in_the_unet(pipe, prepare):
    call = prepare(pipe) or {}
    before, expected = traces(pipe), drawn_with_scaled_keys(pipe, **call)
    sharp = draw(pipe.set_long_prompt(sharpen=FACTOR), LONG, **call)
    assert traces(pipe) == before
    assert np.array_equal(sharp, expected)


def test_fused_projections(pipe):
    expected, (_, choosing) = drawn_with_scaled_keys(pipe), chosen(pipe)
    pipe.fuse_qkv_projections(vae=False)
    assert np.abs(draw(pipe.set_long_prompt(sharpen=FACTOR), LONG) - expected).max() < 1e-5
    assert np.abs(draw(pipe.set_long_prompt(sharpen_sentences=POWER), LONG) - choosing).max() < 1e-4


def test_choosing_with_a_lora_a_controlnet_and_perturbed_attention_guidance(pipe, parts):
    """Of which the last has each prompt three times, the negative one first."""
    with_lora(pipe)
    controlled = parts | {"controlnet": tiny_sdxl.controlnet(parts["unet"])}
    controlled = assemble_copy(StableDiffusionXLLongPromptControlNetPipeline, controlled)
    guided = with_long_prompts(assemble(StableDiffusionXLPAGPipeline, parts))
    for each, call in ((pipe, {}), (controlled, {"image": tiny_sdxl.picture()}), (guided, {"pag_scale": 2.0})):
        ours, expected = chosen(each, **call)
        assert np.abs(ours - expected).max() < 1e-4


def test_an_ip_adapter_keeps_its_attention_where_sentences_are_chosen(pipe):
    call = with_ip_adapter(pipe)
    plain = draw(pipe, LONG, **call)
    with pytest.warns(UserWarning, match="IPAdapterAttnProcessor"):
        assert np.array_equal(draw(pipe.set_long_prompt(sharpen_sentences=POWER), LONG, **call), plain)


# ---- sentences of embeddings that are passed in, and of the renderer


def test_embeddings_that_are_passed_in(pipe):
    """With the sentences of `prompt_layout`; without them attention stays as it is, and says so."""
    embeds, plain = embed(pipe, LONG), draw(pipe, LONG)
    expected = draw(pipe.set_long_prompt(sharpen_sentences=POWER), LONG, num_images_per_prompt=2)
    sentences = torch.tensor(pipe.prompt_layout(LONG).sentences)
    assert np.array_equal(draw(pipe, **embeds, sentences=sentences, num_images_per_prompt=2), expected)
    with pytest.warns(UserWarning, match="sentences=torch.tensor"):
        assert np.array_equal(draw(pipe, **embeds), plain)


def test_the_renderer_passes_sentences_on(pipe):
    size = {"height": 32, "width": 32}
    sampling = Sampling(steps=2, guidance_scale=5.0, long_prompt=LongPromptOptions(sharpen_sentences=POWER), **size)
    [expected] = draw(pipe.set_long_prompt(sharpen_sentences=POWER), LONG, output_type="pil", **size)
    [image] = render_batch(pipe, encode_batch(pipe, [ImagePrompt(LONG)], sampling), [0], sampling)
    assert np.array_equal(image, expected)


@pytest.mark.parametrize(
    "options",
    [
        *({"sharpen": factor} for factor in (0.0, 4.1, math.nan)),
        *({"sharpen_sentences": power} for power in (0.0, 16.5, math.nan)),
        *({"sharpen_sentences": 4.0} | other for other in ({"reading": "a1111"}, {"breaks": "average"})),
    ],
)
def test_what_cannot_be_is_refused(pipe, options):
    with pytest.raises(ValueError, match="sharpen.* is"):
        pipe.set_long_prompt(**options)
