"""`--base FILE.safetensors`: a tiny checkpoint in the original single-file layout renders what its folder renders."""

import re
import shutil

import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers import tiny_sdxl
from helpers.single_files import original_layout
from helpers.text_encoders import hub_repository
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file

from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.generate import generate
from debias_diffusion.app.options import GenerateConfig
from debias_diffusion.encoders import ORIGINAL
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.rendered import image_task, render_all
from debias_diffusion.eval.options import GenerationConfig
from debias_diffusion.eval.session import Processes
from debias_diffusion.pipelines.checkpoints import Checkpoint, load_pipeline

CPU = torch.device("cpu")
XL_KEY = "conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias"  # by which diffusers knows an SDXL


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of tiny models; beside each a single file of the same weights, and a folder without weights."""
    root = tmp_path_factory.mktemp("bases")
    tiny_sdxl.build_tiny_sdxl(root / "sdxl")
    tiny_sdxl.assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts()).save_pretrained(root / "sd15")
    for name, parts in (("sdxl", tiny_sdxl.sdxl_parts()), ("sd15", tiny_sdxl.sd15_parts())):
        save_file(original_layout(parts), root / f"{name}.safetensors")
        shutil.copytree(root / name, root / f"{name}-configs", ignore=shutil.ignore_patterns("*.safetensors"))
    return root


def single(bases, name="sdxl"):
    return f"{bases / name}-configs:{bases / name}.safetensors"


def render(base, path, **settings):
    settings = {"steps": 1, "device": "cpu"} | settings
    return generate(GenerateConfig("a red cat", str(base), output=str(path), **settings))


@pytest.mark.parametrize("name", ["sdxl", "sd15"])
def test_a_single_file_is_the_folder_with_its_weights(bases, name):
    folder, file = (load_pipeline(base, None, CPU) for base in (bases / name, single(bases, name)))
    for part in ("unet", "vae", "text_encoder", "text_encoder_2")[: None if name == "sdxl" else 3]:
        weights, expected = (getattr(pipe, part).state_dict() for pipe in (file, folder))
        assert len(weights) > 10 and weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected), part
    assert Checkpoint.parse(single(bases, name)).size == Checkpoint.parse(bases / name).size == (64, 64)


def test_generate_the_evaluations_and_the_demo_read_it(bases, tmp_path):
    base = single(bases)
    paths = [render(bases / "sdxl", tmp_path / "folder.png")]
    paths += [render(base, tmp_path / f"{low}.png", low_memory=low) for low in (False, True)]
    config = GenerationConfig([ORIGINAL], base=base, output=str(tmp_path / "out"), data="", steps=1)
    rendered, digests = render_all(config, Processes("cpu"), [image_task(config, "a", "a red cat", 0)])
    paths += next(iter(rendered.values())).files
    assert len({Image.open(path).tobytes() for path in paths}) == 1
    assert digests["base"] == Checkpoint.parse(base).digest
    demo = DemoModels(base, [ORIGINAL], CPU)
    assert demo.size == (64, 64) and demo.base == "sdxl.safetensors"


def test_its_digest_is_of_file_and_configurations(bases, tmp_path):
    shutil.copytree(bases / "sdxl-configs", tmp_path / "configs")
    shutil.copy(bases / "sdxl.safetensors", tmp_path)
    base = f"{tmp_path / 'configs'}:{tmp_path / 'sdxl.safetensors'}"
    digests = [Checkpoint.parse(name).digest for name in (single(bases), base)]
    (tmp_path / "configs" / "model_index.json").write_text("{}")
    digests.append(Checkpoint.parse(base).digest)
    (tmp_path / "sdxl.safetensors").write_bytes(b"other weights")
    digests.append(Checkpoint.parse(base).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3


def changed_file(bases, path, removed="nothing", **added):
    weights = load_file(bases / "sdxl.safetensors") | added
    save_file({name: weight for name, weight in weights.items() if removed not in name}, path)
    return f"{bases / 'sdxl-configs'}:{path}"


def test_what_a_file_lacks_is_not_made_up(bases, tmp_path):
    for removed, message in {
        "middle_block.1.norm.weight": "lacks weights of its configuration's models",
        "embedders.0.transformer.text_model.final": "lacks weights of its configuration's models",
        "conditioner.embedders.1": "could not be loaded: .* Weights for this component appear to be missing",
        "first_stage_model": "could not be loaded: ",
    }.items():
        base = changed_file(bases, tmp_path / "a.safetensors", removed)
        with pytest.raises(UserError, match=rf"^The SDXL checkpoint '.*a\.safetensors' {message}"):
            load_pipeline(base, None, CPU)


def test_the_configuration_comes_from_the_hub_or_the_error_says_what_to_give(bases, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    file = tmp_path / "xl.safetensors"
    changed_file(bases, file, **{XL_KEY: torch.zeros(1)})
    for path, hub_id in (
        (file, "stabilityai/stable-diffusion-xl-base-1.0"),
        (bases / "sd15.safetensors", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
    ):
        needed = f"needs the configuration and tokenizers of '{hub_id}', which cannot .*'FOLDER:{re.escape(str(path))}'"
        with pytest.raises(UserError, match=needed):
            Checkpoint.parse(path).check_kind()
    snapshot = hub_repository(tmp_path, "stabilityai/stable-diffusion-xl-base-1.0")
    shutil.copytree(bases / "sdxl-configs", snapshot, dirs_exist_ok=True)
    checkpoint = Checkpoint.parse(file)
    assert checkpoint.check_kind() == "StableDiffusionXLPipeline" and checkpoint.size == (64, 64)
    pipe, expected = (load_pipeline(base, None, CPU) for base in (file, bases / "sdxl"))
    assert all(map(torch.equal, pipe.text_encoder_2.parameters(), expected.text_encoder_2.parameters()))


def test_other_files_are_refused(bases, tmp_path):
    save_file({"lora_unet.down.weight": torch.zeros(1)}, tmp_path / "lora.safetensors")
    (tmp_path / "half.safetensors").write_bytes((bases / "sdxl.safetensors").read_bytes()[:99])
    (tmp_path / "sdxl.ckpt").touch()
    for base, message in {
        "lora.safetensors": "is no single-file checkpoint of SDXL or Stable Diffusion 1.5: it has no weights named",
        "half.safetensors": "cannot be read: .* Give a whole .safetensors file",
        "sdxl.ckpt": "is a file that is not read. Give a folder in diffusers' layout, or a single-file .*safetensors",
        "nowhere.safetensors": "is not there. '.*nowhere.safetensors' is no file",
        f"{bases / 'sdxl-configs'}:nowhere.safetensors": "is not there. 'nowhere.safetensors' is no file",
        f"nowhere:{bases / 'sdxl.safetensors'}": "is not there. 'nowhere' is no folder",
    }.items():
        with pytest.raises(UserError, match=message):
            render(base if ":" in base else tmp_path / base, tmp_path / "a.png")
