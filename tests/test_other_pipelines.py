"""The 248-token encoder in FLUX and SD3 as diffusers has them: an ordinary component, no class of ours."""

import pytest
import torch
import transformers
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from helpers import tiny_flux, tiny_sdxl
from helpers.drawing import LATE, PLAIN, same_picture
from helpers.vocabulary import tiny_tokenizer

from debias_diffusion.interchange.stretch import stretch_text_encoder

LONG = 248

pytestmark = pytest.mark.usefixtures("no_grad")


def load(cls, base, **components):
    pipe = cls.from_pretrained(base, **components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


# ---- FLUX: the T5 reads the words; CLIP-L gives the pooled vector


@pytest.fixture(scope="module")
def flux_base(tmp_path_factory):
    return tiny_flux.build_tiny_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def long_encoder():
    return tiny_sdxl.stretched(tiny_sdxl.text_encoder(tiny_flux.CLIP_WIDTH), LONG)


def pooled(pipe, prompt):
    return pipe.encode_prompt(prompt, max_sequence_length=64)[1]


def test_flux_reads_late_words_with_a_248_token_encoder(flux_base, long_encoder):
    # The T5 is given one short text, so that only CLIP-L can tell the two prompts apart.
    call = {"prompt_2": "a cat", "max_sequence_length": 64}
    stock = load(FluxPipeline, flux_base)
    assert torch.equal(pooled(stock, PLAIN), pooled(stock, LATE))
    assert same_picture(stock, **call)

    long = load(FluxPipeline, flux_base, text_encoder=long_encoder, tokenizer=tiny_tokenizer(LONG))
    assert not torch.equal(pooled(long, PLAIN), pooled(long, LATE))
    assert not same_picture(long, **call)
    # what the pipeline calls pooled is the encoder's own output at the text's end
    alone = long_encoder(tiny_tokenizer(LONG)([LATE], return_tensors="pt").input_ids).pooler_output
    torch.testing.assert_close(pooled(long, LATE), alone, rtol=1e-5, atol=1e-5)
    # a short prompt is read as the first 77 positions always read it
    torch.testing.assert_close(pooled(long, "a cat"), pooled(stock, "a cat"), rtol=1e-5, atol=1e-5)


def test_flux_reads_the_length_once_when_it_is_built(flux_base, long_encoder):
    """The reason why the recipe hands both to `from_pretrained`."""
    pipe = load(FluxPipeline, flux_base)
    pipe.text_encoder, pipe.tokenizer = long_encoder, tiny_tokenizer(LONG)
    assert pipe.tokenizer_max_length == 77
    assert torch.equal(pooled(pipe, PLAIN), pooled(pipe, LATE))
    pipe = FluxPipeline(**{**pipe.components, "image_encoder": None, "feature_extractor": None})
    assert pipe.tokenizer_max_length == LONG
    assert not torch.equal(pooled(pipe, PLAIN), pooled(pipe, LATE))


def test_a_flux_with_a_248_token_encoder_is_saved_and_loaded_by_diffusers(flux_base, long_encoder, tmp_path):
    long = load(FluxPipeline, flux_base, text_encoder=long_encoder, tokenizer=tiny_tokenizer(LONG))
    long.save_pretrained(tmp_path)
    again = load(FluxPipeline, tmp_path)
    assert again.tokenizer_max_length == LONG
    assert torch.equal(pooled(again, LATE), pooled(long, LATE))


# ---- SD3: one length, `tokenizer.model_max_length`, for both CLIPs


@pytest.fixture(scope="module")
def sd3_base(tmp_path_factory):
    return tiny_flux.build_tiny_sd3(tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="module")
def long_pairs(sd3_base):
    """Both CLIPs stretched to 248 positions, as keyword arguments."""
    pipe = load(StableDiffusion3Pipeline, sd3_base)
    text_encoder, tokenizer = stretch_text_encoder(pipe.text_encoder, pipe.tokenizer)
    text_encoder_2, tokenizer_2 = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
    return (
        {"text_encoder": text_encoder, "tokenizer": tokenizer},
        {"text_encoder_2": text_encoder_2, "tokenizer_2": tokenizer_2},
    )


def sd3_encode(pipe, prompt):
    """Positions of the CLIPs, [1, 77 or 248, T5's width], and the pooled embedding."""
    embeds, _, pooled, _ = pipe.encode_prompt(prompt, None, None, max_sequence_length=64)
    return embeds[:, :-64], pooled


def test_sd3_reads_late_words_with_both_encoders_at_248(sd3_base, long_pairs):
    call = {"prompt_3": "a cat", "max_sequence_length": 64}  # the T5 cannot tell the prompts apart
    stock = load(StableDiffusion3Pipeline, sd3_base)
    for a, b in zip(sd3_encode(stock, PLAIN), sd3_encode(stock, LATE), strict=True):
        assert torch.equal(a, b)
    assert same_picture(stock, **call)

    both = load(StableDiffusion3Pipeline, sd3_base, **long_pairs[0], **long_pairs[1])
    (plain, pooled_plain), (late, pooled_late) = sd3_encode(both, PLAIN), sd3_encode(both, LATE)
    assert plain.shape == (1, LONG, tiny_flux.T5_WIDTH)
    differs = plain != late
    first, second = tiny_flux.CLIP_WIDTH, tiny_flux.CLIP_WIDTH + tiny_sdxl.WIDTH_2
    # BOS, then token 120; under the causal mask nothing before it changes, and both encoders see it
    assert not differs[:, :121].any()
    assert differs[0, 121:, :first].any(-1).all() and differs[0, 121:, first:second].any(-1).all()
    for a, b in zip(*(pooled.split(tiny_flux.SD3_POOLED, -1) for pooled in (pooled_plain, pooled_late)), strict=True):
        assert not torch.equal(a, b)
    assert not same_picture(both, **call)


def test_sd3_with_one_encoder_at_248_fails_or_truncates(sd3_base, long_pairs):
    only_first = load(StableDiffusion3Pipeline, sd3_base, **long_pairs[0])
    with pytest.raises(ValueError, match=r"`sequence length`: 248 and max_position_embeddings: 77"):
        only_first.encode_prompt("a cat", None, None)  # however short the prompt is: all are padded to the one length
    only_second = load(StableDiffusion3Pipeline, sd3_base, **long_pairs[1])
    for a, b in zip(sd3_encode(only_second, PLAIN), sd3_encode(only_second, LATE), strict=True):
        assert torch.equal(a, b)


def test_sd3_needs_the_encoder_with_its_projection(sd3_base, long_pairs):
    """SDXL's and FLUX's CLIPTextModel has none, and SD3 pools through it: the recipe's `--projection`."""
    bare = tiny_sdxl.text_encoder(tiny_flux.CLIP_WIDTH, LONG)
    assert not isinstance(bare, transformers.CLIPTextModelWithProjection)
    pipe = load(StableDiffusion3Pipeline, sd3_base, **long_pairs[0] | long_pairs[1] | {"text_encoder": bare})
    with pytest.raises(RuntimeError, match="Number of dimensions of repeat dims"):
        pipe.encode_prompt("a cat", None, None)
