import json
import shutil

import open_clip
import pytest
import torch
from helpers.texts import HOSTILE, random_strings
from helpers.tiny_clip import tiny_siglip, without_weights
from open_clip.tokenizer import HFTokenizer

from debias_diffusion.clip.families import find_family
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.errors import UserError
from debias_diffusion.text.tokens import Markers, clip_tokenizer

CAPTIONS = ["The cat!", "a cat, the thing on the mat. " * 9, "", "x1 &amp; 2"]


def test_every_model_of_open_clip_has_its_family_or_is_refused():
    families = {}
    for model in open_clip.list_models():
        try:
            family = find_family(model, open_clip.get_model_config(model))
            families[model] = family.name, family.loss
        except UserError as error:
            assert model in str(error)
    siglips = {model for model in open_clip.list_models() if "SigLIP" in model}
    assert len(siglips) > 20 and {model for model in families if families[model][0] == "SigLIP"} == siglips
    for model in ("ViT-B-16-quickgelu", "ViT-L-14-336-quickgelu", "ViT-H-14", "ViT-bigG-14"):
        assert families[model] == ("CLIP", "softmax")
    assert not families.keys() & {"coca_ViT-B-32", "nllb-clip-base-siglip", "ViT-L-14-CLIPA", "MobileCLIP-S1"}


@pytest.mark.parametrize("version", [1, 2])
def test_rows_are_those_of_open_clips_tokenizer_in_the_same_folder(tmp_path, version):
    backbone = tiny_siglip(version)
    backbone.save(tmp_path)
    theirs = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
    assert isinstance(theirs, HFTokenizer)
    texts = HOSTILE + CAPTIONS + list(random_strings(500))
    ours = backbone.tokenize(texts).padded()
    assert torch.equal(ours, theirs(texts))
    assert ours.shape == (len(texts), 64) and (ours == backbone.tokenizer.markers.pad).any()
    tokenizer, pad = backbone.tokenizer, {1: 1, 2: 0}[version]  # pads stand before the text and after EOS
    assert tokenizer.markers == Markers(sot=None, eot=1, pad=pad)


@pytest.mark.parametrize(("version", "keep", "length"), [(1, 20, 196), (2, 0, 256)])
def test_a_stretched_folder_loads_in_open_clip_and_here(tmp_path, version, keep, length):
    backbone = tiny_siglip(version).eval()
    backbone.stretch(keep)
    backbone.save(tmp_path)
    expected = backbone.encode_text(backbone.tokenize(CAPTIONS))
    again = load_backbone(str(tmp_path)).eval()
    assert torch.equal(again.encode_text(again.tokenize(CAPTIONS)), expected)
    assert (again.context_length, again.kept_positions, again.loss) == (length, keep, "sigmoid")
    assert torch.equal(again.logit_bias, backbone.logit_bias)
    theirs = open_clip.create_model(f"local-dir:{tmp_path}").eval()
    rows = open_clip.get_tokenizer(f"local-dir:{tmp_path}")(CAPTIONS)
    assert rows.shape == (4, length) and torch.equal(theirs.encode_text(rows), expected)


def test_code_that_a_tokenizer_brings_is_not_run(tmp_path):
    tiny_siglip().save(tmp_path)
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Hostile: pass\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Hostile", "auto_map": {"AutoTokenizer": ["hostile.Hostile", "hostile.Hostile"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot be used"):
        load_backbone(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_the_tokenizer_may_lie_in_a_folder_of_its_own(tmp_path):
    backbone = tiny_siglip()
    backbone.save(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(tmp_path / name, tmp_path / "tokenizer" / name)
    assert torch.equal(load_backbone(str(tmp_path)).tokenize(CAPTIONS).padded(), backbone.tokenize(CAPTIONS).padded())
    clip_tokenizer(64).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="has 49408 ids, the text tower 44"):
        load_backbone(str(tmp_path))
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="hf download"):
        load_backbone(str(tmp_path))


# OpenAI's and LAION's largest, and SigLIPs of every kind of tower but for the size of their images
MODELS = ["ViT-L-14-quickgelu", "ViT-bigG-14", "ViT-B-16-SigLIP", "ViT-SO400M-14-SigLIP", "ViT-gopt-16-SigLIP2-256"]


@pytest.mark.parametrize("model", MODELS)
def test_every_configuration_reads_its_context_length_and_trains_all_its_weights(model):
    config = open_clip.get_model_config(model)
    with torch.device("meta"):
        backbone = without_weights(open_clip.create_model(model, load_weights=False, device="meta"), config)
        longer = 10 + 4 * (backbone.context_length - 10)
        backbone.stretch(keep=10)
    assert backbone.context_length == longer == config["text_cfg"]["context_length"]
    assert backbone.loss == ("sigmoid" if "SigLIP" in model else "softmax")
    tokens = backbone.tokenize(["a" * 400, "the cat"])
    assert tokens.lengths[0] + tokens.n_prefix[0] == longer
    images = torch.zeros(2, 3, *backbone.model.visual.image_size, dtype=torch.uint8, device="meta")
    features = torch.cat([backbone.encode_text(tokens.to("meta")), backbone.encode_image(images)])
    assert features.shape == (4, config["embed_dim"])
    features.sum().backward()
    untrained = {name for name, parameter in backbone.model.named_parameters() if parameter.grad is None}
    assert untrained == ({"logit_scale", "logit_bias"} if "SigLIP" in model else {"logit_scale"})
