"""diffusers' checks of its SDXL from text, run on ours: with a prompt within 77 tokens, with a long one, or both.

Values are compared bit for bit with diffusers' class, which for a long prompt is given our embeddings
(tests/test_long_prompt.py compares those with a literal reading of the layout). What diffusers does after encoding is
checked with the long prompt only, and what all our classes must do in tests/test_pipeline_family.py: signatures,
components, outputs, batches, callbacks and interrupts, encoding in isolation, from_pipe, IP-Adapter.

Not here: the LoRA mixins (the text encoders' half is in tests/test_long_prompt.py, the UNet's is diffusers' own),
xformers' attention and quantisation (packages of their own), torch.compile, the caching mixins (for denoisers that are
transformers), checks that fetch weights from a hub, further schedulers and IP-Adapters (they take one path), and stored
slices of pixel values, in whose place stands the comparison with diffusers itself.
"""

import ast
import inspect
import logging
import textwrap
from itertools import pairwise

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
    PNDMScheduler,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UniPCMultistepScheduler,
)
from diffusers.callbacks import SDXLCFGCutoffCallback
from diffusers.hooks import apply_group_offloading
from diffusers.schedulers import AysSchedules
from helpers import tiny_sdxl
from helpers.draw import (
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
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(Ours.encode_prompt))))
    returns = [node.value for node in nodes if isinstance(node, ast.Return)]
    assert [[name.id for name in value.elts] for value in returns] == [list(EMBEDDINGS)]


def test_latents_in_and_out(ours):
    images = draw(ours, LONG)
    noise = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(0))
    assert np.array_equal(draw(ours, LONG, latents=noise, generator=None), images)
    latents = draw(ours, LONG, output_type="latent")
    assert latents.shape == (1, 4, 8, 8)
    decoded = ours.vae.decode(latents / ours.vae.config.scaling_factor).sample
    assert np.array_equal(ours.image_processor.postprocess(decoded, output_type="np"), images)


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


# ---- calls


def asymmetric_vae():
    down, up, sizes = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4, (8, 8, 16, 16)
    blocks = {"down_block_types": down, "down_block_out_channels": sizes, "up_block_out_channels": sizes}
    return AsymmetricAutoencoderKL(**blocks, up_block_types=up, norm_num_groups=8, latent_channels=4).eval()


def tiny_vae():
    return AutoencoderTiny(encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4).eval()


def scheduler(cls, **settings):
    return {"scheduler": cls.from_config(tiny_sdxl.sdxl_parts()["scheduler"].config, **settings)}


def lcm():
    """Its UNet reads the guidance scale instead of a negative prompt."""
    return scheduler(LCMScheduler) | {"unet": tiny_sdxl.unet(time_cond_proj_dim=256)}


NOISE = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(3))
UNUSED = {"negative_prompt": LONG + LONG}  # where nothing is guided: it does not count for the length
NO_STEPS = {"num_inference_steps": None}
# by name: whether encoding is affected, so that a short prompt is tried too; other parts; the call
CALLS = {
    "three steps": (False, dict, {"num_inference_steps": 3}),
    "guidance": (False, dict, {"guidance_scale": 9.0}),
    "guidance of 1.5": (True, dict, {"guidance_scale": 1.5}),
    "no guidance": (True, dict, {"guidance_scale": 1.0} | UNUSED),
    "guidance of 0": (False, dict, {"guidance_scale": 0.0}),
    "guidance_rescale": (False, dict, {"guidance_rescale": 0.7}),
    "negative": (True, dict, {"negative_prompt": OTHER}),
    "prompt_2": (True, dict, {"prompt_2": OTHER, "negative_prompt": "blurry"}),
    "negative_prompt_2": (True, dict, {"negative_prompt": "blurry", "negative_prompt_2": LONG}),
    "clip_skip": (True, dict, {"clip_skip": 1}),
    "size": (False, dict, {"height": 96, "width": 64}),
    "original_size": (False, dict, {"original_size": (512, 300)}),
    "target_size": (False, dict, {"target_size": (1024, 700)}),
    "crop": (False, dict, {"crops_coords_top_left": (10, 200)}),
    "negative sizes": (False, dict, {"negative_original_size": (512, 512), "negative_target_size": (1024, 1024)}),
    "timesteps": (False, dict, {"timesteps": [900, 500, 100]} | NO_STEPS),
    "sigmas": (False, dict, {"sigmas": [14.0, 3.0, 0.5]} | NO_STEPS),
    "denoising_end": (False, dict, {"num_inference_steps": 4, "denoising_end": 0.5}),
    "latents": (False, dict, {"latents": NOISE}),
    "eta": (False, lambda: scheduler(DDIMScheduler), {"eta": 0.8}),
    "UniPC": (False, lambda: scheduler(UniPCMultistepScheduler), {"num_inference_steps": 3}),
    "PNDM": (False, lambda: scheduler(PNDMScheduler, skip_prk_steps=True), {"num_inference_steps": 3}),
    "turbo": (
        *(True, lambda: scheduler(EulerAncestralDiscreteScheduler, timestep_spacing="trailing")),
        {"num_inference_steps": 1, "guidance_scale": 0.0} | UNUSED,
    ),
    "LCM": (True, lcm, {"guidance_scale": 8.0} | UNUSED),
    "LCM's timesteps": (False, lcm, {"guidance_scale": 8.0, "timesteps": [999, 499]} | NO_STEPS),
    "asymmetric VAE": (False, lambda: {"vae": asymmetric_vae()}, {}),
    "tiny VAE": (False, lambda: {"vae": tiny_vae()}, {}),
}
CASES = [(name, text) for name, (encoded, *_) in CALLS.items() for text in (PROMPTS if encoded else ["long"])]


@pytest.mark.parametrize(("name", "text"), CASES, ids=" ".join)
def test_a_call_draws_what_diffusers_draws(parts, ours, name, text):
    _, changed_parts, call = CALLS[name]
    prompt, changed = PROMPTS[text], changed_parts()
    pipes = [assemble(cls, parts, **changed) for cls in (Stock, Ours)]
    with watched(pipes[1]) as seen:
        images = draw(pipes[1], prompt, **call)
    expected = {key: value for key, value in call.items() if not UNUSED.items() <= call.items() or key not in UNUSED}
    assert np.array_equal(images, draw_as_diffusers(*pipes, prompt, **expected))
    assert seen[0][1] == max(POSITIONS[prompt], POSITIONS.get(call.get("negative_prompt_2"), 77))
    plain = draw(ours, prompt)
    assert images.shape != plain.shape or np.abs(images - plain).max() > 1e-4


def test_ays_timesteps_and_sigmas_are_one_schedule(ours):
    names = ("timesteps", "sigmas")
    calls = [{name: AysSchedules[f"StableDiffusionXL{name.capitalize()}"]} | NO_STEPS for name in names]
    by_timesteps, by_sigmas = (draw(ours, LONG, **call) for call in calls)
    assert np.abs(by_timesteps - by_sigmas).max() < 1e-3


EMBEDS = {"prompt_embeds": torch.zeros(1, 152, 72), "pooled_prompt_embeds": torch.zeros(1, 24)}
BAD_CALLS = {
    "prompt and embeddings": {"prompt": SHORT, **EMBEDS},
    "neither": {},
    "embeddings without pooled": {"prompt_embeds": torch.zeros(1, 77, 72)},
    "unequal lengths": EMBEDS | {"negative_prompt_embeds": torch.zeros(1, 77, 72)},
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


# ---- batches


@pytest.mark.parametrize("positions", [77, 248])
def test_only_the_shared_length_counts(parts, positions):
    """A short prompt beside a long one has its own text's embeddings, on more positions."""
    pipe = assemble(Ours, parts, text_encoder=tiny_sdxl.stretched(parts["text_encoder"], positions))
    alone, _, pooled, _ = pipe.encode_prompt(SHORT)
    embeds, _, pooled_in_batch, _ = pipe.encode_prompt([SHORT, LONG])
    assert alone.shape[1] == 77 and embeds.shape[1] == 152
    torch.testing.assert_close(embeds[:1, :77], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pooled_in_batch[:1], pooled, rtol=1e-5, atol=1e-5)
    # and where something else already asks for that length, the image is the one it draws alone
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


# ---- callbacks


def test_callbacks_change_latents_and_guidance(ours):
    def change(pipe, step, timestep, tensors):
        pipe._guidance_scale += 1
        return {"latents": tensors["latents"] * (step < pipe.num_timesteps - 1)}

    latents = draw(ours, LONG, guidance_scale=2.0, callback_on_step_end=change, output_type="latent")
    assert latents.shape == (1, 4, 8, 8) and not latents.any() and ours.guidance_scale == 4.0


@pytest.mark.parametrize("later", [OTHER, LONG.replace("bicycle", "tractor")], ids=["short", "long"])
def test_a_callback_changes_the_prompt_to_one_of_any_length(stock, ours, prompt, later):
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


def test_a_callback_ends_guidance(stock, ours, prompt):
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
    # or these images would be one tile
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 32, 4


# what is done, and how far the image may and must move from the plain one
SETTINGS = {
    "attention in slices": (lambda pipe: pipe.enable_attention_slicing(), 0, 1e-3),
    "VAE in tiles": (tile, 1e-4, 1),
    "FreeU": (lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4), 1e-4, 1),
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


# ---- dtypes


def start_noise(pipe):
    """In half precision some versions of PyTorch draw other numbers from the same seed."""
    unet = pipe.unet.config
    shape = (1, unet.in_channels, unet.sample_size, unet.sample_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_to_dtype_and_saved_in_it(own_stock, own, prompt, dtype, tmp_path):
    noise = start_noise(own)
    plain = draw(own, prompt, latents=noise)
    for pipe in (own_stock, own):
        pipe.to(dtype=dtype)
        assert pipe.dtype == dtype and all(part.dtype == dtype for part in models(pipe).values())
    assert all(value.dtype == dtype for value in embed(own, prompt).values())
    images = draw(own, prompt, latents=noise.to(dtype))
    assert np.isfinite(images).all() and np.abs(images - plain).max() < 0.1
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, prompt, latents=noise.to(dtype)))
    own.save_pretrained(tmp_path)
    again = load(Ours, tmp_path, **{DTYPE: {"vae": torch.float32, "default": dtype}})
    dtypes = {name: part.dtype for name, part in models(again).items()}
    assert dtypes == dict.fromkeys(models(own), dtype) | {"vae": torch.float32}
    assert torch.equal(embed(again, prompt)["prompt_embeds"], embed(own, prompt)["prompt_embeds"])


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


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_from_pipe_keeps_the_configuration(own_stock, ours):
    own_stock.register_to_config(force_zeros_for_empty_prompt=False)
    there = quiet(Ours.from_pipe(own_stock))
    configs = [
        {key: value for key, value in pipe.config.items() if key[0] != "_"}
        for pipe in (own_stock, there, Stock.from_pipe(there))
    ]
    assert configs[0] == configs[1] == configs[2]
    # without zeros an absent negative prompt is an empty one, and counts no more than that
    assert np.array_equal(draw(there, SHORT), draw(own_stock, SHORT))
    assert not np.array_equal(draw(there, SHORT), draw(ours, SHORT))
    replaced = Ours.from_pipe(own_stock, text_encoder=tiny_sdxl.stretched(own_stock.text_encoder, 248))
    assert replaced.prompt_layout(LONG).chunks == (1, 3)


def test_from_pipe_casts_to_float32_unless_told(own_stock):
    """diffusers' own way: and as the models are shared, the pipeline it came from is cast with it."""
    own_stock.to(dtype=torch.bfloat16)
    kept = quiet(Ours.from_pipe(own_stock, **{DTYPE: torch.bfloat16}))
    assert {part.dtype for part in models(own_stock).values()} == {torch.bfloat16} == {kept.dtype}
    assert np.array_equal(draw(kept, LONG), draw_as_diffusers(own_stock, kept, LONG))
    cast = Ours.from_pipe(own_stock)
    assert {part.dtype for part in models(own_stock).values()} == {torch.float32} == {cast.dtype}


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

        call = {"denoising_end": end, "output_type": "latent"} if end < 1 else {"output_type": "np"}
        call |= {"denoising_start": start, "image": image} if start > 0 else {}
        image = draw(pipe, num_inference_steps=steps, callback_on_step_end=note, **prompt, **call)
    return image, done


MIXTURES = [
    (HeunDiscreteScheduler, [0.7], [[751, 501, 501], [501, 251, 251, 1, 1]]),
    (EulerDiscreteScheduler, [0.3, 0.7], [[751], [501], [251, 1]]),
]


@pytest.mark.parametrize(("cls", "splits", "timesteps"), MIXTURES)
def test_pipelines_share_the_steps(parts, cls, splits, timesteps):
    painters = [StableDiffusionXLImg2ImgPipeline, StableDiffusionXLLongPromptImg2ImgPipeline]
    stock, ours = (
        [assemble(part, parts, **scheduler(cls)) for part in [first] + [painter] * len(splits)]
        for first, painter in zip([Stock, Ours], painters, strict=True)
    )
    image, done = share_steps(ours, {"prompt": LONG}, splits, steps=4)
    assert done == timesteps
    assert np.array_equal(image, share_steps(stock, embed(ours[0], LONG), splits, steps=4)[0])


# ---- IP-Adapter


def test_ip_adapter_calls(parts):
    reading = {"image_encoder": tiny_sdxl.image_encoder(), "feature_extractor": tiny_sdxl.feature_extractor()}
    pipes = [assemble_copy(cls, parts, **reading) for cls in (Stock, Ours)]
    plain = draw(pipes[1], LONG)
    for pipe in pipes:
        adapter = tiny_sdxl.ip_adapter(pipe.unet)
        pipe.load_ip_adapter([adapter], subfolder=[None], weight_name=[None], image_encoder_folder=None)
    embeds = torch.randn((2, 1, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 64, 64).index_fill(3, torch.arange(32), 1.0)
    images = [plain]
    for call in (
        {"ip_adapter_image": tiny_sdxl.picture(0)},
        {"ip_adapter_image": tiny_sdxl.picture(1)},
        {"ip_adapter_image_embeds": [embeds[:1]], "guidance_scale": 1.0},
        {"ip_adapter_image_embeds": [embeds], "cross_attention_kwargs": {"ip_adapter_masks": [mask]}},
    ):
        images.append(draw(pipes[1], LONG, **call))
        assert np.array_equal(images[-1], draw_as_diffusers(*pipes, LONG, **call))
    assert all(not np.array_equal(one, other) for one, other in pairwise(images))
    pipes[1].unload_ip_adapter()
    assert np.array_equal(draw(pipes[1], LONG), plain)


# ---- saved and loaded


def test_saved_and_loaded(ours, parts, tmp_path):
    own = assemble(Ours, parts, force_zeros_for_empty_prompt=False)
    own.save_pretrained(tmp_path)
    again, automatic = (aligned(load(cls, tmp_path)) for cls in (Ours, AutoPipelineForText2Image))
    for prompt in PROMPTS.values():
        assert np.array_equal(draw(again, prompt), draw(own, prompt))
    assert not np.array_equal(draw(again, SHORT), draw(ours, SHORT))
    assert type(automatic) is Stock
    assert np.array_equal(draw(automatic, SHORT), draw(own, SHORT))


@pytest.mark.parametrize("absent", [TEXT_PARTS, tuple(Stock._optional_components)], ids=["encoders", "all optional"])
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
    with pytest.raises(ValueError, match="text_encoder_2"):
        draw(again, LONG)


# ---- models that are not where they run


@needs_accelerator
@pytest.mark.parametrize(("kind", "place"), [("sequential", "meta"), ("model", "cpu")])
def test_cpu_offload(own, own_stock, prompt, kind, place):
    expected = draw(own.to(ACCELERATOR), prompt)
    for pipe in (own, own, Ours.from_pipe(own_stock)):
        getattr(quiet(pipe), f"enable_{kind}_cpu_offload")(device=ACCELERATOR)
        assert pipe._execution_device.type == ACCELERATOR.type
        assert np.abs(draw(pipe, prompt) - expected).max() < 1e-3
        assert {part.device.type for part in models(pipe).values()} == {place}
        assert kind == "sequential" or all(hasattr(part, "_hf_hook") for part in models(pipe).values())


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
def test_on_an_accelerator(own_stock, own, prompt, tmp_path):
    own.save_pretrained(tmp_path)
    on_cpu, noise = draw(own, prompt), start_noise(own)
    for pipe in (own_stock, own):
        pipe.to(ACCELERATOR)
        assert {part.device.type for part in models(pipe).values()} == {ACCELERATOR.type}
    assert all(value.device.type == ACCELERATOR.type for value in embed(own, prompt).values())
    images = draw(own, prompt)
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, prompt))
    assert np.abs(images - on_cpu).max() < 1e-2
    mapped, grouped = load(Ours, tmp_path, device_map=ACCELERATOR.type), load(Ours, tmp_path)
    grouped.enable_group_offload(
        onload_device=ACCELERATOR,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        exclude_modules=["vae"],
    )
    assert {weight.device.type for weight in grouped.text_encoder.parameters()} == {"cpu"}
    for pipe in (mapped, grouped):
        assert np.abs(draw(pipe, prompt) - images).max() < 1e-3
    images = draw(own, prompt, latents=noise).ravel()
    half = draw(own.to(dtype=torch.float16), prompt, latents=noise.half()).ravel()
    assert np.dot(images, half) / np.linalg.norm(images) / np.linalg.norm(half) > 0.95
