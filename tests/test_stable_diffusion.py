"""Long prompts through Stable Diffusion 1.5, where they differ from SDXL's: one encoder, its last layer."""

import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers import tiny_sdxl
from helpers.drawing import OTHER, SHORT, add_lora
from helpers.vocabulary import BOS, EOS, tiny_tokenizer

from debias_diffusion.pipelines import StableDiffusionLongPromptImg2ImgPipeline, StableDiffusionLongPromptPipeline

LONG = "a red cat on a blue sofa, " * 15 + "in a tree"  # 123 tokens, the first chunk cut after 72

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def parts():
    return tiny_sdxl.sd15_parts()


@pytest.fixture(scope="module")
def stock(parts):
    return StableDiffusionPipeline(**parts)


@pytest.fixture(scope="module")
def ours(parts):
    return StableDiffusionLongPromptPipeline(**parts)


@pytest.fixture(scope="module")
def long(parts):
    longer = tiny_sdxl.stretched(parts["text_encoder"], 248)
    return StableDiffusionLongPromptPipeline(**parts | {"text_encoder": longer, "tokenizer": tiny_tokenizer(248)})


def encode(pipe, prompt, negative=None, guided=True, **settings):
    return pipe.encode_prompt(prompt, torch.device("cpu"), 1, guided, negative, **settings)


def parts_of(encoder):
    return getattr(encoder, "text_model", encoder)


def test_a_short_prompt_is_encoded_as_in_diffusers(stock, ours, long):
    for prompt, negative in ((SHORT, OTHER), ("", None), ([SHORT, OTHER], ["", SHORT])):
        expected = encode(stock, prompt, negative)
        assert all(map(torch.equal, encode(ours, prompt, negative), expected))
        got = encode(long, prompt, negative)
        assert got[0].shape[1] == 77  # what the UNet was trained with
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("skip", [1, 2])
@pytest.mark.parametrize("prompt", [SHORT, LONG])
def test_clip_skip_stops_early_and_keeps_the_final_norm(ours, skip, prompt):
    """By hand: with transformers 5 diffusers' own `clip_skip` of Stable Diffusion 1.5 raises."""
    tokens = ours._tokenize(prompt)[0][0]
    encoder = ours.text_encoder
    embeds, negatives = encode(ours, prompt, OTHER, clip_skip=skip)
    ids = torch.tensor([[BOS, *tokens.ids[:75], EOS, *[EOS] * max(0, 75 - len(tokens.ids))]])
    states = encoder(ids, output_hidden_states=True).hidden_states[-1 - skip]
    expected = parts_of(encoder).final_layer_norm(states)
    same = 76 if prompt == SHORT else 1 + 72
    torch.testing.assert_close(embeds[:, :same], expected[:, :same], rtol=1e-5, atol=1e-5)
    assert torch.equal(negatives, encode(ours, prompt, OTHER)[1])
    ours.set_long_prompt(negative_clip_skip=True)
    followed = encode(ours, prompt, OTHER, clip_skip=skip)[1]
    ours.set_long_prompt()
    assert not torch.equal(followed, negatives)
    # No trace of it remains.
    assert torch.equal(encode(ours, SHORT)[0], encode(ours, SHORT, clip_skip=0)[0])


def test_clip_skip_ends_cleanly_when_the_encoder_fails(ours):
    before = encode(ours, SHORT)[0]

    def fail(*_):
        raise RuntimeError("out of memory")

    hook = parts_of(ours.text_encoder).final_layer_norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        encode(ours, SHORT, clip_skip=1)
    hook.remove()
    assert torch.equal(encode(ours, SHORT)[0], before)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"`clip_skip` is {wrong}, but must be from 0 to 2"):
            encode(ours, SHORT, clip_skip=wrong)


def test_a_long_prompt_in_chunks_and_at_once(ours, long):
    tokens = ours._tokenize(LONG)[0][0]
    assert len(tokens.ids) == 123
    assert ours.prompt_layout(LONG)[:3] == (123, 152, (3,))
    assert long.prompt_layout(LONG)[:3] == (123, 152, (1,))
    assert long.prompt_layout("cat", negative_prompt=LONG)[:3] == (1, 152, (1,))
    assert long.prompt_layout("cat", negative_prompt=LONG, do_classifier_free_guidance=False)[:3] == (1, 77, (1,))
    embeds, negatives = encode(long, LONG, OTHER)
    ids = torch.tensor([[BOS, *tokens.ids, EOS, *[EOS] * 27]])
    torch.testing.assert_close(embeds, long.text_encoder(ids)[0], rtol=1e-5, atol=1e-5)
    assert negatives.shape == embeds.shape
    separate = type(ours)(**ours.components).set_long_prompt(reading="separate")
    assert separate.prompt_layout(LONG)[:3] == (123, 152, (2,))
    embeds, _ = encode(separate, LONG)
    first, second = (
        ours.text_encoder(torch.tensor([[BOS, *ids, EOS]]))[0] for ids in (tokens.ids[:72], tokens.ids[72:])
    )
    torch.testing.assert_close(embeds[:, :73], first[:, :73], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(embeds[:, 73:125], second[:, 1:], rtol=1e-5, atol=1e-5)


def test_an_unused_negative_does_not_count(ours):
    embeds, negatives = encode(ours, SHORT, LONG, guided=False)
    assert embeds.shape[1] == 77 and negatives is None


def test_strict(ours, long):
    ours, long = (type(pipe)(**pipe.components).set_long_prompt(strict=True) for pipe in (ours, long))
    with pytest.raises(ValueError, match="a text of 123 tokens takes 3 chunks .* 77 positions, and `strict`"):
        encode(ours, LONG)
    with pytest.raises(ValueError, match="a text of 123 tokens"):
        encode(ours, "cat", LONG)
    assert encode(ours, "cat", LONG, guided=False)[0].shape[1] == 77
    assert encode(long, LONG)[0].shape[1] == 152


def test_lora_scale_holds_for_one_call():
    pipe = StableDiffusionLongPromptPipeline(**tiny_sdxl.sd15_parts())
    add_lora(pipe.text_encoder)
    full, none = encode(pipe, SHORT)[0], encode(pipe, SHORT, lora_scale=0.0)[0]
    assert not torch.equal(full, none)
    assert torch.equal(encode(pipe, SHORT)[0], full)


def test_without_the_encoder(parts, ours):
    embeds, negatives = encode(ours, LONG, OTHER)
    without = StableDiffusionLongPromptPipeline(**parts | {"text_encoder": None, "tokenizer": None})
    with pytest.raises(ValueError, match="`text_encoder` is None, so no prompt can be encoded"):
        encode(without, SHORT)
    nothing = StableDiffusionLongPromptPipeline(**parts | {"text_encoder": None, "tokenizer": None, "unet": None})
    for pipe in (without, nothing):
        got = encode(pipe, None, prompt_embeds=embeds, negative_prompt_embeds=negatives)
        assert all(map(torch.equal, got, (embeds, negatives)))


def test_another_pipeline_made_of_it_has_its_options(ours):
    ours.set_long_prompt(strict=True)
    other = StableDiffusionLongPromptImg2ImgPipeline.from_pipe(ours, requires_safety_checker=False)
    ours.set_long_prompt()
    with pytest.raises(ValueError, match="`strict` allows one"):
        encode(other, LONG)
    assert StableDiffusionLongPromptImg2ImgPipeline.from_pipe(ours).prompt_layout(LONG).chunks == (3,)
    stock = StableDiffusionPipeline.from_pipe(other)
    assert type(stock) is StableDiffusionPipeline and stock.unet is ours.unet
    assert encode(StableDiffusionLongPromptPipeline.from_pipe(stock), LONG)[0].shape[1] == 152
