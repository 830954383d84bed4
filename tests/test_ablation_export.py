"""An ablated model in every format: what other programs run, and what is said where they do not run the ablation."""

import json
import shutil
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
from helpers.vocabulary import tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModel, CLIPModel, CLIPProcessor, CLIPTextModel, CLIPTokenizer, dynamic_module_utils

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
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.tokens import clip_tokenizer
from debias_diffusion.training.loop import train

pytestmark = pytest.mark.usefixtures("no_grad")
CAPTIONS = ["A red cat.", "Two dogs sit on a very long green bench beside the river.", ""]
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
ABLATIONS = {
    "image": Ablation("image", ((1.0, 0.1), (0.0, 0.5))),
    "text": Ablation("text", ((0.0, 1.0, 1.0, 1.0), (1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 1.0, 0.0))),
    "soft": Ablation("text", ((1.0,) * 4, (1.0, 1.0, 0.1, 1.0), (1.0,) * 4)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> SimpleNamespace:
    """A base model, and folders of its ablations as `ablate` leaves them."""
    return ablate_all(tmp_path_factory.mktemp("ablations"), tiny_tokenizer)


@pytest.fixture(scope="module")
def whole_folders(tmp_path_factory) -> SimpleNamespace:
    """The same with CLIP's own vocabulary, the only one that ComfyUI knows."""
    return ablate_all(tmp_path_factory.mktemp("whole"), clip_tokenizer, ("image", "text"))


def ablate_all(folder: Path, vocabulary, names=tuple(ABLATIONS)) -> SimpleNamespace:
    base = save_tiny_clip(folder / "base", tokenizer=vocabulary(77))
    for name in names:
        ablation = ABLATIONS[name]
        (folder / name).mkdir()
        settings = AblateConfig(base, str(folder / name), data="toy/validation", tower=ablation.tower, beta=0.0)
        write_ablation(folder / name / FILE, base, load_backbone(base), ablation, settings=asdict(settings))
    return SimpleNamespace(base=base, **{name: str(folder / name) for name in names})


def features(model) -> tuple[torch.Tensor, torch.Tensor]:
    return model.encode_image(PIXELS), model.encode_text(model.tokenize(CAPTIONS))


def at_eot(states, tokens) -> torch.Tensor:
    """The states after each block, [batch, positions, width] each, of EOT alone: [batch, blocks, width]."""
    rows = torch.arange(len(tokens.lengths))
    return torch.stack([after[rows, tokens.n_prefix + tokens.lengths - 1] for after in states], dim=1)


def close(actual, expected, atol=1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ---- open_clip


def test_plain_open_clip_runs_suppressed_heads_as_ordinary_ones_and_is_said_to(folders, tmp_path, capsys):
    for name in ("image", "soft"):
        output = tmp_path / name
        export(ExportConfig(getattr(folders, name), str(output), "open_clip"))
        assert "Plain open_clip runs it UNABLATED" in capsys.readouterr().out
        assert "**Plain open_clip runs it unablated**" in (output / "README.md").read_text()
        ablated, again, base = (load_two_tower(each) for each in (getattr(folders, name), output, folders.base))
        assert all(map(torch.equal, features(again), features(ablated)))
        plain = open_clip.create_model(f"local-dir:{output}").eval()
        rows = base.tokenize(CAPTIONS).padded()
        theirs = plain.encode_image(PIXELS), plain.encode_text(rows)
        for part, unablated, changed in zip(theirs, features(base), features(ablated), strict=True):
            close(part, unablated)
            assert torch.equal(unablated, changed) or (part - changed).abs().max() > 1e-3
        assert again.digest() == ablated.digest() != base.digest()


def test_folded_text_heads_are_ordinary_weights_in_open_clip(folders, tmp_path, capsys):
    export(ExportConfig(folders.text, str(tmp_path / "out"), "open_clip"))
    assert "UNABLATED" not in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "It loads without debias-diffusion." in card and "0-0, 1-2, 2-3 (beta 0)" in card
    plain, ablated = open_clip.create_model(f"local-dir:{tmp_path / 'out'}").eval(), load_two_tower(folders.text)
    tokens, states = ablated.tokenize(CAPTIONS), []
    for block in plain.transformer.resblocks:
        block.register_forward_hook(lambda _, __, output: states.append(output))
    close(plain.encode_text(tokens.padded()), features(ablated)[1])
    close(at_eot(states, tokens), ablated.text.encode(tokens, blocks=range(3))[1])
    assert "text_attention" not in (tmp_path / "out" / "open_clip_config.json").read_text()


# ---- transformers' CLIPModel


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
    export(ExportConfig(folders.image, str(output), "clip"))
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


def test_folded_text_heads_are_an_ordinary_clip_model(folders, tmp_path):
    export(ExportConfig(folders.text, str(tmp_path / "out"), "clip"))
    assert not list((tmp_path / "out").glob("*.py"))
    model, info = CLIPModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and model.config.model_type == "clip"
    ablated = load_two_tower(folders.text)
    rows = ablated.tokenize(CAPTIONS).padded()
    close(model.get_text_features(rows).pooler_output, features(ablated)[1])


@pytest.mark.parametrize("to", ["clip", "transformers", "comfyui"])
def test_a_soft_text_head_is_refused_where_only_weights_leave(folders, tmp_path, to):
    output = tmp_path / ("out.safetensors" if to == "comfyui" else "out")
    with pytest.raises(UserError, match="Head 1-2 of the text tower is suppressed with a beta above 0.*--beta 0"):
        export(ExportConfig(folders.soft, str(output), to))
    assert not output.exists()
    with pytest.raises(UserError, match="Head 1-2 of the text tower"):
        load_text_encoder(folders.soft)


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
    # An open_clip folder whose configuration notes the heads.
    load_two_tower(folders.text).save(tmp_path / "noted")
    encoder, tokenizer = load_text_encoder(tmp_path / "noted")
    rows = tokenizer(CAPTIONS, padding="max_length", return_tensors="pt").input_ids
    close(encoder(rows).pooler_output @ ablated.text.tower.text_projection, before)


# ---- text encoders alone


@pytest.mark.parametrize("to", ["transformers", "comfyui"])
@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_text_encoder_leaves_with_folded_heads_and_without_those_of_images(request, tmp_path, capsys, to, tower):
    folders = request.getfixturevalue("whole_folders" if to == "comfyui" else "folders")
    output = tmp_path / ("out.safetensors" if to == "comfyui" else "out")
    export(ExportConfig(getattr(folders, tower), str(output), to))
    unaffected = "The suppressed heads are the image tower's. This text encoder is that of the base model."
    assert (unaffected in capsys.readouterr().out) == (tower == "image")
    if to == "transformers":
        card = (output / "README.md").read_text()
        assert ("not part of this text encoder, which is that of the base model" in card) == (tower == "image")
        encoder = CLIPTextModel.from_pretrained(output, subfolder="text_encoder").eval()
        tokenizer = CLIPTokenizer.from_pretrained(output, subfolder="tokenizer")
    else:
        export(ExportConfig(folders.base, str(tmp_path / "base.safetensors"), to))
        assert load_file(output).keys() == load_file(tmp_path / "base.safetensors").keys()
        encoder, tokenizer = load_text_encoder(output)
    ablated = load_two_tower(getattr(folders, tower))
    rows = tokenizer(CAPTIONS, padding="max_length", return_tensors="pt").input_ids
    close(encoder(rows).pooler_output @ ablated.text.tower.text_projection, features(ablated)[1])
    tokens = ablated.tokenize(CAPTIONS)
    states = encoder(rows, output_hidden_states=True).hidden_states
    close(at_eot(states[1:], tokens), ablated.text.encode(tokens, blocks=range(3))[1])
    # SDXL's UNet reads these.
    close(states[-2], ablated.text.penultimate_states(tokens, pad=tokenizer.pad_token_id))


# ---- the card, and what is refused


def test_the_card_names_the_heads_the_search_and_the_scores_of_the_ablated_model_alone(folders, world, tmp_path):
    _, data, images = world
    pairs = {"data": data, "images": images, "limit": 10}
    evaluate_retrieval(RetrievalConfig([folders.text, folders.base], str(tmp_path / "scores"), **pairs))
    for to in ("open_clip", "clip"):
        export(ExportConfig(folders.text, str(tmp_path / to), to, scores=str(tmp_path / "scores")))
        card = (tmp_path / to / "README.md").read_text()
        assert "| base model | `base` |" in card
        assert "| suppressed heads of the text tower | 0-0, 1-2, 2-3 (beta 0) |" in card
        assert "debias-diffusion ablate --model base --data toy/validation --tower text --beta 0.0" in card
        scores = card.split("## Scores")[1]
        assert "| text |" in scores and "| base |" not in scores
    # A folder is replaced by another export of the same kind.
    export(ExportConfig(folders.image, str(tmp_path / "clip"), "clip"))
    export(ExportConfig(folders.image, str(tmp_path / "clip"), "clip"))
    card = (tmp_path / "clip" / "README.md").read_text()
    assert "| suppressed heads of the image tower | 3 with beta 0 to 0.5; below 0.5: 0-1, 1-0 |" in card
    with pytest.raises(UserError, match="brings its own weights; leave out 'openai'"):
        export(ExportConfig(folders.text, str(tmp_path / "y"), pretrained="openai"))


def test_training_refuses_an_ablated_base(folders, world, tmp_path):
    _, data, images = world
    load_two_tower(folders.image).save(tmp_path / "noted")
    for model in (folders.image, str(tmp_path / "noted")):
        with pytest.raises(UserError, match="has suppressed attention heads.*search again"):
            train(config((model, data, images), tmp_path / "run"))


def test_pads_before_sot_are_refused_with_suppressed_text_heads(folders):
    ablated = load_two_tower(folders.soft)
    ids = ablated.tokenizer.text_ids(CAPTIONS)
    after, before = (ablated.tokenizer.batch(ids, [3, 0, 2], pads_before_sot=before) for before in (False, True))
    ablated.encode_text(after)
    with pytest.raises(UserError, match="Pads stand before SOT"):
        ablated.encode_text(before)
    with pytest.raises(UserError, match="Pads stand before SOT"):
        ablated.text.token_states(before)
    tiny_clip().encode_text(before)


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
    config, source = loading._find_config("hf-hub:me/mine")
    assert source == "hf-hub:me/mine"
    assert config["debias_diffusion"] == {"image_attention": ablated.image_attention}


def test_attention_is_not_measured_as_if_no_head_were_suppressed(folders, tmp_path):
    for name in ("soft", "text"):
        load_two_tower(getattr(folders, name)).save(tmp_path / name)
    with pytest.raises(UserError, match="Head 1-2 of the text tower"):
        load_reader(EncoderSpec.parse(str(tmp_path / "soft")), torch.device("cpu"))
    encoder = load_reader(EncoderSpec.parse(str(tmp_path / "text")), torch.device("cpu")).encoder
    assert encoder.text_attention is None
    close(features(encoder)[1], features(load_two_tower(folders.text))[1])


# ---- heads replaced by their mean: ordinary weights everywhere

MANY = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SEARCH = dict(data="toy/validation", search="all", way="mean", limit=40)
MASKS = {
    "image": torch.tensor([[True, False], [False, True]]),
    "text": torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool),
}


def means_of(backbone: Backbone, tower: str) -> torch.Tensor:
    if tower == "image":
        return image_means(backbone.image, backbone.image.embed(MANY), batch=2)
    return text_means(backbone, [backbone.tokenize(CAPTIONS[:2]), backbone.tokenize(CAPTIONS[2:])])


def replaced(backbone: Backbone, tower: str) -> Backbone:
    ablation = replace(Ablation.of_mask(tower, MASKS[tower], 0.0), means=means_of(backbone, tower))
    ablation.apply(backbone)
    return backbone


def test_the_mean_is_over_images_and_tokens_and_in_the_last_block_over_cls():
    backbone = tiny_clip().eval()
    means, states = means_of(backbone, "image"), backbone.image.embed(MANY)
    for number, block in enumerate(backbone.model.visual.transformer.resblocks):
        attended = full_attention(*before_attention(block, states))
        attended = attended[:, :1] if number == 1 else attended
        torch.testing.assert_close(means[number], attended.mean(dim=(0, 1)), rtol=0, atol=1e-6)
        states = backbone.image.run_block(number, states)


def test_a_population_gives_the_features_of_the_folded_weights():
    backbone = tiny_clip().eval()
    means, embedded = means_of(backbone, "image"), backbone.image.embed(MANY)
    masks = torch.stack([torch.zeros(2, 2, dtype=torch.bool), MASKS["image"]])
    plain, ablated = Population(backbone.image, 0.1, 2, means).features(embedded, masks)
    close(plain, backbone.encode_image(MANY))
    folded = replaced(tiny_clip().eval(), "image").encode_image(MANY)
    close(ablated, folded)
    assert (ablated - plain).abs().max() > 1e-3


def test_packed_texts_give_the_features_of_the_folded_weights():
    backbone = tiny_clip().eval()
    population = TextPopulation(backbone.text, 0.1, means_of(backbone, "text"))
    ablated = population.features([backbone.tokenize(CAPTIONS)], MASKS["text"][None])[0]
    plain = backbone.encode_text(backbone.tokenize(CAPTIONS))
    folded = replaced(tiny_clip().eval(), "text")
    close(ablated, folded.encode_text(folded.tokenize(CAPTIONS)))
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
    expected, plain = features(ours), features(base)
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
    for parts in theirs:
        close(parts, expected)
    if tower == "text":
        encoder, tokenizer = load_text_encoder(searched["text"])
        ids = tokenizer(CAPTIONS[:2], padding="max_length", return_tensors="pt").input_ids
        close(encoder(ids).pooler_output @ ours.text.tower.text_projection, expected[1][:2])


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
