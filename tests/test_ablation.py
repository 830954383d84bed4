"""Suppressed heads against their definition; an ablated model in every format: what other programs run, and what is
said where they do not run the ablation."""

import sys
from types import SimpleNamespace

import open_clip
import pytest
import torch
from helpers.ranks import forked
from helpers.suppression import literally
from helpers.tiny_clip import save_tiny_clip
from helpers.training_runs import config
from transformers import AutoModel, CLIPModel, CLIPProcessor, dynamic_module_utils

from debias_diffusion.ablation.heads import Ablation
from debias_diffusion.ablation.saved import FILE
from debias_diffusion.ablation.suppression import Suppressed
from debias_diffusion.app.export import export
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.blocks import causal_attention, full_attention
from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.training.two_tower import train
from research.ablate.command import write_ablation

pytestmark = pytest.mark.usefixtures("no_grad")
COMMAND = "python -m research ablate --model base"
CAPTIONS = ["A red cat.", "Two dogs sit on a very long green bench beside the river.", ""]
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MASKS = {
    "image": torch.tensor([[True, False], [False, True]]),
    "text": torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool),
}
ABLATIONS = {
    "image": Ablation("image", ((1.0, 0.1), (0.0, 0.5))),
    "text": Ablation.of_rows("text", 1.0 - MASKS["text"].double()),
    "soft": Ablation("text", ((1.0,) * 4, (1.0, 1.0, 0.1, 1.0), (1.0,) * 4)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> SimpleNamespace:
    """A base model, and folders of its ablations; in those of `mean_` heads always give a mean."""
    folder = tmp_path_factory.mktemp("ablations")
    base = save_tiny_clip(folder / "base")
    means = {f"mean_{tower}": replaced(load_two_tower(base), tower) for tower in MASKS}
    for name, ablation in (ABLATIONS | means).items():
        (folder / name).mkdir()
        write_ablation(folder / name / FILE, base, load_two_tower(base), ablation, command=COMMAND)
    return SimpleNamespace(base=base, **{name: str(folder / name) for name in ABLATIONS | means})


def replaced(backbone: Backbone, tower: str) -> Ablation:
    width = backbone.tower(tower).transformer.resblocks[0].attn.head_dim
    means = torch.randn(*MASKS[tower].shape, width, generator=torch.Generator().manual_seed(1))
    return Ablation.of_rows(tower, 1.0 - MASKS[tower].double(), means)


def features(model) -> tuple[torch.Tensor, torch.Tensor]:
    return model.encode_image(PIXELS), model.encode_text(model.tokenize(CAPTIONS))


def close(actual, expected, atol=1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ---- heads that are suppressed


def drawn(first: float) -> list[torch.Tensor]:
    """Query, key and value in float64; `first` makes token 0 draw more attention, or less."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 7, 3, 4, generator=generator, dtype=torch.float64)
    key[:, 0] = first * query.mean(dim=1)
    query[..., 0] += abs(first)
    return [part.clone().requires_grad_() for part in (query, key, value)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0.0, 30.0, -30.0])
@torch.enable_grad()
def test_suppression_is_the_papers_in_value_and_gradient(causal, first):
    parts, beta = drawn(first), torch.tensor([0.1, 0.7, 1.0], dtype=torch.float64, requires_grad=True)
    suppressed = Suppressed(beta, causal_attention if causal else full_attention)
    results = []
    for result in (literally(*parts, beta, causal), suppressed(*parts)):
        results.append((result, *torch.autograd.grad(result.square().sum(), [*parts, beta])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["image", "soft"])
def test_plain_open_clip_runs_suppressed_heads_as_ordinary_ones_and_is_said_to(folders, name, tmp_path, capsys):
    base, ablated = load_two_tower(folders.base), load_two_tower(getattr(folders, name))
    export(ExportConfig(str(tmp_path / "out"), getattr(folders, name), "open_clip"))
    assert "Plain open_clip runs it UNABLATED" in capsys.readouterr().out
    again = load_two_tower(tmp_path / "out")
    assert all(map(torch.equal, features(again), features(ablated)))
    assert again.digest() == ablated.digest() != base.digest()
    plain = open_clip.create_model(f"local-dir:{tmp_path / 'out'}").eval()
    theirs = plain.encode_image(PIXELS), plain.encode_text(base.tokenize(CAPTIONS).padded())
    close(theirs, features(base))
    assert max((a - b).abs().max() for a, b in zip(theirs, features(ablated), strict=True)) > 1e-3


def test_transformers_suppresses_image_heads_without_this_package(folders, tmp_path, capsys):
    output = tmp_path / "clip"
    export(ExportConfig(str(output), folders.image, "clip"))
    assert f"AutoModel.from_pretrained('{output}', trust_remote_code=True)" in capsys.readouterr().out
    ablated = load_two_tower(folders.image)
    images, texts = features(ablated)
    inputs = {"pixel_values": PIXELS, "input_ids": ablated.tokenize(CAPTIONS).padded()}

    def run(_) -> dict:
        for name in [name for name in sys.modules if name.partition(".")[0] == "debias_diffusion"]:
            sys.modules[name] = None
        dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path / "modules")
        with pytest.raises(ImportError):
            import debias_diffusion.clip  # noqa: F401
        model, info = AutoModel.from_pretrained(output, trust_remote_code=True, output_loading_info=True)
        assert not any(info.values()), info
        CLIPProcessor.from_pretrained(output)
        with torch.no_grad():
            return model.eval()(**inputs).logits_per_image, model.get_image_features(PIXELS).pooler_output

    ((logits, theirs),) = forked(1, run, group=False)
    close(theirs, images)
    assert (images - features(load_two_tower(folders.base))[0]).abs().max() > 1e-2
    unit = torch.nn.functional.normalize
    close(logits, ablated.logit_scale.exp() * unit(images) @ unit(texts).T, atol=1e-3)
    # Nobody runs it unablated without being asked.
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModel.from_pretrained(output, trust_remote_code=False)

    again = load_two_tower(output)
    assert all(map(torch.equal, features(again), features(ablated)))
    assert again.image_attention == ablated.image_attention


def test_a_soft_text_head_is_refused_where_only_weights_leave_and_no_ablated_model_is_trained(folders, world, tmp_path):
    for to, name in (("clip", "out"), ("transformers", "out"), ("comfyui", "out.safetensors")):
        with pytest.raises(UserError, match="Head 1-2 of the text tower is suppressed .*--beta 0"):
            export(ExportConfig(str(tmp_path / name), folders.soft, to))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="suppressed attention heads"):
        train(config((folders.image, *world[1:]), tmp_path / "run"))


# ---- heads that give nothing, or their mean: ordinary weights everywhere


@pytest.mark.parametrize("name", ["text", "mean_text", "mean_image"])
def test_every_export_holds_folded_heads_as_ordinary_weights(folders, name, tmp_path, capsys):
    source, base = getattr(folders, name), load_two_tower(folders.base)
    ours = load_two_tower(source)
    rows, expected = ours.tokenize(CAPTIONS).padded(), features(ours)
    unchanged = [torch.equal(*pair) for pair in zip(expected, features(base), strict=True)]
    assert unchanged == [name != "mean_image", name == "mean_image"]
    for to in ("open_clip", "clip"):
        export(ExportConfig(str(tmp_path / to), source, to))
        assert not list((tmp_path / to).glob("*.py"))
    assert "UNABLATED" not in capsys.readouterr().out
    plain = open_clip.create_model(f"local-dir:{tmp_path / 'open_clip'}").eval()
    close((plain.encode_image(PIXELS), plain.encode_text(rows)), expected)
    model, info = CLIPModel.from_pretrained(tmp_path / "clip", output_loading_info=True)
    assert not any(info.values()) and model.config.model_type == "clip"
    theirs = model.get_image_features(PIXELS).pooler_output, model.get_text_features(rows).pooler_output
    close(theirs, expected)
    ours.save(tmp_path / "noted")
    export(ExportConfig(str(tmp_path / "text"), source))
    for encoder, tokenizer in map(load_text_encoder, (source, tmp_path / "text", tmp_path / "noted")):
        ids = tokenizer(CAPTIONS, padding="max_length", return_tensors="pt").input_ids
        states = encoder(ids, output_hidden_states=True)
        close(states.pooler_output @ ours.text.tower.text_projection, expected[1])
        # SDXL's UNet reads these.
        penultimate = ours.text.penultimate_states(ours.tokenize(CAPTIONS), pad=tokenizer.pad_token_id)
        close(states.hidden_states[-2], penultimate)
