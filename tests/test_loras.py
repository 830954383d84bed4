"""LoRAs that prompts name, and alternatives in prompts: each image is drawn with its own, in whatever order."""

import copy

import numpy as np
import pytest
import torch
from helpers.tiny_sdxl import sdxl_parts
from PIL import Image
from safetensors.torch import load_file, save_file

from debias_diffusion.app.generate import generate
from debias_diffusion.app.like import take_settings
from debias_diffusion.app.prompt_options import GenerateConfig
from debias_diffusion.app.prompts import expand
from debias_diffusion.errors import UserError
from debias_diffusion.files import sha256
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.pipelines.rendering.loras import Lora, LoraFolder, lora_tags, read_lora
from debias_diffusion.pipelines.rendering.png import read_settings
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt, ImageTask

CPU = torch.device("cpu")
LAYERS = {
    "unet": "mid_block.attentions.0.transformer_blocks.0.attn2.to_v",
    "text_encoder": "encoder.layers.1.self_attn.v_proj",
    "text_encoder_2": "encoder.layers.1.self_attn.v_proj",
}


def write_lora(path, seed, models=tuple(LAYERS)):
    generator, parts, state = torch.Generator().manual_seed(seed), sdxl_parts(), {}
    for name in models:
        tower = getattr(parts[name], "text_model", parts[name])
        layer = tower.get_submodule(LAYERS[name])
        prefix = f"{name}.{'' if name == 'unet' else 'text_model.'}{LAYERS[name]}"
        state[f"{prefix}.lora_A.weight"] = 9 * torch.randn(2, layer.in_features, generator=generator)
        state[f"{prefix}.lora_B.weight"] = torch.randn(layer.out_features, 2, generator=generator)
    path.parent.mkdir(exist_ok=True, parents=True)
    save_file(state, path)


def kohyas(seed, layers, alphas):
    """A LoRA of the second encoder's layers as kohya's scripts write it, with ranks that differ."""
    generator, tower, state = torch.Generator().manual_seed(seed), sdxl_parts()["text_encoder_2"].text_model, {}
    for rank, (name, alpha) in enumerate(zip(layers, alphas, strict=True), 2):
        layer, stem = tower.get_submodule(name), f"lora_te2_text_model_{name.replace('.', '_')}"
        state[f"{stem}.lora_down.weight"] = torch.randn(rank, layer.in_features, generator=generator)
        state[f"{stem}.lora_up.weight"] = torch.randn(layer.out_features, rank, generator=generator)
        state[f"{stem}.alpha"] = torch.tensor(alpha)
    return state


_V, _OUT, _FC = (f"encoder.layers.1.{name}" for name in ("self_attn.v_proj", "self_attn.out_proj", "mlp.fc1"))


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    write_lora(folder / "a.safetensors", 1)
    write_lora(folder / "below" / "b, c.safetensors", 2, ("unet",))
    write_lora(folder / "twice.safetensors", 3)
    write_lora(folder / "below" / "twice.safetensors", 3)
    whole = kohyas(4, (_OUT, _V, _FC), (1.0, 6.0, 2.0))
    save_file(whole, folder / "whole.safetensors", {"ss_output_name": "its alias"})
    stem = next(iter(whole)).partition(".")[0]
    refused = {
        "flux": {"transformer.x": torch.zeros(2)},
        "dora": whole | {f"{stem}.dora_scale": torch.ones(4, 1)},
        "bundle": whole | {"bundle_emb.word.clip_l": torch.zeros(2, 32)},
        "blocks": {"unet.output_blocks.1.1.proj_in.lora_up.weight": torch.zeros(2, 2)},
        "part": kohyas(4, (_V, _FC), (1.0, 1.0)),
        "wide": whole | {f"{stem}.lora_down.weight": torch.zeros(2, 99)},
    }
    for name, state in refused.items():
        save_file(state, folder / f"{name}.safetensors")
    (folder / "broken.safetensors").write_bytes(b"no weights")
    return str(folder)


A, B = "<lora:a:0.5:-0.7>", "<lora:b, c>"
PROMPTS = [f"a cat {A}", "a cat", f"{A}a {B} cat"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, sdxl_folder, loras):
    """Draws prompts with equal noise into a folder; returns the images by prompt."""
    root = tmp_path_factory.mktemp("drawn")

    def draw(name, prompts, **options):
        (root / f"{name}.csv").write_text("prompt,seed\n" + "".join(f'"{prompt}",3\n' for prompt in prompts))
        where = {"base": str(sdxl_folder), "device": "cpu", "steps": 1, "loras": loras, "output": str(root / name)}
        folder = generate(GenerateConfig(None, prompts=str(root / f"{name}.csv"), **where | options))
        return dict(zip(prompts, sorted(folder.glob("0*.png")), strict=True))

    return draw


def pixels(path):
    return np.asarray(Image.open(path)).astype(int)


def test_each_image_has_the_loras_of_its_prompt(drawn, loras, sdxl_folder):
    images = drawn("order", PROMPTS)
    again = drawn("other-order", PROMPTS[::-1], reading="a1111", emphasis="none", low_memory=True, batch=2)
    pipe = load_pipeline(sdxl_folder, None, CPU)
    pipe.load_lora_weights(f"{loras}/a.safetensors", adapter_name="a")
    pipe.load_lora_weights(f"{loras}/below/b, c.safetensors", adapter_name="b")
    weights, expected = {"unet": -0.7, "text_encoder": 0.5, "text_encoder_2": 0.5}, []
    for prompt, used in zip(PROMPTS, ({"a": weights}, {}, {"a": weights, "b": 1.0}), strict=True):
        (pipe.enable_lora if used else pipe.disable_lora)()
        if used:
            pipe.set_adapters([*used], copy.deepcopy([*used.values()]))
        noise = torch.Generator().manual_seed(3)
        call = {"num_inference_steps": 1, "guidance_scale": 7.0, "generator": noise, "height": 64, "width": 64}
        expected.append(np.asarray(pipe("a cat", **call).images[0]).astype(int))
        assert np.array_equal(pixels(images[prompt]), expected[-1]), prompt
        assert np.array_equal(pixels(again[prompt]), expected[-1]), prompt
    assert all(abs(image - expected[0]).max() > 20 for image in expected[1:])
    digests = [read_settings(images[prompt]).get("loras") for prompt in PROMPTS]
    a, b = sha256(f"{loras}/a.safetensors"), sha256(f"{loras}/below/b, c.safetensors")
    assert digests == [{"a": a}, None, {"a": a, "b, c": b}]


def test_a_replaced_file_is_another_lora(drawn, tmp_path, capsys):
    write_lora(tmp_path / "loras" / "a.safetensors", 1)
    path = drawn("replaced", PROMPTS[:1], loras=str(tmp_path / "loras"))[PROMPTS[0]]
    write_lora(tmp_path / "new" / "a.safetensors", 2)
    with pytest.raises(UserError, match="00000-3-a-cat.*loras was"):
        drawn("replaced", PROMPTS[:1], loras=str(tmp_path / "new"))
    again = {"like": str(path), "base": read_settings(path)["base"], "device": "cpu", "output": str(tmp_path / "b.png")}
    with_it = generate(GenerateConfig(None, loras=str(tmp_path / "loras"), **again))
    assert with_it.read_bytes() == path.read_bytes()
    assert take_settings(GenerateConfig(None, **again)).prompt == "a cat"
    assert "<lora:a:0.5:-0.7>: give the folder" in capsys.readouterr().out


def test_every_layer_has_its_own_alpha_and_rank(loras, sdxl_folder):
    """As trainers mean it: W + weight * alpha / rank * up @ down. The file is found by its alias."""
    pipe, expected = (load_pipeline(sdxl_folder, None, CPU) for _ in range(2))
    folder = LoraFolder(loras)
    folder.apply(pipe, [read_lora("<lora:its alias:0.5>")])
    state = load_file(folder.file("whole"))
    for name in (_OUT, _V, _FC):
        stem = f"lora_te2_text_model_{name.replace('.', '_')}"
        down, up, alpha = (state[f"{stem}.{part}"] for part in ("lora_down.weight", "lora_up.weight", "alpha"))
        with torch.no_grad():
            expected.text_encoder_2.text_model.get_submodule(name).weight += 0.5 * alpha / len(down) * up @ down
    states, wanted = (each.encode_prompt("a red cat", do_classifier_free_guidance=False) for each in (pipe, expected))
    assert torch.allclose(states[0], wanted[0], atol=1e-5)
    assert (states[0] - load_pipeline(sdxl_folder, None, CPU).encode_prompt("a red cat")[0]).abs().max() > 0.1


def test_tags():
    prompt = "a #1 poster <lora:x:1> <hypernet:y:1>, <lyco:w:1>, <lora:z"
    assert lora_tags(prompt, "overlap") == lora_tags(prompt, "comfyui") == ["<lora:x:1>", "<lyco:w:1>"]
    assert lora_tags(f"# note <lora:v:1>\n{prompt}", "a1111") == []  # a comment ends with its line
    assert lora_tags(f"# note <lora:v:1>\n{prompt[2:]}".replace("#1", ""), "a1111") == ["<lora:x:1>", "<lyco:w:1>"]
    tags = {"<lora:x>": Lora("x", 1.0, 1.0), "<lora:x:.5>": Lora("x", 0.5, 0.5), "<lora:x:1:-2>": Lora("x", 1, -2)}
    tags |= {"<lyco:x:te=0.5>": Lora("x", 0.5, 0.5), "<lora:x:0.3:te=0.5:unet=0>": Lora("x", 0.5, 0.0)}
    assert {tag: read_lora(tag) for tag in tags} == tags


REFUSED = {
    "<lora:aa:1>": "'aa' is not among .* Did you mean a",
    "<lora:../loras/a:1>": "'../loras/a' is not among",
    "<lora:twice:1>": r"'twice' may be .*below/twice.safetensors or .*twice.safetensors",
    "<lora:a:nan>": "the weight of 'a' is nan",
    "<lora:a:half>": "cannot be read: could not convert",
    "<lora:a:1:1:32>": "only the weights of the text encoders",
    "<lora:a:1:lbw=1>": "only the weights of the text encoders",
    "<lora:flux:1>": "flux.safetensors' cannot be used: 1 of its 1 tensors are not those .* 'transformer.x'",
    "<lora:dora:1>": "1 of its 7 tensors .*dora_scale'; DoRA",
    "<lora:bundle:1>": "1 of its 7 tensors .*'bundle_emb.word.clip_l'; .* bundled embeddings are not read",
    "<lora:blocks:1>": "1 of its 1 tensors .*'unet.output_blocks.1.1",
    "<lora:part:1>": "diffusers loads 1 of its 2 layers",
    "<lora:wide:1>": "its layers have other sizes than this checkpoint's",
    "<lora:broken:1>": "broken.safetensors' cannot be used: ",
}


@pytest.mark.parametrize("tag", REFUSED)
def test_loras_that_cannot_be_used_are_named(drawn, tag):
    with pytest.raises(UserError, match=REFUSED[tag]):
        drawn("refused", [f"a cat {tag}"])


# ---- alternatives


def task(text, seed=0, negative=None):
    return ImageTask("00000", ImagePrompt(text, seed, negative), "line 1")


def test_alternatives_and_wildcards_are_drawn_by_the_seed(tmp_path):
    pytest.importorskip("dynamicprompts")
    (tmp_path / "colour.txt").write_text("red\nblue\n")
    drawn, again = (
        [expand(task("a __colour__ {cat|dog} # 1", seed, "{grey|}"), tmp_path) for seed in range(30)] for _ in range(2)
    )
    assert {each.prompt.prompt.split("#")[0].strip() for each in drawn} == {
        f"a {colour} {animal}" for colour in ("red", "blue") for animal in ("cat", "dog")
    }
    assert {each.prompt.negative_prompt for each in drawn} == {"grey", ""} and drawn == again
    for text in ("# a {cat", "a _b_ c__d", "(cat:1.2) [a|b]"):
        assert expand(task(text), tmp_path) == task(text)
    for text, message in (("{|}", "The prompt is empty"), ("{" * 3000 + "a|b" + "}" * 3000, "line 1 cannot be read")):
        with pytest.raises(UserError, match=message):
            expand(task(text), tmp_path)
