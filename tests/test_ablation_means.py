"""Heads replaced by their mean: what the means are, the same features as ordinary weights, and every export."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch
from helpers.tiny_clip import save_tiny_clip, tiny_clip
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

from debias_diffusion.ablation.heads import Ablation, image_means, text_means
from debias_diffusion.ablation.saved import FILE, write_ablation
from debias_diffusion.app.ablate import ablate
from debias_diffusion.app.export import export
from debias_diffusion.app.options import AblateConfig, ExportConfig
from debias_diffusion.encoders import load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.head_search.population import Population, TextPopulation
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.models.blocks import before_attention, full_attention

pytestmark = pytest.mark.usefixtures("no_grad")
CAPTIONS = ["A red cat.", "Two dogs sit on a very long green bench beside the river.", ""]
PIXELS = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SEARCH = dict(data="toy/validation", search="all", way="mean", limit=40)
MASKS = {
    "image": torch.tensor([[True, False], [False, True]]),
    "text": torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool),
}


def means_of(backbone: Backbone, tower: str) -> torch.Tensor:
    if tower == "image":
        return image_means(backbone.image, backbone.image.embed(PIXELS), batch=2)
    return text_means(backbone, [backbone.tokenize(CAPTIONS[:2]), backbone.tokenize(CAPTIONS[2:])])


def replaced(backbone: Backbone, tower: str) -> Backbone:
    ablation = replace(Ablation.of_mask(tower, MASKS[tower], 0.0), means=means_of(backbone, tower))
    ablation.apply(backbone)
    return backbone


def test_the_mean_is_over_images_and_tokens_and_in_the_last_block_over_cls():
    backbone = tiny_clip().eval()
    means, states = means_of(backbone, "image"), backbone.image.embed(PIXELS)
    for number, block in enumerate(backbone.model.visual.transformer.resblocks):
        attended = full_attention(*before_attention(block, states))
        attended = attended[:, :1] if number == 1 else attended
        torch.testing.assert_close(means[number], attended.mean(dim=(0, 1)), rtol=0, atol=1e-6)
        states = backbone.image.run_block(number, states)


def test_a_population_gives_the_features_of_the_folded_weights():
    backbone = tiny_clip().eval()
    means, embedded = means_of(backbone, "image"), backbone.image.embed(PIXELS)
    masks = torch.stack([torch.zeros(2, 2, dtype=torch.bool), MASKS["image"]])
    plain, ablated = Population(backbone.image, 0.1, 2, means).features(embedded, masks)
    torch.testing.assert_close(plain, backbone.encode_image(PIXELS), rtol=0, atol=1e-5)
    folded = replaced(tiny_clip().eval(), "image").encode_image(PIXELS)
    torch.testing.assert_close(ablated, folded, rtol=0, atol=1e-5)
    assert (ablated - plain).abs().max() > 1e-3


def test_packed_texts_give_the_features_of_the_folded_weights():
    backbone = tiny_clip().eval()
    population = TextPopulation(backbone.text, 0.1, means_of(backbone, "text"))
    ablated = population.features([backbone.tokenize(CAPTIONS)], MASKS["text"][None])[0]
    plain = backbone.encode_text(backbone.tokenize(CAPTIONS))
    folded = replaced(tiny_clip().eval(), "text")
    torch.testing.assert_close(ablated, folded.encode_text(folded.tokenize(CAPTIONS)), rtol=0, atol=1e-5)
    assert (ablated - plain).abs().max() > 1e-3 and not backbone.text.changes


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> dict[str, str]:
    """By tower, what a search with `way` mean has left; the base has random weights, so that some head does harm."""
    folder = tmp_path_factory.mktemp("means")
    base = save_tiny_clip(folder / "base")
    folders = {"base": base, "image": str(ablate(AblateConfig(base, str(folder / "image"), **SEARCH)))}
    backbone = load_two_tower(base)
    text = folder / "text"
    text.mkdir()
    ablation = replace(Ablation.of_mask("text", MASKS["text"], 0.0), means=means_of(backbone, "text"))
    write_ablation(text / FILE, base, load_two_tower(base), ablation, settings={"model": base, "output": "text"})
    return folders | {"text": str(text)}


@pytest.mark.parametrize("tower", ["image", "text"])
def test_every_export_holds_it_as_ordinary_weights(searched, tower, tmp_path, capsys):
    ours, base = load_two_tower(searched[tower]), load_two_tower(searched["base"])
    rows = ours.tokenize(CAPTIONS).padded()
    expected = ours.encode_image(PIXELS), ours.encode_text(ours.tokenize(CAPTIONS))
    plain = base.encode_image(PIXELS), base.encode_text(base.tokenize(CAPTIONS))
    assert [torch.equal(*pair) for pair in zip(expected, plain, strict=True)] == [tower == "text", tower == "image"]
    for to in ("open_clip", "clip"):
        export(ExportConfig(searched[tower], str(tmp_path / to), to))
    assert "UNABLATED" not in capsys.readouterr().out
    assert f"replaced heads of the {tower} tower" in (tmp_path / "clip" / "README.md").read_text()
    model = open_clip.create_model(f"local-dir:{tmp_path / 'open_clip'}").eval()
    theirs = [(model.encode_image(PIXELS), model.encode_text(rows))]
    model, info = CLIPModel.from_pretrained(tmp_path / "clip", output_loading_info=True)
    assert not any(info.values()) and not list((tmp_path / "clip").glob("*.py"))
    theirs.append((model.get_image_features(PIXELS).pooler_output, model.get_text_features(rows).pooler_output))
    for features in theirs:
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)
    if tower == "text":
        encoder, tokenizer = load_text_encoder(searched["text"])
        ids = tokenizer(CAPTIONS[:2], padding="max_length", return_tensors="pt").input_ids
        features = encoder(ids).pooler_output @ ours.text.tower.text_projection
        torch.testing.assert_close(features, expected[1][:2], rtol=0, atol=1e-5)


def test_a_model_whose_features_became_alike_is_not_passed_off_as_better(tmp_path, capsys):
    """Of equation 3: a model of constant features has a margin of 0, and one that errs a negative one."""
    settings = dict(data="toy/validation", search="all", limit=60, beta=0.0)
    ablate(AblateConfig("toy/clip", str(tmp_path), **settings))
    content = json.loads((tmp_path / "ablation.json").read_text())
    assert content["recall"]["after"]["mean_r"] < content["recall"]["before"]["mean_r"]
    assert "though the fitness rose" in capsys.readouterr().out


def test_the_search_leaves_the_means_and_says_which_heads(searched):
    content = json.loads(Path(searched["image"], "ablation.json").read_text())
    assert content["kind"] == "mean" and content["heads"] and content["settings"]["way"] == "mean"
    assert content["recall"]["after"] != content["recall"]["before"]


@pytest.mark.parametrize("damage", ["missing", "cut", "sign"])
def test_damaged_means_are_refused_and_a_search_makes_them_again(searched, damage, tmp_path):
    folder = Path(shutil.copytree(searched["image"], tmp_path / "image"))
    file = folder / "means.safetensors"
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(whole[:-1])
    else:
        save_file({"means": -load_file(file)["means"]}, file)
    with pytest.raises(UserError, match="Search again"):
        load_two_tower(folder)
    ablate(AblateConfig(searched["base"], str(folder), **SEARCH))
    assert file.read_bytes() == whole and load_two_tower(folder).image_attention is None
