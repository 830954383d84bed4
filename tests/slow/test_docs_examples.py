"""The examples of the pages that run: Python on small random models under the names that the pages use, and the command
lines that take seconds, page by page in the order of the page. Half precision and the GPU are left out.
"""

import os
import re
import shutil
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import open_clip
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionXLPipeline
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
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from debias_diffusion.app.cli import main
from debias_diffusion.app.export import export
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.encoders import load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.methods import METHODS
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.pipelines.checkpoints import load_pipeline
from debias_diffusion.tokens import clip_tokenizer

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
STAND_INS = {SDXL: "sdxl-folder", "torch.float16": "torch.float32", '.to("cuda")': ""}
STAND_INS |= {"pipe.enable_model_cpu_offload()": "pipe.to('cpu')"}
STAND_INS |= {"black-forest-labs/FLUX.1-dev": "flux", "stabilityai/stable-diffusion-3-medium-diffusers": "sd3"}
LONG_PROMPT = "A street at night. " * 30
LENGTH = 248


def with_stand_ins(code: str) -> str:
    for name, replacement in STAND_INS.items():
        code = code.replace(name, replacement)
    return code


WIDTH = DEEP["text_cfg"]["width"]


@contextmanager
def published(folder: Path):
    """Files as they are published, in a folder, and their models in open_clip's list."""
    models = {name: DEEP | {"quick_gelu": True} for name in ("ViT-B-16-quickgelu", "ViT-L-14-quickgelu")}
    models["ViT-L-14"] = DEEP
    prefixed, _ = released(folder, "text.")
    prefixed.rename(kept := folder / "kept.pt")
    plain, _ = released(folder, "")
    plain.rename(folder / "longclip-L.pt")
    kept.rename(folder / "debias_vitb_3e.pt")
    shutil.copy(folder / "longclip-L.pt", hub_repository(folder / "cache", "BeichenZhang/LongCLIP-L"))
    with registered(folder / "models", **models):
        torch.save(open_clip.CLIP(**deepcopy(DEEP)).state_dict(), folder / "laion-vit-l-14.pt")
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


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    """A copy of the models, the current folder of a page."""
    shutil.copytree(models, copy := tmp_path / "page", copy_function=os.link)
    monkeypatch.chdir(copy)
    return copy


QUICK = ("export", "comfyui", "generate")


def runs_here(arguments: list[str]) -> bool:
    """Whether a command takes seconds, with models that are there."""
    options = dict(pairwise(arguments))
    if arguments[0] == "reproduce":
        return "--list" in arguments
    given = [options[name] for name in ("--model", "--base", "--encoder") if name in options]
    there = (name.startswith(("toy/", "BeichenZhang")) or Path(name.partition(":")[0]).exists() for name in given)
    return arguments[0] in QUICK and "--push-to-hub" not in arguments and all(there)


def run_command(words: list[str]) -> None:
    if words[0] != "debias-diffusion" or not runs_here(words[1:]):
        return
    few = ["--steps", "1"] if words[1] == "generate" and "--steps" not in words else []
    main([*words[1:], *few])


def follow(page: str, names: dict) -> list[dict]:
    """Runs a page. Returns the names after each of its Python blocks."""
    after = []
    for block in BLOCKS[page]:
        code = with_stand_ins(block.code)
        if block.language == "bash":
            for words in shell_commands(code):
                run_command(words)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + code, page, "exec"), names)
            after.append(dict(names))
    return after


def check_pipelines(after: list[dict]) -> None:
    """Every SDXL pipeline that a page makes reads a long prompt to its end."""
    for names in after:
        if isinstance(names.get("pipe"), DiffusionPipeline):
            names["pipe"].set_progress_bar_config(disable=True)
            images = [
                names["pipe"](text, num_inference_steps=1, generator=torch.Generator().manual_seed(0)).images[0]
                for text in (LONG_PROMPT, f"{LONG_PROMPT}A red bus passes.")
            ]
            assert images[0].size == (64, 64) and images[0].tobytes() != images[1].tobytes()


def test_readme(folder, loaded_sdxl):
    after = follow("README.md", {"pipe": loaded_sdxl})
    check_pipelines(after[:1])
    assert after[0]["image"].size == (64, 64)
    images = [Image.open(folder / f"{name}.png") for name in ("cut", "whole")]
    assert images[0].size == (48, 48) and images[0].tobytes() != images[1].tobytes()


def test_existing_weights(folder):
    after = follow("existing-weights.md", {})
    check_pipelines(after[:1])
    images = [Image.open(folder / f"{name}.png") for name in ("street", "street-in-chunks", "checkpoint")]
    assert len({image.tobytes() for image in images}) == 3 and images[0].size == (64, 64)
    encoder = CLIPTextModel.from_pretrained(folder / "long-clip-l", subfolder="text_encoder")
    table = load_file(folder / "long_clip_l.safetensors")["text_model.embeddings.position_embedding.weight"]
    assert len(table) == LENGTH and torch.equal(encoder.state_dict()["embeddings.position_embedding.weight"], table)
    assert [names["model"].context_length for names in after[1:]] == [LENGTH, LENGTH, 77]
    torch.testing.assert_close(after[1]["probabilities"].sum(), torch.tensor(1.0))
    assert after[1]["text_features"].shape == (2, DEEP["embed_dim"])


@pytest.mark.filterwarnings("ignore:.*does not name its activation")
def test_an_encoder_of_another_width_is_refused_by_generate(folder, tmp_path):
    narrow = build_tiny_sdxl(tmp_path / "sdxl")
    with pytest.raises(UserError, match="width"):
        load_pipeline(narrow, "debias_vitb_3e.pt", torch.device("cpu"))


def test_encoders(folder):
    picture().save("star.png")
    loaded, both, blocks, diffusers, text, clip, clip_open = follow("encoders.md", {})
    assert loaded["text_encoder"].config.max_position_embeddings == LENGTH
    assert both["features"].shape == (1, DEEP["embed_dim"])
    assert blocks["eot_states"].shape == (1, 2, WIDTH) and blocks["states"].shape == (1, LENGTH, WIDTH)
    assert blocks["cls_states"].shape == (1, 2, DEEP["vision_cfg"]["width"])
    check_pipelines([diffusers])
    assert text["states"].shape == (1, LENGTH, WIDTH) and clip["similarity"].shape == (1, 2)
    assert clip_open["tokenizer"](["a cat"]).shape == (1, LENGTH)
    assert (folder / "ComfyUI" / "models" / "text_encoders" / "debias_clip_l.safetensors").is_file()


@pytest.fixture
def loaded_sdxl(models):
    """The pipeline that a reader has."""
    return StableDiffusionXLPipeline.from_pretrained(models / "sdxl-folder", add_watermarker=False)


def test_pipelines(folder, loaded_sdxl):
    after = follow("pipelines.md", {"pipe": loaded_sdxl, "prompt": LONG_PROMPT})
    check_pipelines(after)
    assert after[0]["image"].size == after[2]["image"].size == (64, 64)


def test_lora(folder):
    (after,) = follow("lora.md", {})
    pipe = with_long_prompts(after["pipe"]).set_long_prompt(positions=227)
    with torch.no_grad():
        assert torch.equal(torch.cat(after["states"], dim=-1), pipe.encode_prompt(after["captions"])[0])
    assert after["loss"] > 0 and any("lora" in name for name, _ in after["unet"].named_parameters())


def test_faq(folder, loaded_sdxl):
    last = follow("faq.md", {"pipe": loaded_sdxl, "long_prompt": LONG_PROMPT})[-1]
    assert last["image"].size and last["layout"].tokens == 150 and last["layout"].chunks[0] > 1


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
    assert last["images"][0]["caption"].startswith("toy/clip, seed 0") and len(last["tokens"]["value"]) > 5
    assert last["attention"][0]["label"].startswith("toy/clip") and last["movement"]["value"]["data"]
    assert Image.open(last["images"][0]["image"]).size == (48, 48)


def test_extending(extended, monkeypatch):
    monkeypatch.chdir(extended)
    (after,) = follow("extending.md", {"__name__": "predicting"})
    assert METHODS["predicting"].alpha == after["Predicting"].alpha == 0.5


def test_generate(folder):
    follow("generate.md", {})
    assert len(list(Path("pictures").glob("0*.png"))) == 2


# Pages of which nothing but a file is checked.
OTHERS = {"command-line.md": "star.png", "comfyui.md": "ComfyUI/custom_nodes/long_prompt/__init__.py"}
OTHERS |= {"api.md": "", "reproduce.md": ""}


@pytest.mark.parametrize(("page", "written"), OTHERS.items())
def test_other_pages(page, written, folder, capsys):
    follow(page, {})
    assert (folder / written).exists()
    assert page != "reproduce.md" or "table-S4" in capsys.readouterr().out


def test_every_page_with_python_is_followed():
    followed = set(re.findall(r'\bfollow\("([\w.-]+)"', Path(__file__).read_text())) | OTHERS.keys()
    assert {page for page, blocks in BLOCKS.items() if "python" in {block.language for block in blocks}} <= followed
