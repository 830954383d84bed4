"""The released DeBias-CLIP's kind of file: two tables of positions, the text tower under `text.`, loaded everywhere."""

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from helpers.released import CAPTIONS, INVENTORY, released

from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.optimizer import learning_rate
from debias_diffusion.training.two_tower import load_base_model, prepare_backbone
from research.as_released import AsReleasedConfig, rewrite
from research.reproduce.availability import PAIRS_OF_SHAREGPT4V

GUESSED = "does not name its activation"
close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings(f"ignore:.*{GUESSED}")
@pytest.mark.parametrize("prefix", ["", "text."])
def test_it_loads_everywhere_and_is_not_stretched_again(known, tmp_path, prefix):
    file, expected = released(tmp_path, prefix)
    named = f"deep-quickgelu:{file}"
    config = TrainConfig(data="x.json", output=str(tmp_path / "run"), model="deep-quickgelu", pretrained=str(file))
    for backbone in (load_two_tower(named), prepare_backbone(load_base_model(config), config)[0]):
        assert (backbone.context_length, backbone.kept_positions, backbone.random_weights) == (248, 20, False)
        close(backbone.eval().encode_text(backbone.tokenize(CAPTIONS)), expected)
    for name in (file, named):
        encoder, tokenizer = load_text_encoder(name)
        ids = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt").input_ids
        close(encoder(ids).pooler_output @ backbone.model.text_projection, expected)


def test_under_text_any_base_model_fits_and_a_bare_file_warns_of_its_activation(known, tmp_path):
    file, expected = released(tmp_path, "text.")
    with pytest.warns(UserWarning, match=GUESSED):
        load_text_encoder(file)
    gelu = load_two_tower(f"deep:{file}")  # as weights trained from LAION's
    assert (gelu.encode_text(gelu.tokenize(CAPTIONS)) - expected).abs().max() > 1e-3
    long_clip, _ = released(tmp_path, "")
    with pytest.raises(UserError, match="a Long-CLIP checkpoint"):
        load_two_tower(f"deep:{long_clip}")


def test_rewritten_as_its_authors_read_it_all_positions_are_of_the_first_table(known, tmp_path):
    file, trained = released(tmp_path, "text.")
    _, expected = released(tmp_path, "text.", first_table=True)
    rewritten = rewrite(AsReleasedConfig(str(file), str(tmp_path / "new" / "as-released.safetensors")))
    backbone = load_two_tower(f"deep-quickgelu:{rewritten}")
    close(backbone.encode_text(backbone.tokenize(CAPTIONS)), expected)
    assert (backbone.context_length, backbone.kept_positions) == (248, 20)
    assert (trained - expected).abs().max() > 1e-3
    long_clip, _ = released(tmp_path, "")
    with pytest.raises(UserError, match="holds no text.positional_embedding_res"):
        rewrite(AsReleasedConfig(str(long_clip), str(tmp_path / "none.safetensors")))


def test_the_recipe_as_released_ends_with_the_rate_that_the_file_holds():
    [group] = INVENTORY["optimizer_groups"]
    text = (Path(__file__).parents[1] / "research" / "debias-clip-as-released.yaml").read_text()
    config = TrainConfig(**yaml.safe_load(text) | {"model": "toy/clip", "pretrained": None})
    assert (config.chosen_method.component_parts, config.chosen_method.decay) == (4, "all")
    steps = PAIRS_OF_SHAREGPT4V // config.batch_size(PAIRS_OF_SHAREGPT4V) * config.epochs
    assert learning_rate(steps - 1, steps, config.learning_rate, config.warmup_steps(steps)) == group["lr"]
    settings = [config.weight_decay, [*config.betas], config.eps]
    assert settings == [group[name] for name in ("weight_decay", "betas", "eps")]
