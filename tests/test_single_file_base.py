"""`--base FILE.safetensors`: a tiny checkpoint in the original single-file layout renders what its folder renders."""

import re
import shutil

import pytest
import tiny_sdxl
import torch
from diffusers import StableDiffusionPipeline
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from debias_diffusion.app.demo.models import Models
from debias_diffusion.app.generate import GenerateConfig, generate
from debias_diffusion.errors import UserError
from debias_diffusion.eval.common.processes import Processes
from debias_diffusion.eval.pictures.drawing import ORIGINAL, Drawing, DrawingSettings, Subject
from debias_diffusion.pipelines.loading import check_base, default_size, find_checkpoint, load_pipeline, model_digest

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
LDM = DIFFUSERS_TO_LDM_MAPPING
XL_KEY = "conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias"  # by which diffusers knows an SDXL

# Names of diffusers -> names of the original layout, for the blocks of the tiny models.
RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1"}
RESNET |= {"norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
UNET = {"down_blocks.0.resnets.0": "input_blocks.1.0", "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op"}
UNET |= {"down_blocks.1.resnets.0": "input_blocks.3.0", "down_blocks.1.attentions.0": "input_blocks.3.1"}
UNET |= {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
UNET |= {"mid_block.resnets.1": "middle_block.2", "up_blocks.0.upsamplers.0": "output_blocks.1.2"}
UNET |= {f"up_blocks.0.attentions.{i}": f"output_blocks.{i}.1" for i in range(2)}
UNET |= {f"up_blocks.{i // 2}.resnets.{i % 2}": f"output_blocks.{i}.0" for i in range(4)}
VAE = {"mid_block.attentions.0": "mid.attn_1", "down_blocks": "down", "to_q": "q", "to_k": "k", "to_v": "v"}
VAE |= {f"mid_block.resnets.{i}": f"mid.block_{i + 1}" for i in range(2)} | {"resnets": "block"}
VAE |= {f"up_blocks.{i}": f"up.{3 - i}" for i in range(4)} | {"group_norm": "norm", "to_out.0": "proj_out"}
VAE |= {"downsamplers.0": "downsample", "upsamplers.0": "upsample", "conv_shortcut": "nin_shortcut"}


def renamed(name, rules):
    for new, old in rules.items():
        name = name.replace(f"{new}.", f"{old}.")
    return name


def unet_name(name):
    known = {new: old for part in LDM["unet"].values() for new, old in part.items()}
    return known.get(name) or renamed(name, UNET | (RESNET if ".resnets." in name else {}))


def open_clip(weights):
    """An encoder's weights as open_clip has them, with query, key and value in one matrix."""
    known, rules, original = LDM["openclip"]["layers"], LDM["openclip"]["transformer"], {}
    for name, weight in weights.items():
        if name in known:
            original[known[name]] = weight.T if "projection" in name else weight
        elif ".q_proj." in name:
            parts = [weights[name.replace(".q_", f".{kind}_")] for kind in "qkv"]
            original[f"transformer.{replaced(name, rules).replace('.q_proj.', '.in_proj_')}"] = torch.cat(parts)
        elif not re.search(r"\.[kv]_proj\.", name):
            original[f"transformer.{replaced(name, rules)}"] = weight
    return original


def replaced(name, rules):
    for new, old in rules.items():
        name = name.replace(new, old)
    return name


def text_weights(encoder):
    """With the prefix that older versions of transformers had in all text encoders."""
    state = encoder.state_dict().items()
    return {name if name.startswith("text_") else f"text_model.{name}": weight for name, weight in state}


def original_layout(parts):
    """The weights of an SDXL's or Stable Diffusion 1.5's parts by their names in a single file."""
    weights = {f"model.diffusion_model.{unet_name(name)}": w for name, w in parts["unet"].state_dict().items()}
    vae = parts["vae"].state_dict().items()
    weights |= {f"first_stage_model.{LDM['vae'].get(name) or renamed(name, VAE)}": w for name, w in vae}
    first = "conditioner.embedders.0.transformer." if "text_encoder_2" in parts else "cond_stage_model.transformer."
    weights |= {f"{first}{name}": weight for name, weight in text_weights(parts["text_encoder"]).items()}
    if "text_encoder_2" in parts:
        second = open_clip(text_weights(parts["text_encoder_2"]))
        weights |= {f"conditioner.embedders.1.model.{name}": weight for name, weight in second.items()}
    return {name: weight.clone().contiguous() for name, weight in weights.items()}


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
    return generate(GenerateConfig("a red cat", str(base), output=str(path), **settings)).read_bytes()


@pytest.mark.parametrize("name", ["sdxl", "sd15"])
def test_a_single_file_is_the_folder_with_its_weights(bases, name):
    folder, file = (load_pipeline(base, None, CPU) for base in (bases / name, single(bases, name)))
    for part in ("unet", "vae", "text_encoder", "text_encoder_2")[: None if name == "sdxl" else 3]:
        weights, expected = (getattr(pipe, part).state_dict() for pipe in (file, folder))
        assert len(weights) > 10 and weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected), part
    assert default_size(single(bases, name)) == default_size(bases / name) == (64, 64)


def test_generate_the_evaluations_and_the_demo_read_it(bases, tmp_path):
    folder, file = bases / "sdxl", single(bases)
    pixels = [
        render(base, tmp_path / "a.png", **settings).partition(b"IDAT")[2]
        for settings in ({}, {"low_memory": True}, {"encoder_2": "stretch", "dtype": "bfloat16"})
        for base in (folder, file)
    ]
    assert pixels[0] == pixels[1] == pixels[2] == pixels[3] and pixels[4] == pixels[5] != pixels[0]
    images = []
    for place, base in enumerate((folder, file)):
        drawing = Drawing(DrawingSettings(str(base), 1), Processes("cpu"))
        images += drawing.draw(ORIGINAL, tmp_path / str(place), [Subject("a", "a red cat", 0)], "")
        assert drawing.digests["base"] == model_digest(str(base))
    assert images[0].read_bytes() == images[1].read_bytes()
    demo = Models(file, [ORIGINAL], CPU)
    assert demo.size == (64, 64) and demo.base == "sdxl.safetensors"


def test_its_digest_is_of_file_and_configurations(bases, tmp_path):
    shutil.copytree(bases / "sdxl-configs", tmp_path / "configs")
    shutil.copy(bases / "sdxl.safetensors", tmp_path)
    base = f"{tmp_path / 'configs'}:{tmp_path / 'sdxl.safetensors'}"
    digests = [model_digest(single(bases)), model_digest(base)]
    (tmp_path / "configs" / "model_index.json").write_text("{}")
    digests.append(model_digest(base))
    (tmp_path / "sdxl.safetensors").write_bytes(b"other weights")
    digests.append(model_digest(base))
    assert digests[0] == digests[1] and len(set(digests)) == 3


def changed_file(bases, path, removed="nothing", **added):
    weights = load_file(bases / "sdxl.safetensors") | added
    save_file({name: weight for name, weight in weights.items() if removed not in name}, path)
    return f"{bases / 'sdxl-configs'}:{path}"


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("middle_block.1.norm.weight", "lacks weights of its configuration's models"),
        ("embedders.0.transformer.text_model.final", "lacks weights of its configuration's models"),
        ("conditioner.embedders.1", "could not be loaded: .* Weights for this component appear to be missing"),
        ("first_stage_model", "could not be loaded: "),
    ],
)
def test_what_a_file_lacks_is_not_made_up(bases, tmp_path, removed, message):
    base = changed_file(bases, tmp_path / "a.safetensors", removed)
    with pytest.raises(UserError, match=rf"^The SDXL checkpoint '.*a\.safetensors' {message}"):
        load_pipeline(base, None, CPU)


def test_values_that_are_not_finite_are_found(bases, tmp_path):
    name = "model.diffusion_model.out.2.weight"
    broken = load_file(bases / "sdxl.safetensors")[name] * float("nan")
    with pytest.raises(UserError, match="a.safetensors/unet' has weights that give no results"):
        load_pipeline(changed_file(bases, tmp_path / "a.safetensors", **{name: broken}), None, CPU)


def test_the_configuration_comes_from_the_hub_or_the_error_says_what_to_give(bases, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    changed_file(bases, tmp_path / "xl.safetensors", **{XL_KEY: torch.zeros(1)})
    for file, hub_id in (
        (tmp_path / "xl.safetensors", "stabilityai/stable-diffusion-xl-base-1.0"),
        (bases / "sd15.safetensors", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
    ):
        message = (
            f"needs the configuration and tokenizers of '{hub_id}', which cannot .*'FOLDER:{re.escape(str(file))}'"
        )
        with pytest.raises(UserError, match=message):
            check_base(file)
    cached = tmp_path / "models--stabilityai--stable-diffusion-xl-base-1.0"
    shutil.copytree(bases / "sdxl-configs", cached / "snapshots" / "1234")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1234")
    assert find_checkpoint(tmp_path / "xl.safetensors").folder == str(cached / "snapshots" / "1234")
    assert check_base(tmp_path / "xl.safetensors") == "StableDiffusionXLPipeline"


def test_other_files_are_refused(bases, tmp_path):
    save_file({"lora_unet.down.weight": torch.zeros(1)}, tmp_path / "lora.safetensors")
    (tmp_path / "half.safetensors").write_bytes((bases / "sdxl.safetensors").read_bytes()[:99])
    (tmp_path / "sdxl.ckpt").touch()
    for base, message in {
        "lora.safetensors": "is no single-file checkpoint of SDXL or Stable Diffusion 1.5: it has no weights named",
        "half.safetensors": "cannot be read: .* Give a whole .safetensors file",
        "sdxl.ckpt": "is a file that is not read. Give a folder in diffusers' layout, or a single-file .*safetensors",
        "nowhere.safetensors": "is not there: '.*nowhere.safetensors' is no file",
        f"{bases / 'sdxl-configs'}:nowhere.safetensors": "is not there: 'nowhere.safetensors' is no file",
        f"nowhere:{bases / 'sdxl.safetensors'}": "needs the configuration and tokenizers of 'nowhere', which cannot",
    }.items():
        with pytest.raises(UserError, match=message):
            render(base if ":" in base else tmp_path / base, tmp_path / "a.png")
