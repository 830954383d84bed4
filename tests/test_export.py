import json
import shutil
import stat
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import huggingface_hub
import open_clip
import pytest
import torch
from helpers.text_encoders import BIGG, CAPTIONS, SMALL, Expected, long_clip_state, text_backbone
from helpers.tiny_clip import save_tiny_clip, tiny_clip
from helpers.tiny_data import make_tiny_data
from huggingface_hub import ModelCard
from transformers import CLIPModel, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion import load_text_encoder
from debias_diffusion.app import export as export_module
from debias_diffusion.app.comfyui.write import write_node
from debias_diffusion.app.export import export
from debias_diffusion.app.model_card import code, model_card
from debias_diffusion.app.options import ComfyUIConfig, ExportConfig
from debias_diffusion.app.written_folder import MARK
from debias_diffusion.encoders import EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.eval.registry import EVALUATIONS
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness
from debias_diffusion.files import json_digest
from debias_diffusion.interchange.single_file import write_file
from debias_diffusion.interchange.text_encoders import to_transformers
from debias_diffusion.jobs import Job
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.tokens import clip_tokenizer
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.loop import train


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A training run of two steps, and its scores."""
    folder = tmp_path_factory.mktemp("world")
    data, images = make_tiny_data(folder)
    base, run, scores = (str(folder / name) for name in ("base", "run", "scores"))
    save_tiny_clip(folder / "base", quick_gelu=True)
    settings = {"validation": 4, "batch": 8, "components": 3, "max_steps": 2, "workers": 0, "learning_rate": 1e-3}
    train(TrainConfig(data=data, output=run, model=base, images=images, short_weight=0.25, **settings))
    pairs = {"data": data, "images": images, "limit": 10}
    evaluate_retrieval(RetrievalConfig([f"{run}", base], scores, **pairs))
    evaluate_robustness(RobustnessConfig([f"{run}"], scores, **pairs))
    return SimpleNamespace(folder=folder, base=base, run=run, scores=scores, data=data, images=images)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A base model and a stretched one with CLIP's own vocabulary, the only one that ComfyUI knows."""
    folder = tmp_path_factory.mktemp("whole")
    backbone = tiny_clip(quick_gelu=True, tokenizer=clip_tokenizer(77))
    backbone.save(folder / "base")
    backbone.stretch()
    backbone.save(folder / "long")
    return SimpleNamespace(base=str(folder / "base"), long=str(folder / "long"), backbone=backbone.eval())


def front_matter(folder: Path) -> dict:
    """The card's YAML, as the hub's own library reads it."""
    return ModelCard.load(folder / "README.md", ignore_metadata_errors=False).data.to_dict()


@pytest.fixture(scope="module")
def trained(world):
    return load_backbone(f"{world.run}/last").eval()


def test_a_run_leaves_in_every_format(tmp_path, world, trained, whole, capsys):
    expected = Expected(trained)
    export(ExportConfig(str(tmp_path / "transformers"), world.run, "diffusers"))  # another name for transformers
    names = {path.name for path in (tmp_path / "transformers").iterdir()}
    assert names == {"text_encoder", "tokenizer", "README.md", "pipeline.py", "block.py", "modular_config.json", MARK}
    encoder = CLIPTextModel.from_pretrained(tmp_path / "transformers", subfolder="text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "transformers", subfolder="tokenizer")
    expected.check(encoder.eval(), tokenizer)
    assert encoder.config.hidden_act == "quick_gelu"

    export(ExportConfig(str(tmp_path / "clip_l.safetensors"), whole.long, "comfyui"))
    Expected(whole.backbone).check(*load_text_encoder(tmp_path / "clip_l.safetensors"))
    printed = capsys.readouterr().out
    assert "does not align a CLIP-L of 248 positions with clip_g past 75 tokens" in printed
    assert "ComfyUI has no text encoder of width 32 and 3 blocks" in printed

    export(ExportConfig(str(tmp_path / "open_clip"), world.run, "open_clip"))
    model = open_clip.create_model(f"local-dir:{tmp_path / 'open_clip'}").eval()
    tokens = trained.tokenize(CAPTIONS)
    features = trained.encode_text(tokens)
    torch.testing.assert_close(model.encode_text(tokens.padded()), features, rtol=0, atol=1e-5)

    export(ExportConfig(str(tmp_path / "clip"), world.run, "clip"))
    model = CLIPModel.from_pretrained(tmp_path / "clip").eval()
    pixels = torch.randn(2, 3, 32, 32)
    theirs = model.get_image_features(pixels).pooler_output
    torch.testing.assert_close(theirs, trained.encode_image(pixels), rtol=0, atol=1e-5)
    mode = (tmp_path / "open_clip" / "README.md").stat().st_mode
    for file in tmp_path.rglob("*.safetensors"):
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(mode), file
    for name, library in (("transformers", "transformers"), ("open_clip", "open_clip"), ("clip", "transformers")):
        assert front_matter(tmp_path / name)["library_name"] == library


def test_blocks_of_modular_pipelines_alone(tmp_path):
    folder = export(ExportConfig(str(tmp_path / "blocks"), to="modular"))
    assert {path.name for path in folder.iterdir()} == {"block.py", "modular_config.json", "README.md", MARK}
    assert f'from_pretrained("{folder}", trust_remote_code=True)' in (folder / "README.md").read_text()
    assert front_matter(folder)["library_name"] == "diffusers"


def test_bigg_keeps_its_projection_and_its_length(tmp_path, capsys):
    backbone = text_backbone(BIGG, 128, quick_gelu=False)
    backbone.save(tmp_path / "run")
    export(ExportConfig(str(tmp_path / "folder"), str(tmp_path / "run")))
    assert "--encoder-2" in capsys.readouterr().out and not (tmp_path / "folder" / "pipeline.py").exists()
    encoder, tokenizer = load_text_encoder(tmp_path / "folder")
    assert type(encoder) is CLIPTextModelWithProjection
    Expected(backbone).check(encoder, tokenizer)


def test_any_text_encoder_can_be_exported_where_it_alone_is_wanted(tmp_path):
    backbone = text_backbone(SMALL, 64, quick_gelu=True, vocabulary=clip_tokenizer)
    torch.save(long_clip_state(backbone), tmp_path / "longclip.pt")
    for source, name in pairwise(("longclip.pt", "clip_l.safetensors", "folder", "again.safetensors")):
        to = "comfyui" if name.endswith(".safetensors") else "transformers"
        export(ExportConfig(str(tmp_path / name), str(tmp_path / source), to))
    Expected(backbone).check(*load_text_encoder(tmp_path / "again.safetensors"))
    for settings, message in (
        ({"to": "open_clip"}, "--to open_clip needs both towers.*longclip.pt"),
        ({"to": "clip"}, "--to clip needs both towers.*longclip.pt"),
        ({"projection": True}, "has no projection to export"),
        ({"positions": "short"}, "is a text encoder alone. Give the training run"),
    ):
        with pytest.raises(UserError, match=message):
            export(ExportConfig(str(tmp_path / "x"), str(tmp_path / "longclip.pt"), **settings))
    assert not (tmp_path / "x").exists()


def test_comfyui_gets_no_encoder_that_it_would_run_otherwise(tmp_path, world, monkeypatch):
    # As LAION's ViT-L-14, at a tenth of its width.
    monkeypatch.setitem(export_module._COMFYUI_ENCODERS, (64, 12), ("clip_l", "quick_gelu"))
    gelu = text_backbone(SMALL, 64, quick_gelu=False, vocabulary=clip_tokenizer)
    write_file(to_transformers(gelu)[0], tmp_path / "gelu.safetensors")
    for model, message in (
        (world.base, "has a vocabulary of .*, and ComfyUI knows only CLIP's of 49408"),
        (tmp_path / "gelu.safetensors", "runs every clip_l with the activation quick_gelu, .* trained with gelu"),
    ):
        with pytest.raises(UserError, match=message):
            export(ExportConfig(str(tmp_path / "x.safetensors"), str(model), "comfyui"))
    assert not (tmp_path / "x.safetensors").exists()


def files(folder: Path) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_nothing_of_anyone_else_is_overwritten(tmp_path, world):
    for name in ("sdxl/text_encoder/config.json", "cache/.cache/precious", "file.safetensors", "d.safetensors/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = files(tmp_path)
    for output, to, message in (
        ("sdxl", "transformers", "holds 'text_encoder/config.json', which `export` did not write"),
        ("cache", "transformers", "holds '.cache/precious', which `export` did not write"),
        ("file.safetensors", "comfyui", "exists and is no file of an export"),
        ("d.safetensors", "comfyui", "exists and is no file of an export"),
        ("file.safetensors", "transformers", "is a file. Give a new folder"),
        ("sdxl", "comfyui", "must be a file that ends in .safetensors"),
    ):
        with pytest.raises(UserError, match=message):
            export(ExportConfig(str(tmp_path / output), world.base, to))
    assert before == files(tmp_path)


def test_an_export_replaces_another_where_nothing_was_changed_since(tmp_path, world, whole):
    output = tmp_path / "mine"
    output.symlink_to("there")
    for model, to in ((world.base, "transformers"), (world.run, "transformers"), (world.run, "clip")):
        export(ExportConfig(str(output), model, to))
        (output / "__pycache__").mkdir()  # of pipeline.py
    assert output.is_symlink() and not (tmp_path / "there" / "text_encoder").exists()
    for model in (whole.base, whole.long):
        export(ExportConfig(str(tmp_path / "mine.safetensors"), model, "comfyui"))
    assert load_text_encoder(tmp_path / "mine.safetensors")[0].config.max_position_embeddings == 248

    def refused(name):
        with pytest.raises(UserError, match=f"would be replaced, but holds '{name}', .* which was changed since"):
            export(ExportConfig(str(output), world.base))

    written = (output / "README.md").read_text()
    (output / "README.md").write_text(written.replace("license: unknown", "license: mit"))
    refused("README.md")
    (output / "README.md").write_text(written)
    for name in ("text_encoder", "picture.png"):  # files of others, one with the name of an export's folder
        (output / name).symlink_to(tmp_path / "mine.safetensors")
        refused(name)
        (output / name).unlink()
    with pytest.raises(UserError, match="`comfyui` did not write"):
        write_node(ComfyUIConfig(str(output)))


def test_a_node_of_anyone_else_is_not_replaced(tmp_path):
    node = tmp_path / "node"
    for _ in range(2):
        write_node(ComfyUIConfig(str(node)))
    for change in (lambda: (node / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}"), (node / MARK).unlink):
        change()
        before = files(node)
        with pytest.raises(UserError, match=r"holds '(__init__.py|LICENSE)', which `comfyui` did not write"):
            write_node(ComfyUIConfig(str(node)))
        assert files(node) == before


def test_what_another_wrote_meanwhile_is_not_replaced(tmp_path, world, monkeypatch):
    def write_meanwhile(*arguments):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "other.txt").touch()
        return ""

    monkeypatch.setattr(export_module, "model_card", write_meanwhile)
    with pytest.raises(UserError, match="holds 'other.txt'"):
        export(ExportConfig(str(tmp_path / "mine"), world.base))
    assert list(files(tmp_path)) == [tmp_path / "mine", tmp_path / "mine" / "other.txt"]


def test_an_export_that_fails_leaves_what_was_there(tmp_path, world, monkeypatch):
    output = tmp_path / "mine"
    export(ExportConfig(str(output), world.base))
    before = files(tmp_path)
    monkeypatch.setattr(export_module, "model_card", Mock(side_effect=OSError("cut off")))
    for to in ("transformers", "open_clip", "clip"):
        with pytest.raises(OSError, match="cut off"):
            export(ExportConfig(str(output), world.run, to))
    assert files(tmp_path) == before


def test_options_that_do_not_go_together_are_refused_before_anything_is_loaded():
    for settings, message in (
        ({"to": "comfyui", "push_to_hub": "me/x"}, "push_to_hub uploads folders, and comfyui is a file"),
        ({"push_to_hub": "x"}, "lacks the owner"),
        ({"to": "clip", "projection": True}, "projection is an option of transformers only"),
        ({"to": "comfyui", "scores": "x"}, "a file without one"),
    ):
        with pytest.raises(UserError, match=message):
            export(ExportConfig("x.safetensors", "/nowhere/at/all", **settings))


def test_the_card_says_what_the_run_left(tmp_path, world):
    export(ExportConfig(str(tmp_path / "x"), world.run, scores=world.scores))
    card, front = (tmp_path / "x" / "README.md").read_text(), front_matter(tmp_path / "x")
    assert front["license"] == "unknown" and front["pipeline_tag"] == "feature-extraction" and "base_model" not in front
    lines = map(json.loads, Path(world.run, "log.jsonl").read_text().splitlines())
    start, end = (line for line in lines if "t2i_r1" in line)
    retrieval, robustness = (
        json.loads(Path(world.scores, f"{name}.json").read_text()) for name in ("retrieval", "robustness")
    )
    kept = robustness["encoders"]["run"]["recall_at_1_percent"]["remove"]["text_to_image"]
    for part in (
        "| base model | `base` |",
        "| recipe | `debias-clip` with `short_weight 0.25, components 3` |",
        f"| data | `data.json`, sha256 `{Job.read(world.run).inputs['data']}` |",
        "248: the first 20 kept, each other one stretched to 4",
        "debias-diffusion train --data data.json --images images --validation 4 --batch 8",
        f"| the base model | {start['t2i_r1']:.2f} | {start['i2t_r1']:.2f} |",
        f"| this one, step 2 | {end['t2i_r1']:.2f} | {end['i2t_r1']:.2f} |",
        "On 4 pairs held out of the training data",
        f"| {kept:.1f} (",
        "evaluate retrieval --encoders run base --data data.json --limit 10 --images images",
        "evaluate robustness --encoders run --data data.json --limit 10 --images images",
    ):
        assert part in card
    # The machine's folders are nobody's business, nor are the scores of the other model that was evaluated.
    for part in (str(world.folder), "--workers", "--output", "| base |"):
        assert part not in card
    row = card.split("recall in percent, text to image")[1].partition("| run |")[2].partition("\n")[0]
    recalls = retrieval["encoders"]["run"]["recall_percent"]["text_to_image"]
    assert all(f"| {value:.1f} (" in f"|{row}" for value in recalls.values())


def test_the_card_says_how_the_best_of_a_run_was_chosen(tmp_path, world):
    run = tmp_path / "run"
    shutil.copytree(world.run, run)
    shutil.copytree(run / "last", run / "best")
    end = json.loads((run / "last" / "scores.json").read_text())
    chosen = {"choosing_t2i_r1": 50.0, "choosing_i2t_r1": 25.0, "choosing_pairs": 7}
    (run / "best" / "scores.json").write_text(json.dumps(end | chosen))
    export(ExportConfig(str(tmp_path / "x"), f"{run}/best"))
    sentence = "This model is the best of the training run above by R@1 on 7 other pairs, not trained on either:"
    assert sentence in (tmp_path / "x" / "README.md").read_text()


def test_scores_of_other_weights_or_broken_ones_do_not_get_into_the_card(tmp_path, world):
    def refused(model, scores, message):
        with pytest.raises(UserError, match=message):
            export(ExportConfig(str(tmp_path / "x"), str(model), scores=str(scores)))
        assert not (tmp_path / "x").exists()

    refused(world.run, tmp_path, "holds none of robustness.json, retrieval.json")
    report = {"digests": {"encoders": {"other": "0"}}, "encoders": {"other": {}}, "settings": {}, "notes": []}
    for name in EVALUATIONS:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(json.dumps(report))
        refused(world.run, tmp_path / name, f"{name}.json' was measured with other weights")
    export(ExportConfig(str(tmp_path / "alone"), world.base))
    refused(tmp_path / "alone", world.scores, "with a two-tower model, and --model is a text encoder alone")
    for content in ("[]", "{", '{"settings": {}}', '{"settings": 3, "recall_percent": 4, "pairs": 5, "digests": 6}'):
        (tmp_path / "retrieval.json").write_text(content)
        refused(world.run, tmp_path, "is no result of `debias-diffusion evaluate retrieval`")


def test_scores_of_pictures_name_what_drew_them(tmp_path, world):
    score = {"dino_score": {"value": 0.25, "low": 0.125, "high": 0.5}}
    encoder = {"scores": score, "cut_at": None, "prompts_cut": 0, "seconds": 2.0}
    names = ["separate:/private/enc", "toy/clip"]
    settings = {"encoders": names, "base": "stabilityai/x", "data": "/private/data.json", "seed": 3}
    settings |= {"dino": "/private/d", "inception_weights": None, "dinov2": None, "own_features": None}
    report = {
        "evaluation": "generation",
        "settings": settings | {"clip_score": None},
        "digests": {"encoders": {"enc": EncoderSpec.parse(world.run).digest, "toy/clip": "another"}},
        "images": 7,
        "ceilings": [],
        "encoders": {"enc": encoder, "toy/clip": encoder},
        "compared": [],
        "notes": ["biased upwards"],
    }
    (tmp_path / "generation.json").write_text(json.dumps(report))
    export(ExportConfig(str(tmp_path / "x"), world.run, scores=str(tmp_path)))
    card = (tmp_path / "x" / "README.md").read_text()
    assert "| 7 images, with 95% intervals | enc |" in card and "/private" not in card
    assert "0.25" in card and "- biased upwards" in card
    assert "evaluate generation --encoders separate:enc toy/clip --data data.json --base stabilityai/x --seed 3" in card


def test_the_card_tells_the_base_model_only_where_it_is_known(tmp_path):
    def front(model, pretrained=None):
        card = model_card(ExportConfig("o", model, pretrained=pretrained), "T", "CLIPTextModel")
        return ModelCard(card).data.to_dict().get("base_model"), card

    assert front("ViT-L-14", "laion2b_s32b_b82k")[0] == "laion/CLIP-ViT-L-14-laion2B-s32B-b82K"
    assert front("ViT-L-14-quickgelu", "openai")[0] == "timm/vit_large_patch14_clip_224.openai"
    assert front("hf-hub:me/mine")[0] == front("me/mine")[0] == "me/mine"
    assert front("toy/clip")[0] is front("a/b/c")[0] is front("x.safetensors")[0] is None
    assert front("ViT-L-14", str(tmp_path / "my.pt"))[0] is None
    base, card = front("ViT-L-14")
    assert base is None and "**random weights**" in card


def test_names_cannot_break_out_of_the_card(tmp_path, world):
    run = tmp_path / "run"
    shutil.copytree(world.run, run)
    job = {name: getattr(Job.read(run), name) for name in ("command", "settings", "inputs")}
    job["settings"] |= {"data": "x`\n---\nlicense: mit\n| a |```", "model": "<b>`|"}
    (run / "job.json").write_text(json.dumps(job | {"sha256": json_digest(job)}))
    export(ExportConfig(str(tmp_path / "x"), str(run)))
    card = (tmp_path / "x" / "README.md").read_text()
    assert "\nlicense: mit" not in card.split("```bash")[0] and "| base model | `<b>'/` |" in card
    assert card.count("```") % 2 == 0 and code("a\nb|c`d") == "`a b/c'd`"
    # And broken files say nothing.
    (run / "job.json").write_text("{")
    (run / "log.jsonl").write_text("[1]}\nx}")
    export(ExportConfig(str(tmp_path / "y"), str(run)))
    assert "recipe" not in (tmp_path / "y" / "README.md").read_text()


def test_a_finished_folder_is_uploaded_when_asked(tmp_path, world, monkeypatch, capsys):
    hub = create_autospec(huggingface_hub.HfApi)
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    hub().create_repo.return_value = "https://huggingface.co/me/long-clip"
    export(ExportConfig(str(tmp_path / "quiet"), world.run))
    hub().create_repo.assert_not_called()
    export(ExportConfig(str(tmp_path / "x"), world.run, push_to_hub="me/long-clip"))
    hub().create_repo.assert_called_once_with("me/long-clip", private=True, exist_ok=True)
    uploaded = hub().upload_folder.call_args.kwargs
    assert uploaded | {"commit_message": ""} == {
        "repo_id": "me/long-clip", "folder_path": tmp_path / "x", "ignore_patterns": MARK, "commit_message": ""
    }  # fmt: skip
    assert "Uploaded to https://huggingface.co/me/long-clip (a new repository is private)" in capsys.readouterr().out
    card = (tmp_path / "x" / "README.md").read_text()
    assert 'from_pretrained("me/long-clip", subfolder="text_encoder")' in card and "this folder" not in card


def test_without_a_network_the_folder_is_whole_and_that_is_said(tmp_path, world):
    # The hub's own library, offline: HF_HUB_OFFLINE is set for all tests.
    with pytest.raises(UserError, match="is complete, but could not be uploaded to 'me/x': .*offline.*hf upload"):
        export(ExportConfig(str(tmp_path / "x"), world.run, push_to_hub="me/x"))
    assert load_text_encoder(tmp_path / "x")[0].config.max_position_embeddings == 248
