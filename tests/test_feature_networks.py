"""Feature networks: what they are shown, what they say, and the weights they refuse."""

import pickle
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.text_encoders import Runs
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_features import photographs_and_others, save_dino, save_inception
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, ViTModel

from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.networks import ClsFeatures, InceptionFeatures, TwoTowerFeatures, load_square

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return photographs_and_others(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    return save_dino(tmp_path_factory.mktemp("dino"))


def test_square_is_centred(tmp_path):
    image = Image.new("RGB", (30, 10), (255, 0, 0))
    image.paste((0, 0, 255), (10, 0, 20, 10))
    image.save(tmp_path / "wide.png")
    square = load_square(tmp_path / "wide.png", 16)
    assert square.size == (16, 16) and square.getcolors() == [(256, (0, 0, 255))]


def test_weights_with_code_are_refused_before_it_runs(dino, tmp_path):
    marker = tmp_path / "executed"
    torch.save({"Conv2d_1a_3x3.conv.weight": Runs(marker)}, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Runs(marker)))
    shutil.copy(Path(dino, "config.json"), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Runs(marker)}))
    for network, name, message in (
        (InceptionFeatures, "zip.pth", "zip.pth.*cannot be used"),
        (InceptionFeatures, "plain.pth", "plain.pth.*cannot be used.*torch-fidelity"),
        (ClsFeatures, "", "could not be loaded"),
        (partial(ClsFeatures, option="dinov2"), "nothing", "Give dinov2 a folder.*facebook/dinov2-small"),
    ):
        with pytest.raises(UserError, match=message):
            network(tmp_path / name, CPU)
    assert not marker.exists()
    torch.load(tmp_path / "zip.pth", weights_only=False)  # the payload is live: read without care it runs
    assert marker.exists()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"lack \d+ tensors of the model"):
        ClsFeatures(tmp_path, CPU)


def test_inception_from_the_cache(tmp_path, monkeypatch, images):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(UserError, match=rf"{tmp_path}.*6726825d\.pth.*not there.*--inception-weights"):
        InceptionFeatures("cache", CPU)
    (tmp_path / "checkpoints").mkdir()
    save_inception(tmp_path).rename(tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth")
    network = InceptionFeatures("cache", CPU)
    together, alone = network(images[2:], 3), network(images[2:3], 1)
    assert {size: tuple(rows.shape) for size, rows in together.items()} == {64: (3, 64), 2048: (3, 2048)}
    for size, rows in together.items():
        torch.testing.assert_close(rows[:1], alone[size], rtol=1e-3, atol=1e-4)
        assert rows.std(dim=0).mean() > 1e-3


def normalised(path, size):
    pixels = np.asarray(load_square(path, size)) / 255
    pixels = torch.tensor((pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225], dtype=torch.float32)
    return pixels.permute(2, 0, 1)[None]


@pytest.mark.usefixtures("no_grad")
def test_dino_features_are_those_of_cls(dino, images):
    model = ViTModel.from_pretrained(dino, add_pooling_layer=False).eval()
    expected = torch.cat([model(normalised(path, 32)).last_hidden_state[:, 0] for path in images])
    assert expected.std(dim=0).mean() > 1e-3
    torch.testing.assert_close(ClsFeatures(dino, CPU)(images, 2), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(("trained_at", "shown"), [(518, 224), (28, 28)])
def test_dinov2_is_shown_at_most_224_pixels(tmp_path, images, trained_at, shown):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "mlp_ratio": 2, "patch_size": 14}
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(image_size=trained_at, initializer_range=0.3, **sizes)).eval()
    model.save_pretrained(tmp_path)
    network = ClsFeatures(tmp_path, CPU, "dinov2")
    assert network.size == shown
    states = model(normalised(images[0], shown), output_hidden_states=True).hidden_states
    assert states[-1].shape[1] == 1 + (shown // 14) ** 2
    expected = model.layernorm(states[-1])[:, 0]  # CLS, after the last norm
    torch.testing.assert_close(network(images[:2], 2)[:1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_grad")
def test_a_two_tower_reads_images_and_texts_by_its_transform_and_tokenizer(tmp_path, images):
    network = TwoTowerFeatures(save_tiny_clip(tmp_path), CPU)
    backbone, texts = network.backbone, ["A cat.", "Two dogs. " * 40, "A red bird."]
    pixels = [backbone.preprocess(Image.open(path).convert("RGB"))[None] for path in images]
    shown = torch.cat([backbone.encode_image(image) for image in pixels])
    read = torch.cat([backbone.encode_text(backbone.tokenize([text])) for text in texts])
    torch.testing.assert_close(network.of_images(images, 2), shown, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(network.of_texts(texts, 2), read, rtol=1e-4, atol=1e-4)
