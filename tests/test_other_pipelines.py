"""Other pipelines of diffusers: `with_long_prompts`, Stable Diffusion 1.5, one file of code, FLUX and SD3."""

import ast
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FluxPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.utils import dynamic_modules_utils
from helpers import tiny_flux, tiny_sdxl
from helpers.draw import LATE, LONG, OTHER, PLAIN, SHORT, draw, models, same_image
from helpers.tiny_sdxl import assemble, assemble_copy
from helpers.vocabulary import BOS, EOS, tiny_tokenizer

from debias_diffusion.encoders.stretch import stretch_text_encoder
from debias_diffusion.pipelines import (
    StableDiffusionLongPromptImg2ImgPipeline,
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptPipeline,
    with_long_prompts,
    write_custom_pipeline,
)

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def base():
    return tiny_sdxl.sdxl_parts()


# ---- with_long_prompts


def test_models_are_shared_and_the_pipeline_given_stays_as_it_is(base):
    pipe = assemble(StableDiffusionXLPipeline, base)
    short = draw(pipe, SHORT)
    long = with_long_prompts(pipe)
    assert type(pipe) is StableDiffusionXLPipeline and isinstance(long, StableDiffusionXLPipeline)
    assert all(long.components[name] is component for name, component in pipe.components.items())
    assert np.array_equal(draw(long, SHORT), short)
    assert np.array_equal(draw(long, LONG), draw(assemble(StableDiffusionXLLongPromptPipeline, base), LONG))
    assert pipe.encode_prompt(LONG)[0].shape[1] == 77
    # Options and new components belong to one of the two only.
    long.set_long_prompt(strict=True)
    with_long_prompts(long).set_long_prompt()
    with pytest.raises(ValueError, match="`strict` allows one"):
        long.encode_prompt(LONG)
    long.text_encoder = None
    assert pipe.text_encoder is not None and pipe.config["text_encoder"] == ("transformers", "CLIPTextModel")


def test_a_refiner_has_one_encoder_and_nothing_is_cast_or_copied(base):
    parts = {"text_encoder": None, "tokenizer": None}
    pipe = assemble_copy(StableDiffusionXLImg2ImgPipeline, base, **parts).to(torch.bfloat16)
    pipe.unet.to(torch.float32)
    weights = [weight for part in models(pipe).values() for weight in part.parameters()]
    before = [(weight.data_ptr(), weight.dtype) for weight in weights]
    long = with_long_prompts(pipe)
    weights = [weight for part in models(long).values() for weight in part.parameters()]
    assert [(weight.data_ptr(), weight.dtype) for weight in weights] == before
    assert all(map(torch.equal, long.encode_prompt(SHORT), pipe.encode_prompt(SHORT)))
    assert long.encode_prompt(LONG)[0].shape == (1, 152, tiny_sdxl.WIDTH_2)


# ---- one file of code, loaded the way diffusers loads it


def test_the_file_needs_nothing_of_ours_and_draws_what_the_class_draws(base, tmp_path, monkeypatch):
    file = write_custom_pipeline(tmp_path / "made" / "pipeline.py")
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    # peft only for LoRAs, as in diffusers
    assert imported - {"torch", "transformers", "diffusers", "peft"} <= set(sys.stdlib_module_names)
    # diffusers copies custom code there, by default below the home folder
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "sdxl"
    assemble(StableDiffusionXLPipeline, base).save_pretrained(folder)
    long_encoder = {"text_encoder": tiny_sdxl.text_encoder(positions=248, seed=5), "tokenizer": tiny_tokenizer(248)}
    for place in (file.parent, file):
        how = {"custom_pipeline": str(place), "trust_remote_code": True, "add_watermarker": False}
        custom = DiffusionPipeline.from_pretrained(folder, **how, **long_encoder)
        assert type(custom).__module__.startswith("diffusers_modules.")
    ours = StableDiffusionXLLongPromptPipeline(**custom.components)
    assert np.array_equal(draw(custom, LONG), draw(ours, LONG))


# ---- Stable Diffusion 1.5: one encoder, its last layer

TOKENS = "a red cat on a blue sofa, " * 15 + "in a tree"  # 123, the first chunk cut after 72


@pytest.fixture(scope="module")
def parts():
    return tiny_sdxl.sd15_parts()


@pytest.fixture(scope="module")
def ours(parts):
    return StableDiffusionLongPromptPipeline(**parts)


@pytest.fixture(scope="module")
def long(parts):
    longer = tiny_sdxl.stretched(parts["text_encoder"], 248)
    return StableDiffusionLongPromptPipeline(**parts | {"text_encoder": longer, "tokenizer": tiny_tokenizer(248)})


def encode(pipe, prompt, negative=None, guided=True, **settings):
    return pipe.encode_prompt(prompt, torch.device("cpu"), 1, guided, negative, **settings)


def final_norm(encoder):
    return getattr(encoder, "text_model", encoder).final_layer_norm


def test_a_short_prompt_is_encoded_as_in_diffusers(parts, ours, long):
    stock = StableDiffusionPipeline(**parts)
    for prompt, negative in ((SHORT, OTHER), ("", None), ([SHORT, OTHER], ["", SHORT])):
        expected = encode(stock, prompt, negative)
        assert all(map(torch.equal, encode(ours, prompt, negative), expected))
        got = encode(long, prompt, negative)
        assert got[0].shape[1] == 77  # what the UNet was trained with
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("skip", [1, 2])
@pytest.mark.parametrize(("prompt", "same"), [(SHORT, 76), (TOKENS, 73)], ids=["short", "long"])
def test_clip_skip_stops_early_and_keeps_the_final_norm(ours, skip, prompt, same):
    """By hand: with transformers 5 diffusers' own `clip_skip` of Stable Diffusion 1.5 raises."""
    tokens, encoder = ours._reader.tokenize(prompt)[0][0], ours.text_encoder
    embeds, negatives = encode(ours, prompt, OTHER, clip_skip=skip)
    ids = torch.tensor([[BOS, *tokens.ids[:75], EOS, *[EOS] * max(0, 75 - len(tokens.ids))]])
    expected = final_norm(encoder)(encoder(ids, output_hidden_states=True).hidden_states[-1 - skip])
    torch.testing.assert_close(embeds[:, :same], expected[:, :same], rtol=1e-5, atol=1e-5)
    assert torch.equal(negatives, encode(ours, prompt, OTHER)[1])


def test_clip_skip_ends_cleanly_when_the_encoder_fails(ours):
    before = encode(ours, SHORT)[0]
    hook = final_norm(ours.text_encoder).register_forward_hook(Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        encode(ours, SHORT, clip_skip=1)
    hook.remove()
    assert torch.equal(encode(ours, SHORT)[0], before)


def test_a_long_prompt_in_chunks_and_at_once(ours, long):
    tokens = ours._reader.tokenize(TOKENS)[0][0]
    assert ours.prompt_layout(TOKENS)[:3] == (123, 152, (3,))
    assert long.prompt_layout("cat", negative_prompt=TOKENS)[:3] == (1, 152, (1,))
    assert long.prompt_layout("cat", negative_prompt=TOKENS, do_classifier_free_guidance=False).positions == 77
    embeds, negatives = encode(long, TOKENS, OTHER)
    ids = torch.tensor([[BOS, *tokens.ids, EOS, *[EOS] * 27]])
    torch.testing.assert_close(embeds, long.text_encoder(ids)[0], rtol=1e-5, atol=1e-5)
    assert negatives.shape == embeds.shape
    separate = type(ours)(**ours.components).set_long_prompt(reading="separate")
    assert separate.prompt_layout(TOKENS)[:3] == (123, 152, (2,))
    embeds, _ = encode(separate, TOKENS)
    chunks = [[BOS, *part, EOS] for part in (tokens.ids[:72], tokens.ids[72:])]
    first, second = (ours.text_encoder(torch.tensor([ids]))[0] for ids in chunks)
    torch.testing.assert_close(embeds[:, :73], first[:, :73], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(embeds[:, 73:125], second[:, 1:], rtol=1e-5, atol=1e-5)


def test_strict_counts_the_prompts_that_are_used_and_is_kept_by_from_pipe(ours):
    strict = type(ours)(**ours.components).set_long_prompt(strict=True)
    other = StableDiffusionLongPromptImg2ImgPipeline.from_pipe(strict, requires_safety_checker=False)
    for pipe, texts in ((strict, ("cat", TOKENS)), (other, (TOKENS,))):
        with pytest.raises(ValueError, match="a text of 123 tokens takes 3 chunks .* 77 positions, and `strict`"):
            encode(pipe, *texts)
    embeds, negatives = encode(strict, SHORT, TOKENS, guided=False)
    assert embeds.shape[1] == 77 and negatives is None


# ---- FLUX and SD3: a 248-token encoder is an ordinary component of diffusers' class


def loaded(cls, folder, **components):
    pipe = cls.from_pretrained(folder, **components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pooled(pipe, prompt):
    return pipe.encode_prompt(prompt, max_sequence_length=64)[1]


def test_flux_reads_late_words_with_a_248_token_encoder(tmp_path):
    """Its T5 reads the words, CLIP-L gives the pooled vector. The T5 gets one short text: CLIP-L alone can tell."""
    folder, call = tiny_flux.build_tiny_flux(tmp_path / "flux"), {"prompt_2": "a cat", "max_sequence_length": 64}
    encoder = tiny_sdxl.stretched(tiny_sdxl.text_encoder(tiny_flux.CLIP_WIDTH), 248)
    stock = loaded(FluxPipeline, folder)
    assert torch.equal(pooled(stock, PLAIN), pooled(stock, LATE)) and same_image(stock, **call)
    pipe = loaded(FluxPipeline, folder, text_encoder=encoder, tokenizer=tiny_tokenizer(248))
    assert not torch.equal(pooled(pipe, PLAIN), pooled(pipe, LATE)) and not same_image(pipe, **call)
    # what the pipeline calls pooled is the encoder's own output at the text's end
    alone = encoder(tiny_tokenizer(248)([LATE], return_tensors="pt").input_ids).pooler_output
    torch.testing.assert_close(pooled(pipe, LATE), alone, rtol=1e-5, atol=1e-5)


def sd3_encode(pipe, prompt):
    """Positions of the CLIPs, [1, 77 or 248, T5's width], and the pooled embedding."""
    embeds, _, pooled, _ = pipe.encode_prompt(prompt, None, None, max_sequence_length=64)
    return embeds[:, :-64], pooled


def test_sd3_reads_late_words_with_both_encoders_at_248(tmp_path):
    call = {"prompt_3": "a cat", "max_sequence_length": 64}  # the T5 cannot tell the prompts apart
    stock = loaded(StableDiffusion3Pipeline, folder := tiny_flux.build_tiny_sd3(tmp_path))
    assert all(map(torch.equal, sd3_encode(stock, PLAIN), sd3_encode(stock, LATE))) and same_image(stock, **call)
    first = stretch_text_encoder(stock.text_encoder, stock.tokenizer)
    second = stretch_text_encoder(stock.text_encoder_2, stock.tokenizer_2)
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipe = loaded(StableDiffusion3Pipeline, folder, **dict(zip(names, (*first, *second), strict=True)))
    (plain, pooled_plain), (late, pooled_late) = sd3_encode(pipe, PLAIN), sd3_encode(pipe, LATE)
    assert plain.shape == (1, 248, tiny_flux.T5_WIDTH)
    differs = plain != late
    first, second = tiny_flux.CLIP_WIDTH, tiny_flux.CLIP_WIDTH + tiny_sdxl.WIDTH_2
    # BOS, then token 120; under the causal mask nothing before it changes, and both encoders see it
    assert not differs[:, :121].any()
    assert differs[0, 121:, :first].any(-1).all() and differs[0, 121:, first:second].any(-1).all()
    for a, b in zip(*(pooled.split(tiny_flux.SD3_POOLED, -1) for pooled in (pooled_plain, pooled_late)), strict=True):
        assert not torch.equal(a, b)
    assert not same_image(pipe, **call)
