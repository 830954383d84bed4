"""The examples of the pages that run: Python on small random models under the names that the pages use, and the command
lines that take seconds, page by page in the order of the page. Half precision and the GPU are left out.
"""

import os
import shutil
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from helpers import tiny_flux
from helpers.demo_clients import opened_page
from helpers.draw import same_image
from helpers.pages import BLOCKS, shell_commands
from helpers.released import DEEP, released
from helpers.single_files import original_layout
from helpers.text_encoders import hub_repository
from helpers.tiny_clip import registered, tiny_clip
from helpers.tiny_sdxl import build_tiny_sdxl, picture, sdxl_parts
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

from debias_diffusion.app.cli import main
from debias_diffusion.app.export import export
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.text.tokens import clip_tokenizer
from debias_diffusion.toyworld.shipped import shipped

STAND_INS = {"stabilityai/stable-diffusion-xl-base-1.0": "sdxl-folder", "torch.float16": "torch.float32"}
STAND_INS |= {'.to("cuda")': "", "pipe.enable_model_cpu_offload()": "pipe.to('cpu')"}
STAND_INS |= {
    'from_single_file("checkpoint.safetensors"': 'from_pretrained("sdxl-folder"'
}  # without the hub's configuration
STAND_INS |= {"black-forest-labs/FLUX.1-dev": "flux", "stabilityai/stable-diffusion-3-medium-diffusers": "sd3"}
STAND_INS |= {"--to comfyui": "--to transformers"}  # which ComfyUI would not know: the toy encoders are smaller
LONG_PROMPT = "A street at night. " * 30
WIDTH, LENGTH = DEEP["text_cfg"]["width"], 248


@contextmanager
def published(folder: Path):
    """Files as they are published, in a folder, and their models in open_clip's list."""
    for prefix, name in (("", "longclip-L"), ("text.", "debias_vitb_3e")):
        file, _ = released(folder, prefix)
        file.rename(folder / f"{name}.pt")
    shutil.copy(folder / "longclip-L.pt", hub_repository(folder / "cache", "BeichenZhang/LongCLIP-L"))
    quick = {name: DEEP | {"quick_gelu": True} for name in ("ViT-B-16-quickgelu", "ViT-L-14-quickgelu")}
    with registered(folder / "models", **quick):
        build_tiny_sdxl(folder / "sdxl-folder", text_width=WIDTH, vocabulary=clip_tokenizer)
        for weights in (folder / "sdxl-folder").glob("*/*.safetensors"):
            os.link(weights, weights.with_name(weights.name.replace(".safetensors", ".fp16.safetensors")))
        save_file(original_layout(sdxl_parts(WIDTH, vocabulary=clip_tokenizer)), folder / "checkpoint.safetensors")
        yield


def trained(folder: Path) -> None:
    """What the commands of other pages leave: training runs, an exported encoder, an SDXL for it, prompts."""
    load_two_tower(f"ViT-L-14-quickgelu:{folder / 'longclip-L.pt'}").save(mine := folder / "runs" / "mine")
    for name in ("debias-clip-vit-l14", "photographs"):
        shutil.copytree(mine, folder / "runs" / name, copy_function=os.link)
    export(ExportConfig(str(folder / "runs" / "encoder"), str(mine)))
    for name in ("runs/tiny-sdxl", "runs/both"):
        source = folder / ("runs/encoder" if name == "runs/both" else "sdxl-folder")
        shutil.copytree(source, folder / name, copy_function=os.link)
    (folder / "prompts.txt").write_text("a red star\na blue ring\n")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        with published(folder):
            trained(folder)
            yield folder


def runs_here(command: str, *arguments: str) -> bool:
    options = dict(pairwise(arguments))
    given = [options[name] for name in ("--model", "--base", "--encoder") if name in options]
    there = (name.startswith(("toy/", "BeichenZhang")) or Path(name.partition(":")[0]).exists() for name in given)
    quick = command in ("export", "comfyui", "generate", "tokens", "encode")
    return quick and "--push-to-hub" not in arguments and all(there)


def follow(page: str, names: dict) -> list[dict]:
    """Runs a page. Returns the names after each of its Python blocks."""
    after = []
    for block in BLOCKS[page]:
        code = block.code
        for name, replacement in STAND_INS.items():
            code = code.replace(name, replacement)
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + code, page, "exec"), names)
            after.append(dict(names))
        for words in shell_commands(code) if block.language == "bash" else ():
            if words[0] == "debias-diffusion" and runs_here(*words[1:]):
                main([*words[1:], *(["--steps", "1"] if words[1] == "generate" and "--steps" not in words else [])])
    return after


# What a page leaves in its names, and the images and other files that its commands write.
CHECKS = {
    "README.md": (None, "street.png cut.png whole.png"),
    "SKILL.md": (
        lambda names: names["layout"].tokens == 150 and names["text_encoder"].config.max_position_embeddings == LENGTH,
        "star.png",
    ),
    "existing-weights.md": (
        lambda names: names["model"].context_length == LENGTH and names["features"].shape == (1, DEEP["embed_dim"]),
        "street.png checkpoint.png long_clip_l.safetensors long-clip-l/text_encoder",
    ),
    "encoders.md": (
        lambda names: names["states"].shape == (1, LENGTH, WIDTH) and names["tokenizer"](["a"]).shape == (1, LENGTH),
        "ComfyUI/models/text_encoders/debias_clip_l.safetensors",
    ),
    "pipelines.md": (lambda names: names["image"].size, ""),
    "sharpen.md": (lambda names: names["pipe"]._long_prompt.sharpen == 2 and names["image"].size, ""),
    "faq.md": (lambda names: names["layout"].tokens == 150 and names["layout"].chunks[0] > 1, ""),
    "generate.md": (None, "pictures/00000-*.png pictures/00001-*.png"),
    "command-line.md": (None, "star.png"),
    "comfyui.md": (None, "ComfyUI/custom_nodes/long_prompt/__init__.py"),
    "api.md": (None, ""),
}


@pytest.mark.parametrize("page", CHECKS)
def test_a_page_runs_and_leaves_what_it_says(page, models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path / "page", copy_function=os.link)
    monkeypatch.chdir(tmp_path / "page")
    loaded = StableDiffusionXLPipeline.from_pretrained("sdxl-folder", add_watermarker=False)  # which a reader has
    if page == "encoders.md":
        picture().save("star.png")
    after = follow(page, {"pipe": loaded, "prompt": LONG_PROMPT, "long_prompt": LONG_PROMPT})
    check, files = CHECKS[page]
    assert check is None or check(after[-1])
    written = [path for pattern in files.split() for path in Path().glob(pattern)]
    assert len(written) == len(files.split())


def test_lora(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(shipped("toy/sdxl"), "sdxl-folder")
    os.mkdir("photos")
    for name, text in {"a": "A red star.", "b": "A red star is above a blue ring. " * 20}.items():
        picture().save(f"photos/{name}.png")
        Path(f"photos/{name}.txt").write_text(text)
    (loop,) = follow("lora.md", {})
    assert loop["predicted"].shape == loop["noisy"].shape
    embeds = torch.cat(loop["states"], dim=-1)
    pipe = with_long_prompts(loop["pipe"]).set_long_prompt(positions=embeds.shape[1])
    with torch.no_grad():
        expected, _, pooled, _ = pipe.encode_prompt(loop["captions"])
    torch.testing.assert_close((embeds, loop["pooled"][-1]), (expected, pooled))
    assert len(list(Path("embeddings").glob("*.safetensors"))) == len(list(Path("photos").glob("*.npz"))) == 2


def test_other_pipelines(tmp_path, monkeypatch):
    """Only CLIP-L can tell two prompts apart: the T5 gets another text."""
    monkeypatch.chdir(tmp_path)
    tiny_clip(context_length=LENGTH).save("runs/debias-clip-vit-l14")
    export(ExportConfig("runs/encoder", "runs/debias-clip-vit-l14"))
    tiny_flux.build_tiny_flux(tmp_path / "flux")
    tiny_flux.build_tiny_sd3(tmp_path / "sd3")
    for names, text in zip(follow("other-pipelines.md", {}), ("prompt_2", "prompt_3"), strict=True):
        names["pipe"].set_progress_bar_config(disable=True)
        assert not same_image(names["pipe"], **{text: "a cat"}, max_sequence_length=64)


def test_app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    with opened_page(base="toy/sdxl", encoders=["toy/clip"]) as (_, url):
        monkeypatch.setitem(STAND_INS, "http://127.0.0.1:7860", url)
        last = follow("app.md", {})[-1]
    assert last["images"][0]["caption"].startswith("SDXL, whole prompt") and len(last["tokens"]["value"]) > 5
    assert last["attention"][0]["label"].startswith("SDXL, whole prompt") and last["movement"]["value"]["data"]
    assert Image.open(last["images"][0]["image"]).size == (48, 48)


def test_every_page_with_python_is_followed():
    pages = {page for page, blocks in BLOCKS.items() if "python" in {block.language for block in blocks}}
    # test_processes.py trains with the file of extending.md.
    assert pages <= CHECKS.keys() | {"other-pipelines.md", "app.md", "lora.md", "extending.md"}
