"""The released DeBias-CLIP's kind of file: two tables of positions, the text tower under `text.`, loaded everywhere."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.released import CAPTIONS, released

from debias_diffusion.app.export import export
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.loop import load_base_model, load_base_tokenizer, prepare_backbone

GUESSED = "does not name its activation"
close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings(f"ignore:.*{GUESSED}")
@pytest.mark.parametrize("prefix", ["", "text."])
def test_it_loads_everywhere_and_is_not_stretched_again(known, tmp_path, prefix):
    file, expected = released(tmp_path, prefix)
    named = f"deep-quickgelu:{file}"
    config = TrainConfig(data="x.json", output=str(tmp_path / "run"), model="deep-quickgelu", pretrained=str(file))
    assert load_base_tokenizer(replace(config, keep_positions=0)).context_length == 248
    load_two_tower(named).save(tmp_path / "saved")
    backbones = [load_two_tower(named), prepare_backbone(load_base_model(config), config)[0]]
    for backbone in (*backbones, load_backbone(str(tmp_path / "saved"))):
        assert (backbone.context_length, backbone.kept_positions, backbone.random_weights) == (248, 20, False)
        close(backbone.eval().encode_text(backbone.tokenize(CAPTIONS)), expected)
    export(ExportConfig(str(tmp_path / "folder"), str(file)))
    export(ExportConfig(str(tmp_path / "clip"), "deep-quickgelu", "clip", str(file)))
    clip = load_two_tower(tmp_path / "clip")
    close(clip.encode_text(clip.tokenize(CAPTIONS)), expected)
    for name in (file, named, tmp_path / "folder"):
        encoder, tokenizer = load_text_encoder(name)
        ids = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt").input_ids
        close(encoder(ids).pooler_output @ clip.model.text_projection, expected)


def test_under_text_any_base_model_fits_and_a_bare_file_warns_of_its_activation(known, tmp_path):
    file, expected = released(tmp_path, "text.")
    with pytest.warns(UserWarning, match=GUESSED):
        load_text_encoder(file)
    gelu = load_two_tower(f"deep:{file}")  # as weights trained from LAION's
    features = gelu.encode_text(gelu.tokenize(CAPTIONS))
    assert gelu.context_length == 248 and (features - expected).abs().max() > 1e-3
    long_clip, _ = released(tmp_path, "")
    with pytest.raises(UserError, match="is a Long-CLIP checkpoint, trained from OpenAI's weights"):
        load_two_tower(f"deep:{long_clip}")
