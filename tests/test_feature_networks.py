"""Feature networks: what they are shown, what they say, and the weights they refuse."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_features import photographs_and_others, save_dino, save_inception
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, ViTModel

from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.networks import ClsFeatures, InceptionFeatures, TwoTowerFeatures, load_square
from debias_diffusion.eval.images.scores import cosines

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[list[Path], list[Path]]:
    return photographs_and_others(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def dino_folder(tmp_path_factory) -> str:
    return save_dino(tmp_path_factory.mktemp("dino"))


def test_square_is_centred(tmp_path):
    image = Image.new("RGB", (30, 10), (255, 0, 0))
    image.paste((0, 0, 255), (10, 0, 20, 10))
    image.save(tmp_path / "wide.png")
    square = load_square(tmp_path / "wide.png", 16)
    assert square.size == (16, 16) and square.getcolors() == [(256, (0, 0, 255))]
    assert load_square(Path(skimage.data_dir) / "camera.png", 8).mode == "RGB"
    os.truncate(tmp_path / "wide.png", 60)
    with pytest.raises(UserError, match=r"The image '.*wide.png' cannot be read: .*Delete it and start the same"):
        load_square(tmp_path / "wide.png", 16)


class Payload:
    """Pickles to code that makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_weights_with_code_are_refused_before_it_runs(dino_folder, tmp_path):
    marker = tmp_path / "executed"
    torch.save({"Conv2d_1a_3x3.conv.weight": Payload(marker)}, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Payload(marker)))
    for name in ("zip.pth", "plain.pth"):
        with pytest.raises(UserError, match=rf"{name}.*cannot be used"):
            InceptionFeatures(tmp_path / name, CPU)
    (tmp_path / "config.json").write_text((Path(dino_folder) / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload(marker)}))
    with pytest.raises(UserError, match="could not be loaded"):
        ClsFeatures(tmp_path, CPU)
    assert not marker.exists()
    torch.load(tmp_path / "zip.pth", weights_only=False)  # the payload is live: read without care it runs
    assert marker.exists()


def test_missing_or_wrong_weights_say_which_to_get(dino_folder, tmp_path):
    with pytest.raises(UserError, match=r"not there.*--inception-weights.*weights-inception-2015-12-05-6726825d\.pth"):
        InceptionFeatures(tmp_path / "nothing.pth", CPU)
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"cannot be used.*torch-fidelity"):
        InceptionFeatures(tmp_path / "other.pth", CPU)
    with pytest.raises(UserError, match="Give dinov2 a folder.*facebook/dinov2-small"):
        ClsFeatures(tmp_path / "nothing", CPU, "dinov2")
    (tmp_path / "config.json").write_text((Path(dino_folder) / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"it lacks \d+ of the model's weights"):
        ClsFeatures(tmp_path, CPU)


def test_inception_from_the_cache(tmp_path, monkeypatch, images):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(UserError, match=rf"{tmp_path}.*6726825d\.pth.*not there.*--inception-weights"):
        InceptionFeatures("cache", CPU)
    (tmp_path / "checkpoints").mkdir()
    cached = tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    save_inception(tmp_path).rename(cached)
    network = InceptionFeatures("cache", CPU)
    assert network.file == cached
    together, alone = network(images[1], 3), network(images[1][:1], 1)
    assert {size: tuple(rows.shape) for size, rows in together.items()} == {64: (3, 64), 2048: (3, 2048)}
    for size, rows in together.items():
        torch.testing.assert_close(rows[:1], alone[size], rtol=1e-3, atol=1e-4)
        assert rows.std(dim=0).mean() > 1e-3


def normalised(path: Path, size: int) -> torch.Tensor:
    pixels = np.asarray(load_square(path, size)) / 255
    pixels = torch.tensor((pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225], dtype=torch.float32)
    return pixels.permute(2, 0, 1)[None]


def test_dino_score_is_the_cosine_of_cls_features(dino_folder, images):
    photographs, others = images[0][:3], images[1]
    dino = ClsFeatures(dino_folder, CPU)
    model = ViTModel.from_pretrained(dino_folder, add_pooling_layer=False).eval()
    features = []
    for path in photographs + others:
        with torch.no_grad():
            features.append(model(normalised(path, 32)).last_hidden_state[0, 0].double().numpy())
    expected = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(features[:3], features[3:], strict=True)]
    assert np.std(expected) > 1e-3
    assert cosines(dino(photographs, 4), dino(others, 2)) == pytest.approx(expected, abs=1e-5)


def save_dinov2(folder: Path, image_size: int) -> Dinov2Model:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "mlp_ratio": 2, "patch_size": 14}
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(image_size=image_size, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def test_dinov2_is_shown_224_pixels(tmp_path, images):
    model = save_dinov2(tmp_path / "large", 518)
    network = ClsFeatures(tmp_path / "large", CPU, "dinov2")
    assert network.size == 224 and network.width == 24
    with torch.no_grad():
        blocks = model(pixel_values=normalised(images[0][0], 224), output_hidden_states=True)
        expected = model.layernorm(blocks.hidden_states[-1])[:, 0]  # CLS, after the last norm
    assert blocks.last_hidden_state.shape[1] == 1 + (224 // 14) ** 2
    torch.testing.assert_close(network(images[0][:2], 2)[:1], expected, rtol=1e-4, atol=1e-4)
    save_dinov2(tmp_path / "small", 28)
    assert ClsFeatures(tmp_path / "small", CPU, "dinov2").size == 28


def test_a_two_tower_reads_images_and_texts_by_its_transform_and_tokenizer(tmp_path, images):
    network = TwoTowerFeatures(save_tiny_clip(tmp_path), CPU)
    backbone = network.backbone
    seen = network.of_images(images[0][:3], 2)
    for row, path in zip(seen, images[0], strict=False):
        with torch.no_grad(), Image.open(path) as image:
            expected = backbone.encode_image(backbone.preprocess(image.convert("RGB"))[None])[0]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
    texts = ["A cat.", "Two dogs. " * 40, "A red bird."]
    with torch.no_grad():
        expected = torch.cat([backbone.encode_text(backbone.tokenize([text])) for text in texts])
    torch.testing.assert_close(network.of_texts(texts, 2), expected, rtol=1e-4, atol=1e-4)
    assert "Resize(size=32" in network.resize and "CenterCrop(size=(32, 32))" in network.resize
