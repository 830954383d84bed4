"""SDXL's refiner does the last fifth of the denoising: as diffusers' own two pipelines, and all that names it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import load
from PIL import Image

from debias_diffusion.app.generate import GenerateConfig, generate
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.generation import GenerationConfig
from debias_diffusion.eval.images.rendered import image_task, render_all
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.png import read_settings
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.processes import Processes

CPU, STEPS = torch.device("cpu"), 5
SHORT = "a cat, a dog and a bird sit on the wide red sofa."
LONG = " ".join([SHORT] * 9)


@pytest.fixture(scope="module")
def refiner(tmp_path_factory):
    widths = {"cross_attention_dim": tiny_sdxl.WIDTH_2, "projection_class_embeddings_input_dim": 5 * 8 + 24}
    parts = {"text_encoder": None, "tokenizer": None, "unet": tiny_sdxl.unet(seed=7, **widths)}
    parts = tiny_sdxl.sdxl_parts(seed=7) | parts
    pipe = StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True)
    folder = tmp_path_factory.mktemp("refiner")
    pipe.save_pretrained(folder)
    return str(folder)


def rendered(base, refiner, texts, name="original", **sampling):
    sampling = {"steps": STEPS, "guidance_scale": 5.0} | sampling
    renderer = Renderer(base, Sampling(**sampling), CPU, refiner=refiner)
    encoder = EncoderSpec.parse(name)
    prompts = [ImagePrompt(text, seed=seed) for seed, text in enumerate(texts)]
    [images] = renderer.render_batches(renderer.pipeline(encoder), encoder, [prompts])
    return [np.asarray(image) for image in images]


def test_images_are_those_of_diffusers_two_pipelines(base, refiner):
    texts = [LONG, "a red sofa"]
    first = with_long_prompts(load(StableDiffusionXLPipeline, base))
    second = with_long_prompts(load(StableDiffusionXLImg2ImgPipeline, refiner))
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(texts))]
    settings = {"num_inference_steps": STEPS, "guidance_scale": 5.0, "generator": generators}
    latents = first(texts, denoising_end=0.8, output_type="latent", **settings).images
    expected = second(texts, image=latents, denoising_start=0.8, **settings).images
    assert all(map(np.array_equal, rendered(base, refiner, texts), map(np.asarray, expected)))


def test_the_refiner_reads_the_whole_prompt_as_it_was_trained(base, refiner, monkeypatch):
    read, call = [], StableDiffusionXLImg2ImgPipeline.__call__

    def watched(pipe, *args, prompt_embeds, **kwargs):
        read.append(prompt_embeds)
        return call(pipe, *args, prompt_embeds=prompt_embeds, **kwargs)

    monkeypatch.setattr(StableDiffusionXLImg2ImgPipeline, "__call__", watched)
    images = [rendered(base, refiner, [LONG], layer=layer, steps=2)[0] for layer in ("penultimate", "last")]
    rendered(base, refiner, [LONG], "cut:original", steps=2)
    for text in ("a [cat:dog:3]", "a dog"):  # of five calls the refiner makes the last
        rendered(base, refiner, [text], "a1111:original")
    whole, last, cut, scheduled, plain = read
    assert torch.equal(scheduled, plain)
    assert torch.equal(whole, last) and not np.array_equal(*images)  # the layer is that of the base alone
    assert whole.shape[1:] == (227, tiny_sdxl.WIDTH_2) and cut.shape[1] == 77


def test_everything_that_is_kept_names_the_refiner(base, refiner, tmp_path):
    file, settings = tmp_path / "a.png", {"steps": STEPS, "output": str(tmp_path / "a.png")}
    generate(GenerateConfig(SHORT, base=base, refiner=refiner, **settings))
    assert read_settings(file)["refiner"] == refiner and len(read_settings(file)["refiner_sha256"]) == 64
    with pytest.raises(UserError, match="is another image: refiner"):
        generate(GenerateConfig(SHORT, base=base, **settings))
    generate(GenerateConfig(SHORT, base=base, **settings, overwrite=True))
    assert "refiner" not in read_settings(file)
    config = GenerationConfig(["original"], str(tmp_path / "out"), data="", base=base, steps=STEPS, refiner=refiner)
    processes, tasks = Processes.connect("cpu"), [image_task(config, "0", SHORT, 0)]
    images, digests = render_all(config, processes, tasks)
    [[drawn]] = (of_encoder.files for of_encoder in images.values())
    assert len(digests["refiner"]) == 64 and read_settings(drawn)["refiner"] == refiner
    with pytest.raises(UserError, match="contents of refiner: "):
        render_all(replace(config, refiner=None), processes, tasks)
    assert Image.open(drawn).tobytes() != Image.open(file).tobytes()


def test_what_cannot_refine_is_refused_before_a_model_is_loaded(base, refiner):
    for given, message in (
        ({"refiner": base}, "is a StableDiffusionXLPipeline, not"),
        ({"refiner": f"{refiner}:{base}/unet/diffusion_pytorch_model.safetensors"}, "is one file. Give a folder"),
        ({"refiner": refiner, "low_memory": True}, "Set low_memory or refiner, not both"),
    ):
        with pytest.raises(UserError, match=message):
            Renderer(base, Sampling(), CPU, **given)
