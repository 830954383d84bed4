"""`sharpen_sentences`: the choice between sentences, against attention written out, in all that pipelines may be."""

import math

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPAGPipeline
from helpers import tiny_sdxl
from helpers.draw import LONG, SHORT, draw, embed
from helpers.tiny_sdxl import assemble, assemble_copy
from peft import LoraConfig

from debias_diffusion.pipelines import (
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptControlNetPipeline,
    StableDiffusionXLLongPromptPipeline,
    with_long_prompts,
)
from debias_diffusion.pipelines.rendering.renderer import ImagePrompt, Sampling, encode, render
from debias_diffusion.pipelines.sharpening import choose

pytestmark = pytest.mark.usefixtures("no_grad")
POWER = 3.0


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


@pytest.fixture(scope="module")
def parts():
    return tiny_sdxl.sdxl_parts()


@pytest.fixture
def pipe(parts):
    return assemble_copy(StableDiffusionXLLongPromptPipeline, parts)


def chosen(pipe, prompt=LONG, **call):
    """The image with the option, and the one that is written out."""
    ours = draw(pipe.set_long_prompt(sharpen_sentences=POWER), prompt, **call)
    images, before = call.get("num_images_per_prompt", 1), pipe.unet.attn_processors
    sentences = [row for row in pipe.prompt_layout(prompt).sentences for _ in range(images)]
    guided = call.get("guidance_scale", 5) > 1
    literal = {name: Literal(sentences, guided) if "attn2" in name else own for name, own in before.items()}
    pipe.set_long_prompt().unet.set_attn_processor(literal)
    expected = draw(pipe, prompt, **call)
    pipe.unet.set_attn_processor(before)
    return ours, expected


def test_shares_of_sentences_are_raised_and_nothing_else():
    weights = torch.rand((1, 2, 5, 9), generator=torch.Generator().manual_seed(0)).softmax(-1)
    numbers = torch.tensor([[-1, 0, 0, 1, 1, 1, 2, -1, -1]])
    member = (numbers[..., None] == torch.arange(3)).float()
    raised, words = choose(weights, member, 2.0), numbers[0] >= 0
    torch.testing.assert_close(raised.sum(-1), weights.sum(-1))
    assert torch.equal(raised[..., ~words], weights[..., ~words])
    before, after = ((of @ member[:, None]) for of in (weights, raised))
    torch.testing.assert_close(after / after.sum(-1, keepdim=True), before**2 / (before**2).sum(-1, keepdim=True))
    torch.testing.assert_close(raised[..., 3] / after[..., 1], weights[..., 3] / before[..., 1])
    assert choose(torch.eye(9)[None, None], member, 2.0).isfinite().all()  # where no word is looked at


def test_the_layout_numbers_sentences(pipe):
    texts = [SHORT, *["The sky is grey, the house is old."] * 9, "In front of it stands a yellow bicycle."]
    counts = [len(pipe.tokenizer(text.lower(), add_special_tokens=False).input_ids) for text in texts]
    numbers = [number for number, count in enumerate(counts) for _ in range(count)]
    long, short = pipe.prompt_layout([LONG, SHORT]).sentences
    assert long == (-1, *numbers, *[-1] * (151 - len(numbers)))
    assert short == (-1, *[0] * counts[0], *[-1] * (151 - counts[0]))


CALLS = {
    "one prompt": {},
    "a batch, some short": {"prompt": [LONG, SHORT, f"{SHORT} {LONG}"]},
    "several images": {"num_images_per_prompt": 2, "negative_prompt": LONG[::-1]},
    "without guidance": {"guidance_scale": 1.0},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_attention_written_out(pipe, call):
    call = {"prompt": LONG} | call
    ours, expected = chosen(pipe, **call)
    assert np.abs(ours - expected).max() < 1e-4 < 1e-3 < np.abs(ours - draw(pipe, **call)).max()


def with_lora(pipe):
    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(target_modules=["attn2.to_q", "attn2.to_k", "to_out.0"], init_lora_weights=False))
    return pipe


def with_fused_projections(pipe):
    pipe.fuse_qkv_projections(vae=False)
    return pipe


def with_sharpening(pipe):
    """All keys are scaled, too."""
    for layer in (module.to_k for name, module in pipe.unet.named_modules() if name.endswith("attn2")):
        layer.register_forward_hook(lambda module, inputs, keys: 1.5 * keys if keys.shape[1] > 77 else keys)
    return pipe


def older(pipe):
    return assemble_copy(StableDiffusionLongPromptPipeline, tiny_sdxl.sd15_parts())


@pytest.mark.parametrize("prepare", [with_lora, with_sharpening, older])
def test_with_other_things_in_the_unet(pipe, prepare):
    ours, expected = chosen(prepare(pipe))
    assert np.abs(ours - expected).max() < 1e-4


def test_fused_projections_and_a_controlnet(pipe, parts):
    controlled = assemble_copy(
        StableDiffusionXLLongPromptControlNetPipeline, parts, controlnet=tiny_sdxl.controlnet(parts["unet"])
    )
    ours, expected = chosen(controlled, image=tiny_sdxl.picture())
    assert np.abs(ours - expected).max() < 1e-4
    _, expected = chosen(pipe)
    ours = draw(with_fused_projections(pipe).set_long_prompt(sharpen_sentences=POWER), LONG)
    assert np.abs(ours - expected).max() < 1e-4


def test_perturbed_attention_guidance(parts):
    """The batch has each prompt three times, the negative one first."""
    stock = assemble(StableDiffusionXLPAGPipeline, parts)
    ours, expected = chosen(with_long_prompts(stock), pag_scale=2.0)
    assert np.abs(ours - expected).max() < 1e-4


def test_short_prompts_and_a_power_of_one_stay_as_they_are(pipe):
    for options, prompt in (({"sharpen_sentences": POWER}, SHORT), ({"sharpen_sentences": 1.0}, LONG)):
        plain = draw(pipe.set_long_prompt(), prompt)
        assert np.array_equal(draw(pipe.set_long_prompt(**options), prompt), plain)


def test_nothing_stays_behind(pipe):
    before, plain = pipe.unet.attn_processors, draw(pipe, LONG)

    def fail(*_):
        assert pipe.unet.attn_processors != before
        raise KeyboardInterrupt

    pipe.set_long_prompt(sharpen_sentences=POWER)
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, LONG, callback_on_step_end=fail)
    assert pipe.unet.attn_processors == before
    assert np.array_equal(draw(pipe.set_long_prompt(), LONG), plain)


def test_embeddings_that_are_passed_in(pipe):
    """With the sentences of `prompt_layout`; without them attention stays as it is, and says so."""
    embeds, plain = embed(pipe, LONG), draw(pipe, LONG)
    expected = draw(pipe.set_long_prompt(sharpen_sentences=POWER), LONG, num_images_per_prompt=2)
    sentences = torch.tensor(pipe.prompt_layout(LONG).sentences)
    assert np.array_equal(draw(pipe, **embeds, sentences=sentences, num_images_per_prompt=2), expected)
    with pytest.warns(UserWarning, match="sentences=torch.tensor"):
        assert np.array_equal(draw(pipe, **embeds), plain)


def test_the_renderer_passes_sentences_on(pipe):
    size, texts = {"height": 32, "width": 32}, [LONG, SHORT]
    sampling = Sampling(steps=2, guidance_scale=5.0, sharpen_sentences=POWER, **size)
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    pipe.set_long_prompt(sharpen_sentences=POWER)
    expected = draw(pipe, texts, generator=generators, output_type="pil", **size)
    images = render(pipe, encode(pipe, [ImagePrompt(text) for text in texts], sampling), [0, 1], sampling)
    assert all(np.array_equal(*pair) for pair in zip(images, expected, strict=True))


def test_an_ip_adapter_keeps_its_attention(pipe):
    adapter = tiny_sdxl.ip_adapter(pipe.unet)
    pipe.load_ip_adapter(adapter, subfolder=None, weight_name=None, image_encoder_folder=None)
    call = {"ip_adapter_image_embeds": [torch.randn((2, 1, 24), generator=torch.Generator().manual_seed(0))]}
    plain = draw(pipe, LONG, **call)
    with pytest.warns(UserWarning, match="IPAdapterAttnProcessor"):
        assert np.array_equal(draw(pipe.set_long_prompt(sharpen_sentences=POWER), LONG, **call), plain)


@pytest.mark.parametrize(
    "options",
    [
        *({"sharpen_sentences": power} for power in (0.0, 16.5, math.nan)),
        *({"sharpen_sentences": 4.0} | other for other in ({"reading": "a1111"}, {"breaks": "average"})),
    ],
)
def test_what_cannot_be_is_refused(pipe, options):
    with pytest.raises(ValueError, match="sharpen_sentences is"):
        pipe.set_long_prompt(**options)
