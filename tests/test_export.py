import json
from itertools import pairwise
from pathlib import Path

import open_clip
import pytest
import torch
from helpers.text_encoders import CAPTIONS, SMALL, Expected, long_clip_state, text_backbone
from helpers.tiny_clip import CORRECTIONS, correct
from huggingface_hub import ModelCard
from transformers import CLIPModel, CLIPTextModel, CLIPTokenizer

from debias_diffusion import load_text_encoder
from debias_diffusion.app import export as export_module
from debias_diffusion.app.export import export
from debias_diffusion.app.model_card import code
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.data.seen import read_seen, write_seen
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.single_file import write_file
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.errors import UserError
from debias_diffusion.eval.registry import with_reports
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness
from debias_diffusion.jobs import Job
from debias_diffusion.text.tokens import clip_tokenizer


@pytest.fixture(scope="module")
def run(finished_run):
    return str(finished_run)


@pytest.fixture(scope="module")
def longclip(tmp_path_factory):
    """A Long-CLIP's file, with CLIP's own vocabulary, the only one that ComfyUI knows; and what it computes."""
    backbone = text_backbone(SMALL, 64, quick_gelu=True, vocabulary=clip_tokenizer)
    torch.save(long_clip_state(backbone), file := tmp_path_factory.mktemp("longclip") / "longclip.pt")
    return str(file), Expected(backbone)


def test_a_run_leaves_in_every_format(tmp_path, run):
    trained = load_backbone(f"{run}/last").eval()
    for to in ("diffusers", "open_clip", "clip"):  # the first is another name for transformers
        export(ExportConfig(str(tmp_path / to), run, to))
    encoder = CLIPTextModel.from_pretrained(tmp_path / "diffusers", subfolder="text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "diffusers", subfolder="tokenizer")
    Expected(trained).check(encoder.eval(), tokenizer)
    model = open_clip.create_model(f"local-dir:{tmp_path / 'open_clip'}").eval()
    tokens, pixels = trained.tokenize(CAPTIONS), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.encode_text(tokens.padded()), trained.encode_text(tokens), rtol=0, atol=1e-5)
    theirs = CLIPModel.from_pretrained(tmp_path / "clip").eval().get_image_features(pixels).pooler_output
    torch.testing.assert_close(theirs, trained.encode_image(pixels), rtol=0, atol=1e-5)


def test_a_text_encoder_alone_goes_from_format_to_format(tmp_path, longclip, capsys, monkeypatch):
    file, expected = longclip
    with pytest.raises(UserError, match="width 64 and 12 blocks, and ComfyUI has no such .* clip_l .768, 12."):
        export(ExportConfig(str(tmp_path / "a.safetensors"), str(file), "comfyui"))
    assert not (tmp_path / "a.safetensors").exists()
    monkeypatch.setitem(export_module._COMFYUI_ENCODERS, (64, 12), ("clip_l", "quick_gelu"))  # a tiny clip_l
    for source, name in pairwise((file, *(tmp_path / name for name in ("a.safetensors", "folder", "b.safetensors")))):
        export(ExportConfig(str(name), str(source), "comfyui" if name.suffix else "transformers"))
        expected.check(*load_text_encoder(name))
        if name.is_dir():
            write_seen(name, {"data": [(2, 5)]})  # of it ComfyUI's file tells, too
    assert read_seen(EncoderSpec.parse(name)) == {"data": [(2, 5)]}
    for wrong in ([-5, 10], [50, 10], [0.5, 2.5]):
        write_seen(tmp_path / "folder", {"data": [wrong]})
        with pytest.raises(UserError, match="seen.json of .* is damaged"):
            read_seen(EncoderSpec.parse(tmp_path / "folder"))
    assert "does not align a CLIP-L of 248 positions with clip_g past 75 tokens" in capsys.readouterr().out


def test_what_a_format_cannot_hold_is_refused(tmp_path, longclip, world, monkeypatch):
    # As LAION's ViT-L-14, at a tenth of its width: ComfyUI would run it otherwise.
    monkeypatch.setitem(export_module._COMFYUI_ENCODERS, (64, 12), ("clip_l", "quick_gelu"))
    gelu, output = str(tmp_path / "gelu.safetensors"), tmp_path / "x.safetensors"
    write_file(to_transformers(text_backbone(SMALL, 64, quick_gelu=False, vocabulary=clip_tokenizer))[0], Path(gelu))
    for model, settings, message in (
        ("/nowhere", {"to": "comfyui", "push_to_hub": "me/x"}, "comfyui is a file"),
        (longclip[0], {"to": "clip"}, "does not name its model"),
        (longclip[0], {"projection": True}, "no projection"),
        (world[0], {"to": "comfyui"}, "CLIP's of 49408"),
        (gelu, {"to": "comfyui"}, "clip_l with the activation quick_gelu, .* trained with gelu"),
    ):
        with pytest.raises(UserError, match=message):
            export(ExportConfig(str(output), model, **settings))
    assert not output.exists()


def test_nothing_of_anyone_else_is_overwritten(tmp_path, world):
    others = [tmp_path / name for name in ("cache/.cache/x", "file.safetensors", "sdxl/text_encoder/config.json")]
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    for output, to, message in (
        ("sdxl", "transformers", "'text_encoder/config.json', which `export` did not write"),
        ("cache", "transformers", "'.cache/x', which `export` did not write"),
        ("file.safetensors", "comfyui", "no file of an export"),
    ):
        with pytest.raises(UserError, match=message):
            export(ExportConfig(str(tmp_path / output), world[0], to))
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == others
    assert {file.read_text() for file in others} == {"mine"}


def test_an_export_replaces_another_where_nothing_was_changed_since(tmp_path, world, run):
    output = tmp_path / "mine"
    output.symlink_to("there")
    for model, to in ((world[0], "transformers"), (run, "clip")):
        export(ExportConfig(str(output), model, to))
        (output / "__pycache__").mkdir()  # of pipeline.py
    assert output.is_symlink() and not (tmp_path / "there" / "text_encoder").exists()
    written = (output / "README.md").read_text()
    (output / "README.md").write_text(written.replace("license: unknown", "license: mit"))
    with pytest.raises(UserError, match="'README.md', .* changed since"):
        export(ExportConfig(str(output), world[0]))
    (output / "README.md").write_text(written)
    (output / "text_encoder").symlink_to("README.md")  # of others, with a name of ours
    with pytest.raises(UserError, match="'text_encoder', .* changed since"):
        export(ExportConfig(str(output), world[0]))


def test_the_card_says_what_the_run_left(tmp_path, world, run):
    base, data, images = world
    scores, pairs = tmp_path / "scores", {"data": data, "images": images, "limit": 10}
    evaluate_retrieval(RetrievalConfig([run, base], str(scores), **pairs))
    evaluate_robustness(RobustnessConfig([run], str(scores), **pairs))
    export(ExportConfig(str(tmp_path / "x"), run, scores=str(scores)))
    card = (tmp_path / "x" / "README.md").read_text()
    front = ModelCard.load(tmp_path / "x" / "README.md", ignore_metadata_errors=False).data  # as the hub does
    assert (front.license, front.library_name) == ("unknown", "transformers")
    robustness = json.loads((scores / "robustness.json").read_text())["encoders"]["finished_run"]
    for part in (
        f"`data.json`, sha256 `{Job.read(run).inputs['data']}`",
        "debias-diffusion train --data data.json --images images --validation 6",
        f"| {robustness['recall_at_1_percent']['remove']['text_to_image']:.1f} (",
        "evaluate retrieval --encoders finished_run base --data data.json --limit 10 --images images",
    ):
        assert part in card
    # The machine's folders are nobody's business, nor are the scores of the other model that was evaluated.
    for part in (str(Path(run).parent), str(tmp_path), "--workers", "--output", "| base |"):
        assert part not in card


def test_scores_of_other_weights_or_broken_ones_do_not_get_into_the_card(tmp_path, run):
    other = {"digests": {"encoders": {"other": "0"}}, "encoders": {"other": {}}, "settings": {}, "notes": []}
    broken = '{"settings": 3, "recall_percent": 4, "pairs": 5, "digests": 6}'
    for name, content, message in (
        ("nothing.json", "", "holds none of"),
        *(
            (f"{name}.json", json.dumps(other), f"{name}.json' was measured with another model")
            for name in with_reports()
        ),
        ("retrieval.json", broken, "no result of `debias-diffusion evaluate retrieval`"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            export(ExportConfig(str(tmp_path / "x"), run, scores=str(tmp_path)))
        (tmp_path / name).unlink()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("part", CORRECTIONS)
def test_scores_from_before_a_correction_do_not_get_into_the_card(part, tmp_path, world, copy_of, coarse_results):
    model, pairs = copy_of(Path(world[0])), {"data": world[1], "images": world[2], "limit": 10}
    evaluate_retrieval(RetrievalConfig([str(model)], str(tmp_path / "scores"), **pairs))
    correct(model, part)
    with pytest.raises(UserError, match="another model"):
        export(ExportConfig(str(tmp_path / "x"), str(model), "open_clip", scores=str(tmp_path / "scores")))


def test_names_cannot_break_out_of_the_card(tmp_path, run, copy_of):
    copy = copy_of(Path(run), tmp_path / "run")
    job = {name: getattr(Job.read(copy), name) for name in ("command", "settings", "inputs")}
    job["settings"] |= {"data": "x`\n---\nlicense: mit\n| a |```", "model": "<b>`|"}
    (copy / "job.json").write_text(json.dumps(job))
    export(ExportConfig(str(tmp_path / "x"), str(copy)))
    card = (tmp_path / "x" / "README.md").read_text()
    assert "\nlicense: mit" not in card.split("```bash")[0] and "| base model | `<b>'/` |" in card
    assert card.count("```") % 2 == 0 and code("separate:/private/a\nb|c`d") == "`separate:a b/c'd`"


def test_a_folder_that_could_not_be_uploaded_is_complete(tmp_path):
    with pytest.raises(UserError, match="is complete, but could not be uploaded .*offline.*hf upload"):
        export(ExportConfig(str(tmp_path / "blocks"), to="modular", push_to_hub="me/x"))
    assert (tmp_path / "blocks" / "block.py").is_file()
