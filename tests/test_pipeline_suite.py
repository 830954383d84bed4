"""diffusers' checks of its SDXL from text, run on ours: with a prompt within 77 tokens, with a long one, or both.

Values are compared bit for bit with diffusers' class, which for a long prompt is given our embeddings
(tests/test_long_prompt.py compares those with a literal reading of the layout). What diffusers does after encoding is
checked with the long prompt only. Checks marked "all" are in tests/test_pipeline_family.py, for all our classes.

diffusers' check (its mixins, its SDXL file)           here
-----------------------------------------------------  -------------------------------------------------------------
pipeline_call_signature, IP-Adapter's signature        all: test_signatures_are_those_of_diffusers
components_function, StableDiffusionMixin_component    all: test_components
dict_tuple_outputs_equivalent, pt_np_pil_...           all: test_outputs
latents_input                                          test_latents_in_and_out
multi_vae                                              test_other_vaes
xl_euler, ays, negative_conditions                     test_arguments, test_ays_timesteps_and_sigmas_are_one_schedule
xl_multi_prompts                                       test_second_prompts
inference_batch_consistent                             all: test_batches_of_unequal_prompts
inference_batch_single_identical                       all: test_in_a_batch_as_alone; test_only_the_shared_length_...
num_images_per_prompt                                  test_images_per_prompt
cfg, turbo_512                                         test_guidance_scales, test_distilled_models_...
euler_lcm, euler_lcm_custom_timesteps                  test_lcm
callback_inputs, callback_cfg, pipeline_interrupt      all: test_callbacks_and_interrupt; test_callback_...
attention_slicing_forward_pass, vae_slicing,           test_settings
vae_tiling, layerwise_casting_inference
freeu, fused_qkv_projections                           test_settings, test_freeu_and_fused_projections_leave_nothing
karras_schedulers_shape                                test_schedulers
encode_prompt_works_in_isolation                       all: test_encoding_in_isolation; test_names_...
to_dtype, half_precision_inference_no_nan              test_to_dtype
from_pipe_consistent_config, ..._forward_pass          all: test_from_pipe; test_from_pipe_...
two_xl_mixture_of_denoiser, three_xl_mixture_...       test_pipelines_share_the_steps
ip_adapter, ip_adapter_cfg, _masks, _faceid            all: test_ip_adapter; test_ip_adapter_..., test_two_ip_adapters
save_load_local, xl_save_from_pretrained               test_saved_and_loaded, test_variants
save_load_optional_components                          test_optional_components_stay_away
save_load_float16                                      test_half_precision_is_kept_by_saving
dtype_dict, dtype_alias                                test_each_model_can_have_its_own_dtype
serialization_with_variants, loading_with_variants,    test_variants
loading_with_incorrect_variants
group_offloading_inference                             test_group_offload_of_each_model (on the CPU too)

With an accelerator only (what can be shown on a CPU is test_encoders_are_used_through_forward, for all):
to_device, float16_inference                           test_on_an_accelerator, test_float16_on_an_accelerator
sequential_cpu_offload_forward_pass, ..._twice,        test_cpu_offload
model_cpu_offload_forward_pass, ..._twice, offloads
pipeline_level_group_offloading_...                    test_group_offload_of_the_pipeline
pipeline_with_accelerator_device_map                   test_device_map
from_pipe_consistent_forward_pass_cpu_offload          test_from_pipe_under_offload

Not here: the LoRA mixins (the text encoders' half is in tests/test_long_prompt.py, the UNet's is diffusers' own),
xformers' attention and quantisation (packages of their own), torch.compile, the caching mixins (for denoisers that are
transformers), checks that fetch weights from a hub, and stored slices of pixel values, in whose place stands the
comparison with diffusers itself.
"""

import ast
import inspect
import logging
import textwrap

import numpy as np
import pytest
import torch
from diffusers import (
    AsymmetricAutoencoderKL,
    AutoencoderTiny,
    AutoPipelineForText2Image,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    schedulers,
)
from diffusers.callbacks import SDXLCFGCutoffCallback
from diffusers.hooks import apply_group_offloading
from diffusers.schedulers import AysSchedules, KarrasDiffusionSchedulers
from helpers import tiny_sdxl
from helpers.drawing import (
    DTYPE,
    EMBEDDINGS,
    LONG,
    OTHER,
    POSITIONS,
    PROMPTS,
    SHORT,
    TEXT_PARTS,
    aligned,
    draw,
    draw_as_diffusers,
    embed,
    generators,
    load,
    models,
    save_both,
    watched,
)
from helpers.tiny_sdxl import assemble, assemble_copy
from helpers.vocabulary import tiny_tokenizer

from debias_diffusion.pipelines import StableDiffusionXLLongPromptImg2ImgPipeline, StableDiffusionXLLongPromptPipeline

Stock, Ours = StableDiffusionXLPipeline, StableDiffusionXLLongPromptPipeline

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
needs_accelerator = pytest.mark.skipif(ACCELERATOR is None, reason="there is no accelerator on this machine")
DEVICES = ["cpu", pytest.param(str(ACCELERATOR), marks=needs_accelerator)]

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def parts():
    return tiny_sdxl.sdxl_parts()


@pytest.fixture(scope="module")
def stock(parts):
    """Not to be changed by a test, like `ours`."""
    return assemble(Stock, parts)


@pytest.fixture(scope="module")
def ours(parts):
    return assemble(Ours, parts)


@pytest.fixture
def own_stock(parts):
    """With copies of the models, to be changed."""
    return assemble_copy(Stock, parts)


@pytest.fixture
def own(parts):
    return assemble_copy(Ours, parts)


@pytest.fixture(params=PROMPTS.values(), ids=PROMPTS)
def prompt(request):
    return request.param


# ---- what comes out


def test_names_that_encode_prompt_returns():
    """diffusers' suite reads them from the source, and passes the results to the call under these names."""
    returns = [
        node.value
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(Ours.encode_prompt))))
        if isinstance(node, ast.Return)
    ]
    assert [[name.id for name in value.elts] for value in returns] == [list(EMBEDDINGS)]


def test_latents_in_and_out(ours):
    images = draw(ours, LONG)
    noise = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(0))
    assert np.array_equal(draw(ours, LONG, latents=noise, generator=None), images)
    latents = draw(ours, LONG, output_type="latent")
    assert latents.shape == (1, 4, 8, 8)
    decoded = ours.vae.decode(latents / ours.vae.config.scaling_factor).sample
    assert np.array_equal(ours.image_processor.postprocess(decoded, output_type="np"), images)


def test_other_vaes(parts):
    blocks = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 8}
    down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    asymmetric = AsymmetricAutoencoderKL(
        down_block_types=down,
        down_block_out_channels=blocks["block_out_channels"],
        up_block_types=up,
        up_block_out_channels=blocks["block_out_channels"],
        norm_num_groups=8,
        latent_channels=4,
    )
    tiny = AutoencoderTiny(encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4)
    for vae in (asymmetric.eval(), tiny.eval()):
        pipes = [assemble(cls, parts, vae=vae) for cls in (Stock, Ours)]
        for prompt in PROMPTS.values():
            images = draw(pipes[1], prompt)
            assert images.shape == (1, 64, 64, 3)
            assert np.array_equal(images, draw_as_diffusers(*pipes, prompt))


def test_progress_is_shown_and_nothing_else_said(stock, parts, caplog, capsys):
    # tokenizers say only once that a text is too long
    tokenizers = {"tokenizer": tiny_tokenizer(77), "tokenizer_2": tiny_tokenizer(77, pad_token="!")}
    pipe = assemble(Ours, parts, **tokenizers)
    pipe.set_progress_bar_config(disable=False)
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers", "debias_diffusion")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    try:
        draw(stock, LONG)
        assert "truncated" in caplog.text  # so it would be seen
        caplog.clear()
        capsys.readouterr()
        draw(pipe, LONG, negative_prompt=LONG, num_inference_steps=3)
    finally:
        for logger in loggers:
            logger.removeHandler(caplog.handler)
    assert caplog.records == []
    shown = capsys.readouterr()
    assert "3/3" in shown.err and shown.out == ""
    pipe.set_progress_bar_config(disable=True)
    draw(pipe, LONG)
    assert capsys.readouterr().err == ""


# ---- arguments of a call

NOISE = torch.Generator().manual_seed(3)
ARGUMENTS = {
    "three steps": {"num_inference_steps": 3},
    "guidance": {"guidance_scale": 9.0},
    "guidance_rescale": {"guidance_rescale": 0.7},
    "negative": {"negative_prompt": OTHER},
    "clip_skip": {"clip_skip": 1},
    "size": {"height": 96, "width": 64},
    "original_size": {"original_size": (512, 300)},
    "target_size": {"target_size": (1024, 700)},
    "crop": {"crops_coords_top_left": (10, 200)},
    "negative conditions": {"negative_original_size": (512, 512), "negative_target_size": (1024, 1024)},
    "timesteps": {"num_inference_steps": None, "timesteps": [900, 500, 100]},
    "sigmas": {"num_inference_steps": None, "sigmas": [14.0, 3.0, 0.5]},
    "denoising_end": {"num_inference_steps": 4, "denoising_end": 0.5},
    "latents": {"latents": torch.randn((1, 4, 8, 8), generator=NOISE)},
}


@pytest.mark.parametrize("call", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(stock, ours, prompt, call):
    call = {"prompt": prompt, **call}
    images = draw(ours, **call)
    assert np.array_equal(images, draw_as_diffusers(stock, ours, **call))
    plain = draw(ours, call["prompt"])
    assert images.shape != plain.shape or np.abs(images - plain).max() > 1e-4


def test_ays_timesteps_and_sigmas_are_one_schedule(ours):
    by_timesteps, by_sigmas = (
        draw(ours, LONG, num_inference_steps=None, **{name: AysSchedules[f"StableDiffusionXL{name.capitalize()}"]})
        for name in ("timesteps", "sigmas")
    )
    assert np.abs(by_timesteps - by_sigmas).max() < 1e-3


def test_eta(parts):
    scheduler = DDIMScheduler.from_config(parts["scheduler"].config)
    pipes = [assemble(cls, parts, scheduler=scheduler) for cls in (Stock, Ours)]
    images = draw(pipes[1], LONG, eta=0.8)
    assert np.array_equal(images, draw_as_diffusers(*pipes, LONG, eta=0.8))
    assert np.abs(images - draw(pipes[1], LONG)).max() > 1e-4


BAD_CALLS = {
    "prompt and embeddings": {"prompt": SHORT, "prompt_embeds": torch.zeros(1, 77, 72)},
    "neither": {},
    "embeddings without pooled": {"prompt_embeds": torch.zeros(1, 77, 72)},
    "unequal lengths": {
        "prompt_embeds": torch.zeros(1, 152, 72),
        "pooled_prompt_embeds": torch.zeros(1, 24),
        "negative_prompt_embeds": torch.zeros(1, 77, 72),
        "negative_pooled_prompt_embeds": torch.zeros(1, 24),
    },
    "prompt of a wrong type": {"prompt": 3},
    "size": {"prompt": SHORT, "height": 65},
    "callback's tensors": {"prompt": SHORT, "callback_on_step_end_tensor_inputs": ["noise"]},
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_are_refused_as_in_diffusers(stock, ours, call):
    with pytest.raises(ValueError) as expected:
        stock(**call)
    with pytest.raises(ValueError) as refused:
        ours(**call)
    assert str(refused.value) == str(expected.value)


def test_second_prompts(stock, ours, prompt):
    assert np.array_equal(draw(ours, prompt, prompt_2=prompt), draw(ours, prompt))
    call = {"prompt_2": OTHER, "negative_prompt": "blurry"}
    images = draw(ours, prompt, **call)
    assert np.array_equal(images, draw_as_diffusers(stock, ours, prompt, **call))
    assert not np.array_equal(images, draw(ours, prompt, negative_prompt="blurry"))
    assert np.array_equal(draw(ours, prompt, negative_prompt_2="blurry", **call), images)
    other = draw(ours, prompt, negative_prompt_2=prompt, **call)
    assert np.array_equal(other, draw_as_diffusers(stock, ours, prompt, negative_prompt_2=prompt, **call))
    assert not np.array_equal(other, images)


# ---- batches


@pytest.mark.parametrize("window", [77, 248])
def test_only_the_shared_length_counts(parts, window):
    """A short prompt beside a long one has its own text's embeddings, on more positions."""
    pipe = assemble(Ours, parts, text_encoder=tiny_sdxl.stretched(parts["text_encoder"], window))
    alone, _, pooled, _ = pipe.encode_prompt(SHORT)
    embeds, _, pooled_in_batch, _ = pipe.encode_prompt([SHORT, LONG])
    assert alone.shape[1] == 77 and embeds.shape[1] == 152
    torch.testing.assert_close(embeds[:1, :77], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pooled_in_batch[:1], pooled, rtol=1e-5, atol=1e-5)
    # and where something else already asks for that length, the picture is the one it draws alone
    negative = LONG.replace("cat", "dog")
    image = draw(pipe, SHORT, negative_prompt=negative)[0]
    images = draw(pipe, [SHORT, LONG], negative_prompt=[negative] * 2, generator=generators(2))
    assert np.abs(images[0] - image).max() < 1e-4
    assert np.abs(images[0] - draw(pipe, OTHER, negative_prompt=negative)[0]).max() > 1e-3


def test_images_per_prompt(stock, ours, prompt):
    prompts = [prompt, prompt.replace("red", "green")]
    call = {"negative_prompt": ["grey"] * 2, "num_images_per_prompt": 2}
    images = draw(ours, prompts, generator=generators(4), **call)
    assert len(images) == 4
    if prompt == SHORT:
        assert np.array_equal(images, draw(stock, prompts, generator=generators(4), **call))
    repeated = [text for text in prompts for _ in range(2)]
    assert np.abs(images - draw(ours, repeated, generator=generators(4), negative_prompt=["grey"] * 4)).max() < 1e-4


# ---- guidance


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5])
def test_guidance_scales(stock, ours, prompt, scale):
    with watched(ours) as seen:
        images = draw(ours, prompt, guidance_scale=scale)
    assert seen == [(2 if scale > 1 else 1, POSITIONS[prompt])] * 2
    assert np.array_equal(images, draw_as_diffusers(stock, ours, prompt, guidance_scale=scale))


TRAILING = {
    "turbo": (EulerAncestralDiscreteScheduler, {"num_inference_steps": 1, "guidance_scale": 0.0}),
    "lightning": (EulerDiscreteScheduler, {"num_inference_steps": 4, "guidance_scale": 0.0}),
}


@pytest.mark.parametrize(("scheduler", "call"), TRAILING.values(), ids=TRAILING)
def test_distilled_models_and_a_negative_prompt_that_is_not_used(parts, prompt, scheduler, call):
    scheduler = scheduler.from_config(parts["scheduler"].config, timestep_spacing="trailing")
    pipes = [assemble(cls, parts, scheduler=scheduler) for cls in (Stock, Ours)]
    with watched(pipes[1]) as seen:
        images = draw(pipes[1], prompt, negative_prompt=LONG + LONG, negative_prompt_2=LONG + LONG, **call)
    assert seen == [(1, POSITIONS[prompt])] * call["num_inference_steps"]
    assert np.array_equal(images, draw(pipes[1], prompt, **call))
    assert np.array_equal(images, draw_as_diffusers(*pipes, prompt, **call))


@pytest.mark.parametrize("call", [{}, {"num_inference_steps": None, "timesteps": [999, 499]}])
def test_lcm(parts, prompt, call):
    """Its UNet reads the guidance scale instead of a negative prompt."""
    scheduler = LCMScheduler.from_config(parts["scheduler"].config)
    unet = tiny_sdxl.unet(time_cond_proj_dim=256)
    pipes = [assemble(cls, parts, unet=unet, scheduler=scheduler) for cls in (Stock, Ours)]
    with watched(pipes[1]) as seen:
        images = draw(pipes[1], prompt, guidance_scale=8.0, negative_prompt=LONG + LONG, **call)
    assert seen == [(1, POSITIONS[prompt])] * 2
    assert np.array_equal(images, draw_as_diffusers(*pipes, prompt, guidance_scale=8.0, **call))
    assert np.abs(images - draw(pipes[1], prompt, guidance_scale=2.0, **call)).max() > 1e-6


# ---- callbacks


def test_callback_changes_latents(ours):
    def clear(pipe, step, timestep, tensors):
        if step == pipe.num_timesteps - 1:
            tensors["latents"] = torch.zeros_like(tensors["latents"])
        return tensors

    latents = draw(ours, LONG, callback_on_step_end=clear, output_type="latent")
    assert latents.shape == (1, 4, 8, 8) and not latents.any()


def test_callback_raises_guidance(ours):
    def raise_scale(pipe, step, timestep, tensors):
        pipe._guidance_scale += 1
        return tensors

    images = draw(ours, LONG, guidance_scale=2.0, callback_on_step_end=raise_scale)
    assert ours.guidance_scale == 4.0
    assert not np.array_equal(images, draw(ours, LONG, guidance_scale=2.0))


@pytest.mark.parametrize("later", [OTHER, LONG.replace("bicycle", "tractor")], ids=["short", "long"])
def test_callback_changes_the_prompt(stock, ours, prompt, later):
    """Also to one of another length."""
    embeds = embed(ours, later, negative_prompt="grey")
    guided = torch.cat([embeds["negative_prompt_embeds"], embeds["prompt_embeds"]])

    def change(pipe, step, timestep, tensors):
        return {**tensors, "prompt_embeds": guided} if step == 0 else tensors

    call = {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    with watched(ours) as seen:
        images = draw(ours, prompt, negative_prompt="grey", **call)
    assert seen == [(2, POSITIONS[prompt]), (2, guided.shape[1])]
    assert np.array_equal(images, draw_as_diffusers(stock, ours, prompt, negative_prompt="grey", **call))
    assert not np.array_equal(images, draw(ours, prompt, negative_prompt="grey"))


def test_callback_ends_guidance(stock, ours, prompt):
    """diffusers' own callback for it, which keeps the conditional row of the embeddings."""
    call = {"num_inference_steps": 3, "callback_on_step_end": SDXLCFGCutoffCallback(None, cutoff_step_index=0)}
    with watched(ours) as seen:
        images = draw(ours, prompt, negative_prompt="grey", **call)
    assert seen == [(2, POSITIONS[prompt]), *[(1, POSITIONS[prompt])] * 2]
    assert np.array_equal(images, draw_as_diffusers(stock, ours, prompt, negative_prompt="grey", **call))


# ---- settings of a pipeline


def cast_layers(pipe):
    pipe.to(dtype=torch.bfloat16)
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    assert torch.float8_e4m3fn in {weight.dtype for weight in pipe.unet.parameters()}


def tile(pipe):
    pipe.vae.enable_tiling()
    # or these pictures would be one tile
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 32, 4


# what is done, and how far the image may and must move from the plain one
SETTINGS = {
    "attention in slices": (lambda pipe: pipe.enable_attention_slicing(), 0, 1e-3),
    "VAE in slices": (lambda pipe: pipe.vae.enable_slicing(), 0, 1e-2),
    "VAE in tiles": (tile, 1e-4, 1),
    "FreeU": (lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4), 1e-4, 1),
    "fused projections": (lambda pipe: pipe.fuse_qkv_projections(), 0, 1e-2),
    "plain attention": (lambda pipe: pipe.unet.set_default_attn_processor(), 0, 1e-3),
    "channels last": (lambda pipe: pipe.unet.to(memory_format=torch.channels_last), 0, 1e-3),
    "float8 layers": (cast_layers, 1e-4, 1),
}


@pytest.mark.parametrize(("change", "least", "most"), SETTINGS.values(), ids=SETTINGS)
def test_settings(own_stock, own, change, least, most):
    prompts = [LONG, LONG.replace("red", "green")]
    plain = draw(own, prompts)
    change(own_stock), change(own)
    images = draw(own, prompts)
    assert np.isfinite(images).all()
    assert np.array_equal(images, draw(own_stock, **embed(own, prompts)))
    assert least <= np.abs(images - plain).max() <= most


def test_freeu_and_fused_projections_leave_nothing(own):
    plain = draw(own, LONG)
    own.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    own.disable_freeu()
    assert all(getattr(block, key) is None for block in own.unet.up_blocks for key in ("s1", "s2", "b1", "b2"))
    own.fuse_qkv_projections()
    assert all(type(processor).__name__.startswith("Fused") for processor in own.unet.attn_processors.values())
    own.unfuse_qkv_projections()
    assert np.array_equal(draw(own, LONG), plain)


# needs a package of its own
SCHEDULERS = [kind.name for kind in KarrasDiffusionSchedulers if kind.name != "DPMSolverSDEScheduler"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(parts, name):
    # PNDM's warm-up asks for more steps
    settings = {"skip_prk_steps": True} if name == "PNDMScheduler" else {}
    scheduler = getattr(schedulers, name).from_config(parts["scheduler"].config, **settings)
    pipes = [assemble(cls, parts, scheduler=scheduler) for cls in (Stock, Ours)]
    images = draw(pipes[1], LONG, num_inference_steps=3)
    assert images.shape == (1, 64, 64, 3)
    assert np.array_equal(images, draw_as_diffusers(*pipes, LONG, num_inference_steps=3))


# ---- dtypes


def start_noise(pipe):
    """In half precision some versions of PyTorch draw other numbers from the same seed."""
    unet = pipe.unet.config
    shape = (1, unet.in_channels, unet.sample_size, unet.sample_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_to_dtype(own_stock, own, prompt, dtype):
    noise = start_noise(own)
    plain = draw(own, prompt, latents=noise)
    for pipe in (own_stock, own):
        pipe.to(dtype=dtype)
        assert pipe.dtype == dtype and all(part.dtype == dtype for part in models(pipe).values())
    assert all(value.dtype == dtype for value in embed(own, prompt).values())
    images = draw(own, prompt, latents=noise.to(dtype))
    assert np.isfinite(images).all()
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, prompt, latents=noise.to(dtype)))
    assert np.abs(images - plain).max() < 0.1


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
def test_each_encoder_can_have_its_own_dtype(own_stock, own, prompt, name):
    """The embeddings have the second one's."""
    for pipe in (own_stock, own):
        pipe.components[name].to(torch.bfloat16)
    embeds = own.encode_prompt(prompt, negative_prompt="grey")
    assert {value.dtype for value in embeds} == {own.text_encoder_2.dtype}
    if prompt == SHORT:
        assert all(map(torch.equal, embeds, own_stock.encode_prompt(prompt, negative_prompt="grey")))


# ---- from one class to another


def test_from_pipe_keeps_the_configuration(own_stock, ours):
    own_stock.register_to_config(force_zeros_for_empty_prompt=False)
    there = Ours.from_pipe(own_stock)
    there.set_progress_bar_config(disable=True)
    for pipe in (there, Stock.from_pipe(there)):
        assert {k: v for k, v in pipe.config.items() if k[0] != "_"} == {
            k: v for k, v in own_stock.config.items() if k[0] != "_"
        }
    # without zeros an absent negative prompt is an empty one, and counts no more than that
    assert np.array_equal(draw(there, SHORT), draw(own_stock, SHORT))
    assert not np.array_equal(draw(there, SHORT), draw(ours, SHORT))
    replaced = Ours.from_pipe(own_stock, text_encoder=tiny_sdxl.stretched(own_stock.text_encoder, 248))
    assert replaced.prompt_layout(LONG).chunks == (1, 3)


def test_from_pipe_casts_to_float32_unless_told(own_stock, prompt):
    """diffusers' own way: and as the models are shared, the pipeline it came from is cast with it."""
    own_stock.to(dtype=torch.bfloat16)
    kept = Ours.from_pipe(own_stock, **{DTYPE: torch.bfloat16})
    assert {part.dtype for part in models(own_stock).values()} == {torch.bfloat16} == {kept.dtype}
    kept.set_progress_bar_config(disable=True)
    images = draw(kept, prompt)
    assert np.array_equal(images, draw_as_diffusers(own_stock, kept, prompt))
    cast = Ours.from_pipe(own_stock)
    assert {part.dtype for part in models(own_stock).values()} == {torch.float32} == {cast.dtype}


def test_from_pipe_between_our_own(own):
    painter = StableDiffusionXLLongPromptImg2ImgPipeline.from_pipe(own)
    painter.set_progress_bar_config(disable=True)
    call = {"image": tiny_sdxl.picture(), "strength": 0.8, "num_inference_steps": 3}
    plain = StableDiffusionXLImg2ImgPipeline.from_pipe(own)
    plain.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(painter, LONG, **call), draw_as_diffusers(plain, painter, LONG, **call))
    back = Ours.from_pipe(painter)
    back.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(back, LONG), draw(own, LONG))


# ---- several pipelines, one after the other


def share_steps(pipes, prompt, splits, steps):
    """The image of pipelines that each do a part of the steps, and the timesteps that each did."""
    done = [[] for _ in pipes]
    bounds = [0, *splits, 1]
    image = None
    for pipe, own, start, end in zip(pipes, done, bounds, bounds[1:], strict=False):

        def note(pipe, step, timestep, tensors, own=own):
            own.append(round(timestep.item()))
            return tensors

        call = {"denoising_end": end} if end < 1 else {}
        call |= {"denoising_start": start, "image": image} if start > 0 else {}
        image = draw(
            pipe,
            num_inference_steps=steps,
            callback_on_step_end=note,
            output_type="latent" if end < 1 else "np",
            **(prompt if isinstance(prompt, dict) else {"prompt": prompt}),
            **call,
        )
    return image, done


MIXTURES = [
    (HeunDiscreteScheduler, [0.7], [[751, 501, 501], [501, 251, 251, 1, 1]]),
    (EulerDiscreteScheduler, [0.3, 0.7], [[751], [501], [251, 1]]),
]


@pytest.mark.parametrize(("scheduler", "splits", "timesteps"), MIXTURES)
def test_pipelines_share_the_steps(parts, scheduler, splits, timesteps):
    scheduler = scheduler.from_config(parts["scheduler"].config)
    painters = [StableDiffusionXLImg2ImgPipeline, StableDiffusionXLLongPromptImg2ImgPipeline]
    stock, ours = (
        [assemble(cls, parts, scheduler=scheduler) for cls in [first] + [painter] * len(splits)]
        for first, painter in zip([Stock, Ours], painters, strict=True)
    )
    image, done = share_steps(ours, LONG, splits, steps=4)
    assert done == timesteps
    expected, _ = share_steps(stock, embed(ours[0], LONG), splits, steps=4)
    assert np.array_equal(image, expected)


# ---- IP-Adapter


def load_adapters(pipe, *adapters):
    none = [None] * len(adapters)
    pipe.load_ip_adapter(list(adapters), subfolder=none, weight_name=none, image_encoder_folder=None)


def image_embeds(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_two_ip_adapters(own_stock, own):
    plain = draw(own, LONG)
    adapters = [tiny_sdxl.ip_adapter(own.unet, seed=seed) for seed in range(2)]
    for pipe in (own_stock, own):
        load_adapters(pipe, *adapters)
        pipe.set_ip_adapter_scale([1.0, 1.0])
    call = {"ip_adapter_image_embeds": [image_embeds(2, 1, 24)] * 2}
    images = draw(own, LONG, **call)
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, LONG, **call))
    assert np.abs(images - plain).max() > 1e-3
    own.set_ip_adapter_scale([0.0, 0.0])
    assert np.abs(draw(own, LONG, **call) - plain).max() < 1e-4
    own.unload_ip_adapter()
    assert np.array_equal(draw(own, LONG), plain)


def test_ip_adapter_reads_a_picture(parts):
    reading = {"image_encoder": tiny_sdxl.image_encoder(), "feature_extractor": tiny_sdxl.feature_extractor()}
    pipes = [assemble_copy(cls, parts, **reading) for cls in (Stock, Ours)]
    for pipe in pipes:
        load_adapters(pipe, tiny_sdxl.ip_adapter(pipe.unet))
    images = draw(pipes[1], LONG, ip_adapter_image=tiny_sdxl.picture(0))
    assert np.array_equal(images, draw_as_diffusers(*pipes, LONG, ip_adapter_image=tiny_sdxl.picture(0)))
    assert not np.array_equal(images, draw(pipes[1], LONG, ip_adapter_image=tiny_sdxl.picture(1)))


MASK = torch.zeros(1, 1, 64, 64).index_fill(3, torch.arange(32), 1.0)
ADAPTED = {
    "without guidance": {"ip_adapter_image_embeds": [image_embeds(1, 1, 24)], "guidance_scale": 1.0},
    "masked": {
        "ip_adapter_image_embeds": [image_embeds(2, 1, 24)],
        "cross_attention_kwargs": {"ip_adapter_masks": [MASK]},
    },
}


@pytest.mark.parametrize("call", ADAPTED.values(), ids=ADAPTED)
def test_ip_adapter_calls(own_stock, own, call):
    for pipe in (own_stock, own):
        load_adapters(pipe, tiny_sdxl.ip_adapter(pipe.unet))
    images = draw(own, LONG, **call)
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, LONG, **call))
    plain = draw(own, LONG, ip_adapter_image_embeds=[image_embeds(2, 1, 24)])
    assert np.abs(images - plain).max() > 1e-3


def test_ip_adapter_of_a_face(own_stock, own):
    plain = draw(own, LONG)
    for pipe in (own_stock, own):
        # not through `load_ip_adapter`, which looks for the LoRA layers that the published files have
        pipe.unet._load_ip_adapter_weights(tiny_sdxl.ip_adapter(pipe.unet, face=True))
    call = {"ip_adapter_image_embeds": [image_embeds(2, 1, 1, 24)]}
    images = draw(own, LONG, **call)
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, LONG, **call))
    assert np.abs(images - plain).max() > 1e-3
    own.set_ip_adapter_scale(0.0)
    assert np.abs(draw(own, LONG, **call) - plain).max() < 1e-4


# ---- saved and loaded


@pytest.fixture(scope="module")
def saved(stock, ours, tmp_path_factory):
    return save_both(stock, ours, tmp_path_factory.mktemp("saved"))


def test_saved_and_loaded(ours, parts, tmp_path):
    own = assemble(Ours, parts, force_zeros_for_empty_prompt=False)
    own.save_pretrained(tmp_path)
    again, automatic = (aligned(load(cls, tmp_path)) for cls in (Ours, AutoPipelineForText2Image))
    for prompt in PROMPTS.values():
        assert np.array_equal(draw(again, prompt), draw(own, prompt))
    assert not np.array_equal(draw(again, SHORT), draw(ours, SHORT))
    assert type(automatic) is Stock
    assert np.array_equal(draw(automatic, SHORT), draw(own, SHORT))


OPTIONAL = {
    "both encoders": TEXT_PARTS,
    "all that diffusers lists": tuple(Stock._optional_components),
}


@pytest.mark.parametrize("absent", OPTIONAL.values(), ids=OPTIONAL)
def test_optional_components_stay_away(parts, tmp_path, absent):
    assert set(absent) <= set(Ours._optional_components)
    own = assemble(Ours, parts)
    embeds = embed(own, LONG)
    expected = draw(own, LONG)
    for name in absent:
        setattr(own, name, None)
    assert np.array_equal(draw(own, **embeds), expected)
    own.save_pretrained(tmp_path)
    again = load(Ours, tmp_path)
    assert {name for name, part in again.components.items() if part is None} >= set(absent)
    assert np.array_equal(draw(again, **embeds), expected)
    if "text_encoder_2" in absent:
        with pytest.raises(ValueError, match="text_encoder_2"):
            draw(again, LONG)


def test_half_precision_is_kept_by_saving(own, tmp_path):
    own.to(dtype=torch.float16)
    own.save_pretrained(tmp_path)
    again = load(Ours, tmp_path, **{DTYPE: torch.float16})
    assert {part.dtype for part in models(again).values()} == {torch.float16}
    assert np.array_equal(draw(own, LONG), draw(again, LONG))


def test_each_model_can_have_its_own_dtype(ours, saved):
    dtypes = {"vae": torch.float32, "default": torch.bfloat16}
    again = load(Ours, saved, **{DTYPE: dtypes})
    assert {name: part.dtype for name, part in models(again).items()} == {
        name: dtypes.get(name, torch.bfloat16) for name in models(ours)
    }
    assert embed(again, LONG)["prompt_embeds"].dtype == torch.bfloat16


def test_variants(own, saved, tmp_path):
    own.to(dtype=torch.bfloat16).save_pretrained(tmp_path, variant="bf16")
    weights = [path.name for path in tmp_path.rglob("*.safetensors")]
    assert len(weights) == len(models(own)) and all(".bf16." in name for name in weights)
    again = load(Ours, tmp_path, variant="bf16", **{DTYPE: torch.bfloat16})
    for name, part in models(own).items():
        state = again.components[name].state_dict()
        assert all(torch.equal(state[key], value) for key, value in part.state_dict().items())
    with pytest.raises((ValueError, OSError), match="variant"):
        load(Ours, saved, variant="bf16")


# ---- models that are not where they run


@needs_accelerator
@pytest.mark.parametrize(("kind", "place"), [("sequential", "meta"), ("model", "cpu")])
def test_cpu_offload(own, prompt, kind, place):
    expected = draw(own.to(ACCELERATOR), prompt)
    for _ in range(2):
        getattr(own, f"enable_{kind}_cpu_offload")(device=ACCELERATOR)
        assert own._execution_device.type == ACCELERATOR.type
        assert np.abs(draw(own, prompt) - expected).max() < 1e-3
        assert {part.device.type for part in models(own).values()} == {place}
        assert kind == "sequential" or all(hasattr(part, "_hf_hook") for part in models(own).values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", [{"offload_type": "block_level", "num_blocks_per_group": 1}, {"offload_type": "leaf_level"}]
)
def test_group_offload_of_each_model(own, device, kind):
    expected = draw(own.to(device), LONG)
    own.to("cpu")
    for part in (own.text_encoder, own.text_encoder_2, own.unet):
        apply_group_offloading(part, onload_device=torch.device(device), offload_device=torch.device("cpu"), **kind)
    own.vae.to(device)
    assert np.abs(draw(own, LONG) - expected).max() < 1e-3


@needs_accelerator
def test_group_offload_of_the_pipeline(own, parts, prompt):
    expected = draw(own.to(ACCELERATOR), prompt)
    pipe = assemble_copy(Ours, parts)
    pipe.enable_group_offload(
        onload_device=ACCELERATOR,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        exclude_modules=["vae"],
    )
    assert pipe.vae.device.type == ACCELERATOR.type
    assert {weight.device.type for weight in pipe.text_encoder.parameters()} == {"cpu"}
    assert np.abs(draw(pipe, prompt) - expected).max() < 1e-3


@needs_accelerator
def test_from_pipe_under_offload(own_stock, own, prompt):
    own.enable_model_cpu_offload(device=ACCELERATOR)
    pipe = Ours.from_pipe(own_stock)
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_model_cpu_offload(device=ACCELERATOR)
    assert np.abs(draw(pipe, prompt) - draw(own, prompt)).max() < 1e-3


@needs_accelerator
def test_device_map(own, prompt, tmp_path):
    own.save_pretrained(tmp_path)
    expected = draw(own.to(ACCELERATOR), prompt)
    pipe = load(Ours, tmp_path, device_map=ACCELERATOR.type)
    assert np.abs(draw(pipe, prompt) - expected).max() < 1e-3


@needs_accelerator
def test_on_an_accelerator(own_stock, own, prompt):
    on_cpu = draw(own, prompt)
    for pipe in (own_stock, own):
        pipe.to(ACCELERATOR)
        assert {part.device.type for part in models(pipe).values()} == {ACCELERATOR.type}
    assert all(value.device.type == ACCELERATOR.type for value in embed(own, prompt).values())
    images = draw(own, prompt)
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, prompt))
    assert np.abs(images - on_cpu).max() < 1e-2


@needs_accelerator
def test_float16_on_an_accelerator(own, prompt):
    noise = start_noise(own)
    images = draw(own.to(ACCELERATOR), prompt, latents=noise).ravel()
    half = draw(own.to(dtype=torch.float16), prompt, latents=noise.half()).ravel()
    assert np.dot(images, half) / np.linalg.norm(images) / np.linalg.norm(half) > 0.95
