"""`--base FILE.safetensors`: a tiny checkpoint in the original single-file layout renders what its folder renders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.single_files import original_layout
from helpers.text_encoders import hub_repository
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file

from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.generate import generate
from debias_diffusion.app.prompt_options import GenerateConfig
from debias_diffusion.app.tokens import load_tokenizers
from debias_diffusion.encoders.spec import ORIGINAL, EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.rendered import image_task, render_all
from debias_diffusion.eval.options import GenerationConfig
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.pipelines.rendering.options import Sampling, split_base
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.processes import Processes
from debias_diffusion.text.prompt import read
from debias_diffusion.text.tokens import clip_tokenizer

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
    settings = {"prompt": "a red cat", "steps": 1, "device": "cpu"}
    paths = [generate(GenerateConfig(base=str(bases / "sdxl"), output=str(tmp_path / "folder.png"), **settings))]
    paths += [generate(GenerateConfig(base=base, output=str(tmp_path / "file.png"), low_memory=True, **settings))]
    config = GenerationConfig([ORIGINAL], base=base, output=str(tmp_path / "out"), data="", steps=1)
    rendered, digests = render_all(config, Processes.connect("cpu"), [image_task(config, "a", "a red cat", 0)])
    paths += next(iter(rendered.values())).files
    assert len({Image.open(path).tobytes() for path in paths}) == 1
    assert digests["base"] == Checkpoint.parse(base).digest
    demo = DemoModels(base, [ORIGINAL], CPU)
    assert demo.size == (64, 64) and demo.base == "sdxl.safetensors"


def test_its_digest_is_of_file_and_configurations(bases, tmp_path):
    configs = shutil.copytree(bases / "sdxl-configs", tmp_path / "configs")
    file = shutil.copy(bases / "sdxl.safetensors", tmp_path / "sdxl.safetensors")
    digests = {Checkpoint.parse(base).digest for base in (single(bases), f"{configs}:{file}")}
    assert len(digests) == 1
    for changed in (configs / "model_index.json", file):
        changed.write_bytes(b"{}")
        digests.add(Checkpoint.parse(f"{configs}:{file}").digest)
    assert len(digests) == 3


def test_the_configuration_comes_from_the_hub_or_the_error_says_what_to_give(bases, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub_id, file = "stabilityai/stable-diffusion-xl-base-1.0", tmp_path / "xl.safetensors"
    save_file(load_file(bases / "sdxl.safetensors") | {XL_KEY: torch.zeros(1)}, file)
    for base, more in ((file, f".*'FOLDER:{file}'"), (hub_id, "")):
        with pytest.raises(UserError, match=f"'{hub_id}' has no readable .* hub cannot be reached{more}"):
            Checkpoint.parse(base).check_kind()
    shutil.copytree(bases / "sdxl-configs", hub_repository(tmp_path, hub_id), dirs_exist_ok=True)
    checkpoint = Checkpoint.parse(file)
    assert checkpoint.check_kind() == "StableDiffusionXLPipeline" and checkpoint.size == (64, 64)
    pipe, expected = (load_pipeline(base, None, CPU) for base in (file, bases / "sdxl"))
    assert all(map(torch.equal, pipe.text_encoder_2.parameters(), expected.text_encoder_2.parameters()))


V, ZERO_SNR = {"prediction_type": "v_prediction"}, {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


@pytest.mark.parametrize(
    ("marks", "metadata", "expected"),
    [
        ((), {"modelspec.prediction_type": "epsilon"}, {"prediction_type": "epsilon"}),
        (("v_pred",), {"modelspec.prediction_type": "epsilon"}, V),  # of the checkpoint that was merged first
        (("v_pred", "ztsnr"), {}, V | ZERO_SNR),
        ((), {"modelspec.prediction_type": "v"}, V),
        ((), {"modelspec.predict_key": "v"}, V),
        (("edm_vpred.sigma_max",), {}, "EDM's v"),
        ((), {"modelspec.prediction_type": "flow"}, "'flow', which is not read"),
    ],
)
def test_what_a_file_says_of_its_scheduler_is_followed_or_refused(bases, tmp_path, marks, metadata, expected):
    weights = load_file(bases / "sdxl.safetensors") | {mark: torch.tensor([]) for mark in marks}
    save_file(weights, tmp_path / "marked.safetensors", metadata | {"ss_max_token_length": "225"})
    base = f"{bases}/sdxl-configs:{tmp_path}/marked.safetensors"
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            load_pipeline(base, None, CPU)
        return
    renderer = Renderer(base, Sampling(scheduler="DPMSolverMultistepScheduler"), CPU)
    pipe = renderer.pipeline(EncoderSpec.parse(ORIGINAL))
    says = Checkpoint.parse(base).says()
    assert says.items() >= expected.items() and says["positions of text_encoder_2"] == 77
    assert says["ss_max_token_length"] == "225"
    for config in (load_pipeline(base, None, CPU).scheduler.config, pipe.scheduler.config):
        assert {name: config[name] for name in expected} == expected


def test_flow_matching_in_a_folder_is_refused(bases, tmp_path, copy_of):
    folder = copy_of(bases / "sdxl", tmp_path / "flow")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="predicts 'the velocity of flow matching', which is not read"):
        load_pipeline(folder, None, CPU)


def test_a_file_may_name_its_drive(tmp_path, monkeypatch):
    """Of `FOLDER:FILE`, whose parts may be as on Windows."""
    (tmp_path / "C:" / "m").mkdir(parents=True)
    (tmp_path / "C:" / "m" / "x.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for folder in ("owner/name", "C:"):
        assert split_base(f"{folder}:C:/m/x.safetensors") == (folder, Path("C:/m/x.safetensors"))


def test_other_files_and_incomplete_ones_are_refused(bases, tmp_path):
    weights = load_file(bases / "sdxl.safetensors")
    incomplete = {name: weight for name, weight in weights.items() if "middle_block.1.norm.weight" not in name}
    save_file(incomplete, tmp_path / "unet.safetensors")
    save_file({"lora_unet.down.weight": torch.zeros(1)}, tmp_path / "lora.safetensors")
    (tmp_path / "old.ckpt").write_bytes(b"PK")
    (tmp_path / "half.safetensors").write_bytes((bases / "sdxl.safetensors").read_bytes()[:99])
    for base, message in {
        f"{bases}/sdxl-configs:{tmp_path}/unet.safetensors": "lacks weights of its configuration",
        f"{tmp_path}/lora.safetensors": "is no single-file checkpoint of SDXL or Stable Diffusion 1.5",
        f"{tmp_path}/half.safetensors": "cannot be read",
        f"{bases}/sdxl-configs:nowhere.safetensors": "is not there",
        f"{tmp_path}/old.ckpt": "is a pickle, .* Convert it to .safetensors",
        f"{bases}/sdxl-configs:{tmp_path}/old.ckpt": "is a pickle, .* Convert it to .safetensors",
    }.items():
        with pytest.raises(UserError, match=message):
            load_pipeline(base, None, CPU)


def test_a_first_encoder_of_other_positions_than_configured_is_read(tmp_path):
    """As in files into which people put a CLIP-L of 248 positions; diffusers knows the usual configuration alone."""
    parts = tiny_sdxl.sdxl_parts(64, vocabulary=clip_tokenizer)
    parts["text_encoder_2"] = tiny_sdxl.text_encoder_2(vocabulary=clip_tokenizer, width=80)  # the wider
    parts["unet"] = tiny_sdxl.unet(64 + 80 - tiny_sdxl.WIDTH_2)
    tiny_sdxl.assemble(StableDiffusionXLPipeline, parts).save_pretrained(tmp_path / "usual")
    parts["text_encoder"] = tiny_sdxl.text_encoder(64, 248, seed=5, vocabulary=clip_tokenizer)
    save_file(original_layout(parts), tmp_path / "longer.safetensors")
    base = f"{tmp_path / 'usual'}:{tmp_path / 'longer.safetensors'}"
    pipe = load_pipeline(base, None, CPU)
    weights, expected = pipe.text_encoder.state_dict(), parts["text_encoder"].state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert pipe.prompt_layout("red cat " * 60).chunks == (1, 3)
    encoders = load_tokenizers(Checkpoint.parse(base), EncoderSpec.parse(ORIGINAL))
    assert read(["red cat " * 60], None, encoders).layout().chunks == (1, 3)
