"""docs/existing-weights.md, run as it stands: files of the published layouts, with random weights and tiny sizes."""

import re
import shlex
import shutil
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import open_clip
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file
from single_files import original_layout
from test_interchange import hub_repository
from test_released_weights import DEEP, released
from tiny_clip import registered
from tiny_sdxl import build_tiny_sdxl, sdxl_parts
from transformers import CLIPTextModel

from debias_diffusion.app.cli import main
from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.loading import load_sdxl

PAGE = (Path(__file__).parent.parent / "docs" / "existing-weights.md").read_text()
WIDTH = DEEP["text_cfg"]["width"]
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"


@contextmanager
def published(folder):
    """The files and names that the page names, in `folder`."""
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
        build_tiny_sdxl(folder / "sdxl-folder", text_width=WIDTH)
        save_file(original_layout(sdxl_parts(WIDTH)), folder / "checkpoint.safetensors")
        for weights in (folder / "sdxl-folder").glob("*/*.safetensors"):
            shutil.copy(weights, weights.with_name(weights.name.replace(".safetensors", ".fp16.safetensors")))
        yield


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        with published(folder):
            for line in "".join(blocks("bash")).replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line.replace(SDXL, "sdxl-folder"))
                assert program == "debias-diffusion"
                main([*arguments, *(["--steps", "1"] if arguments[0] == "generate" else [])])
            yield folder


def test_the_commands_write_what_they_say(folder):
    images = [Image.open(folder / f"{name}.png") for name in ("street", "street-in-chunks", "checkpoint")]
    assert len({image.tobytes() for image in images}) == 3 and images[0].size == (64, 64)
    encoder = CLIPTextModel.from_pretrained(folder / "long-clip-l", subfolder="text_encoder")
    table = load_file(folder / "long_clip_l.safetensors")["text_model.embeddings.position_embedding.weight"]
    assert len(table) == 248
    assert torch.equal(encoder.state_dict()["embeddings.position_embedding.weight"], table)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: re.search(r'\("([^"]*)"\)', block)[1])
def test_the_python_runs(folder, block, monkeypatch):
    half = block.replace(SDXL, "sdxl-folder").replace("torch.float16", "torch.float32")  # a CPU has no other fast one
    names = {}
    exec(half.replace("pipe.enable_model_cpu_offload()", "pipe.to('cpu')"), names)
    if "pipe" in names:
        assert names["image"].size == (64, 64) and names["pipe"].text_encoder.config.max_position_embeddings == 248
        return
    assert names["model"].context_length == (77 if "laion" in block else 248)
    if "probabilities" in names:
        torch.testing.assert_close(names["probabilities"].sum(), torch.tensor(1.0))
        assert names["text_features"].shape == (2, DEEP["embed_dim"])


@pytest.mark.filterwarnings("ignore:.*does not name its activation")
def test_an_encoder_of_another_width_is_refused_by_generate(folder, tmp_path):
    narrow = build_tiny_sdxl(tmp_path / "sdxl")
    with pytest.raises(UserError, match="width"):
        load_sdxl(narrow, "debias_vitb_3e.pt", torch.device("cpu"))
