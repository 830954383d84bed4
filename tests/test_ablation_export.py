"""An ablated model in every format: what other programs run, and what is said where they do not run the ablation."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest
import torch
from helpers.ranks import forked
from helpers.tiny_clip import save_tiny_clip, tiny_clip
from helpers.training_runs import config
from safetensors.torch import load_file, save_file
from transformers import AutoModel, CLIPModel, CLIPProcessor, dynamic_module_utils

from debias_diffusion.ablation.heads import Ablation, apply_saved, fold_text_heads, image_means, text_means
from debias_diffusion.ablation.saved import FILE, write_ablation
from debias_diffusion.app.ablate import ablate
from debias_diffusion.app.export import export
from debias_diffusion.app.options import AblateConfig, ExportConfig
from debias_diffusion.encoders import EncoderSpec, load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import load_reader
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.head_search.population import Population, TextPopulation
from debias_diffusion.interchange.clip_model import export_clip_model
from debias_diffusion.interchange.text_encoders import to_transformers
from debias_diffusion.models import loading
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.models.blocks import before_attention, full_attention
from debias_diffusion.training.loop import train

pytestmark = pytest.mark.usefixtures("no_grad")
CAPTIONS = ["A red cat.", "Two dogs sit on a very long green bench beside the river.", ""]
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MASKS = {
    "image": torch.tensor([[True, False], [False, True]]),
    "text": torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool),
}
ABLATIONS = {
    "image": Ablation("image", ((1.0, 0.1), (0.0, 0.5))),
    "text": Ablation.of_mask("text", MASKS["text"], 0.0),
    "soft": Ablation("text", ((1.0,) * 4, (1.0, 1.0, 0.1, 1.0), (1.0,) * 4)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> SimpleNamespace:
    """A base model, and folders of its ablations as `ablate` leaves them, `mean_` those whose heads give their mean."""
    folder = tmp_path_factory.mktemp("ablations")
    base = save_tiny_clip(folder / "base")
    means = {f"mean_{tower}": replaced(load_two_tower(base), tower)[1] for tower in MASKS}
    for name, ablation in (ABLATIONS | means).items():
        (folder / name).mkdir()
        settings = AblateConfig(base, str(folder / name), data="toy/validation", tower=ablation.tower, beta=0.0)
        write_ablation(folder / name / FILE, base, load_two_tower(base), ablation, settings=asdict(settings))
    return SimpleNamespace(base=base, **{name: str(folder / name) for name in ABLATIONS | means})


def replaced(backbone: Backbone, tower: str) -> tuple[Backbone, Ablation]:
    """The model with heads replaced by their mean."""
    ablation = replace(Ablation.of_mask(tower, MASKS[tower], 0.0), means=means_of(backbone, tower))
    ablation.apply(backbone)
    return backbone, ablation


def means_of(backbone: Backbone, tower: str) -> torch.Tensor:
    if tower == "image":
        return image_means(backbone.image, backbone.image.embed(PIXELS), batch=1)
    return text_means(backbone, [backbone.tokenize(CAPTIONS[:2]), backbone.tokenize(CAPTIONS[2:])])


def features(model) -> tuple[torch.Tensor, torch.Tensor]:
    return model.encode_image(PIXELS), model.encode_text(model.tokenize(CAPTIONS))


def close(actual, expected, atol=1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ---- heads that are suppressed


def test_plain_open_clip_runs_suppressed_heads_as_ordinary_ones_and_is_said_to(folders, tmp_path, capsys):
    base = load_two_tower(folders.base)
    for name in ("image", "soft"):
        output, ablated = tmp_path / name, load_two_tower(getattr(folders, name))
        export(ExportConfig(str(output), getattr(folders, name), "open_clip"))
        assert "Plain open_clip runs it UNABLATED" in capsys.readouterr().out
        assert "**Plain open_clip runs it unablated**" in (output / "README.md").read_text()
        again = load_two_tower(output)
        assert all(map(torch.equal, features(again), features(ablated)))
        assert again.digest() == ablated.digest() != base.digest()
        plain = open_clip.create_model(f"local-dir:{output}").eval()
        theirs = plain.encode_image(PIXELS), plain.encode_text(base.tokenize(CAPTIONS).padded())
        close(theirs, features(base))
        assert max((a - b).abs().max() for a, b in zip(theirs, features(ablated), strict=True)) > 1e-3


def run_without_this_package(folder: Path, inputs: dict, modules: Path) -> dict:
    """What transformers computes in a process where no import of this package succeeds."""

    def run(_) -> dict:
        for name in [name for name in sys.modules if name.partition(".")[0] == "debias_diffusion"]:
            sys.modules[name] = None
        dynamic_module_utils.HF_MODULES_CACHE = str(modules)
        with pytest.raises(ImportError):
            import debias_diffusion.models  # noqa: F401
        model, info = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
        assert not any(info.values()), info
        CLIPProcessor.from_pretrained(folder)
        with torch.no_grad():
            output = model.eval()(**inputs)
            image_features = model.get_image_features(inputs["pixel_values"]).pooler_output
        return {"image": image_features, "logits": output.logits_per_image}

    (result,) = forked(1, run, group=False)
    return result


def test_image_heads_are_suppressed_by_transformers_without_this_package(folders, tmp_path, capsys):
    output = tmp_path / "clip"
    export(ExportConfig(str(output), folders.image, "clip"))
    assert f"AutoModel.from_pretrained('{output}', trust_remote_code=True)" in capsys.readouterr().out
    assert 'AutoModel.from_pretrained("this folder", trust_remote_code=True)' in (output / "README.md").read_text()
    ablated, base = load_two_tower(folders.image), load_two_tower(folders.base)
    inputs = {"pixel_values": PIXELS, "input_ids": ablated.tokenize(CAPTIONS).padded()}
    theirs, (images, texts) = run_without_this_package(output, inputs, tmp_path / "modules"), features(ablated)
    close(theirs["image"], images)
    assert (images - features(base)[0]).abs().max() > 1e-2
    unit = (torch.nn.functional.normalize(part, dim=-1) for part in (images, texts))
    close(theirs["logits"], ablated.logit_scale.exp() * next(unit) @ next(unit).T, atol=1e-3)
    # Nobody runs it unablated without being asked.
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModel.from_pretrained(output, trust_remote_code=False)


def test_a_clip_model_with_suppressed_heads_comes_back(folders, tmp_path):
    ablated = load_two_tower(folders.image)
    export_clip_model(ablated, tmp_path)
    again = load_two_tower(tmp_path)
    assert all(map(torch.equal, features(again), features(ablated)))
    assert again.image_attention == ablated.image_attention
    encoder, _ = load_text_encoder(tmp_path)
    plain, _ = load_text_encoder(folders.base)
    assert all(map(torch.equal, encoder.parameters(), plain.parameters()))
    config = json.loads((tmp_path / "config.json").read_text())
    for beta in ([[0.1, 0.1]], [[0.1, 2.0]] * 2, None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"beta": beta}))
        with pytest.raises(UserError, match="blocks of 2 heads|beta of head 0-1 is 2.0|beta in the configuration"):
            load_two_tower(tmp_path)


def test_a_soft_text_head_is_refused_where_only_weights_leave(folders, tmp_path):
    for to, name in (("clip", "out"), ("transformers", "out"), ("comfyui", "out.safetensors")):
        with pytest.raises(UserError, match="Head 1-2 of the text tower is suppressed with a beta above 0.*--beta 0"):
            export(ExportConfig(str(tmp_path / name), folders.soft, to))
    assert not list(tmp_path.iterdir())
    load_two_tower(folders.soft).save(tmp_path / "noted")
    for model in (folders.soft, str(tmp_path / "noted")):
        with pytest.raises(UserError, match="Head 1-2 of the text tower"):
            load_text_encoder(model)
    with pytest.raises(UserError, match="Head 1-2 of the text tower"):  # attention that is measured is the model's
        load_reader(EncoderSpec.parse(str(tmp_path / "noted")), torch.device("cpu"))


def test_no_conversion_drops_replaced_text_attention(folders, tmp_path):
    ablated = load_two_tower(folders.text)
    for convert in (to_transformers, lambda model: export_clip_model(model, tmp_path / "x")):
        with pytest.raises(UserError, match="attention in the text tower was replaced.*fold_text_heads"):
            convert(ablated)
    before = features(ablated)[1]
    fold_text_heads(ablated)
    fold_text_heads(ablated)  # nothing is left to fold
    assert ablated.text_attention is None and not ablated.text.changes
    close(features(ablated)[1], before)


def test_pads_before_sot_are_refused_with_suppressed_text_heads(folders):
    ablated = load_two_tower(folders.soft)
    before = ablated.tokenizer.batch(ablated.tokenizer.text_ids(CAPTIONS), [3, 0, 2], pads_before_sot=True)
    for encode in (ablated.encode_text, ablated.text.token_states):
        with pytest.raises(UserError, match="Pads stand before SOT"):
            encode(before)
    tiny_clip().encode_text(before)


def test_training_refuses_an_ablated_base(folders, world, tmp_path):
    _, data, images = world
    load_two_tower(folders.image).save(tmp_path / "noted")
    for model in (folders.image, str(tmp_path / "noted")):
        with pytest.raises(UserError, match="has suppressed attention heads.*search again"):
            train(config((model, data, images), tmp_path / "run"))


def test_a_note_that_cannot_be_read_is_refused(folders):
    ablated = load_two_tower(folders.image)
    for beta in (3, [["x"]], None):
        ablated.image_attention["beta"] = beta
        with pytest.raises(UserError, match="suppressed heads in the model's configuration cannot be read"):
            apply_saved(ablated)


def test_the_configuration_of_a_hub_repository_brings_the_note(folders, tmp_path, monkeypatch):
    ablated = load_two_tower(folders.image)
    ablated.save(tmp_path)
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: ablated.config["model_cfg"])
    monkeypatch.setattr(loading, "find_file", lambda repository, name: tmp_path / name)
    config, _ = loading._find_config("hf-hub:me/mine")
    assert config["debias_diffusion"] == {"image_attention": ablated.image_attention}


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


@pytest.mark.parametrize("name", ["image", "text", "mean_text"])
def test_a_text_encoder_leaves_with_folded_heads_and_without_those_of_images(folders, name, tmp_path, capsys):
    source, ablated = getattr(folders, name), load_two_tower(getattr(folders, name))
    export(ExportConfig(str(tmp_path / "out"), source))
    unaffected = "The suppressed heads are the image tower's. This text encoder is that of the base model."
    assert (unaffected in capsys.readouterr().out) == (name == "image")
    ablated.save(tmp_path / "noted")
    for encoder, tokenizer in map(load_text_encoder, (source, tmp_path / "out", tmp_path / "noted")):
        rows = tokenizer(CAPTIONS, padding="max_length", return_tensors="pt").input_ids
        states = encoder(rows, output_hidden_states=True)
        close(states.pooler_output @ ablated.text.tower.text_projection, features(ablated)[1])
        # SDXL's UNet reads these.
        expected = ablated.text.penultimate_states(ablated.tokenize(CAPTIONS), pad=tokenizer.pad_token_id)
        close(states.hidden_states[-2], expected)


def test_a_population_gives_the_features_of_the_folded_weights():
    backbone = tiny_clip().eval()
    tokens, embedded = backbone.tokenize(CAPTIONS), backbone.image.embed(PIXELS)
    images = Population(backbone.image, 0.1, 2, means_of(backbone, "image"))
    texts = TextPopulation(backbone.text, 0.1, means_of(backbone, "text"))
    found = images.features(embedded, MASKS["image"][None])[0], texts.features([tokens], MASKS["text"][None])[0]
    for tower, ablated, plain in zip(MASKS, found, features(backbone), strict=True):
        folded, _ = replaced(tiny_clip().eval(), tower)
        close(ablated, features(folded)[tower == "text"])
        assert (ablated - plain).abs().max() > 1e-3


def test_the_mean_is_over_images_and_tokens_and_in_the_last_block_over_cls():
    backbone = tiny_clip().eval()
    means, states = means_of(backbone, "image"), backbone.image.embed(PIXELS)
    for number, block in enumerate(backbone.model.visual.transformer.resblocks):
        attended = full_attention(*before_attention(block, states))
        attended = attended[:, :1] if number == 1 else attended
        close(means[number], attended.mean(dim=(0, 1)))
        states = backbone.image.run_block(number, states)


def test_a_search_leaves_its_means_and_makes_damaged_ones_again(folders, tmp_path):
    settings = AblateConfig(folders.base, str(tmp_path), "toy/validation", search="all", way="mean", limit=40)
    content = json.loads((ablate(settings) / FILE).read_text())
    assert content["kind"] == "mean" and content["heads"] and content["settings"]["way"] == "mean"
    file = tmp_path / "means.safetensors"
    whole, means = file.read_bytes(), load_file(file)["means"]
    save_file({"means": -means}, file)
    with pytest.raises(UserError, match="Search again"):
        load_two_tower(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match="Search again"):
        load_two_tower(tmp_path)
    ablate(settings)
    assert file.read_bytes() == whole and load_two_tower(tmp_path).image_attention is None


# ---- the card


def test_the_card_names_the_heads_the_search_and_the_scores_of_the_ablated_model_alone(folders, world, tmp_path):
    _, data, images = world
    pairs = {"data": data, "images": images, "limit": 10}
    evaluate_retrieval(RetrievalConfig([folders.text, folders.base], str(tmp_path / "scores"), **pairs))
    export(ExportConfig(str(tmp_path / "text"), folders.text, "open_clip", scores=str(tmp_path / "scores")))
    card = (tmp_path / "text" / "README.md").read_text()
    assert "| base model | `base` |" in card and "It loads without debias-diffusion." in card
    assert "| suppressed heads of the text tower | 0-0, 1-2, 2-3 (beta 0) |" in card
    assert "debias-diffusion ablate --model base --data toy/validation --tower text --beta 0.0" in card
    scores = card.split("## Scores")[1]
    assert "| text |" in scores and "| base |" not in scores
    for _ in range(2):  # an export of the same kind is replaced
        export(ExportConfig(str(tmp_path / "clip"), folders.image, "clip"))
    card = (tmp_path / "clip" / "README.md").read_text()
    assert "| suppressed heads of the image tower | 3 with beta 0 to 0.5; below 0.5: 0-1, 1-0 |" in card
    with pytest.raises(UserError, match="brings its own weights; leave out 'openai'"):
        export(ExportConfig(str(tmp_path / "y"), folders.text, pretrained="openai"))
