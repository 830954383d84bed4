"""Feature networks: what they are shown, what they say, and the weights they refuse."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image
from tiny_features import photographs_and_others, save_dino
from transformers import ViTModel

from debias_diffusion.errors import UserError
from debias_diffusion.eval.feature_networks import ClsFeatures, InceptionFeatures, load_square
from debias_diffusion.eval.picture_scores import dino_score

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> tuple[list[Path], list[Path]]:
    return photographs_and_others(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def dino_folder(tmp_path_factory) -> str:
    return save_dino(tmp_path_factory.mktemp("dino"))


def test_square_is_centred(tmp_path):
    Image.new("RGB", (30, 10), (255, 0, 0)).save(tmp_path / "wide.png")
    with Image.open(tmp_path / "wide.png") as image:
        image.paste((0, 0, 255), (10, 0, 20, 10))
        image.save(tmp_path / "wide.png")
    square = load_square(tmp_path / "wide.png", 16)
    assert square.size == (16, 16) and square.getcolors() == [(256, (0, 0, 255))]
    assert load_square(Path(skimage.data_dir) / "camera.png", 8).mode == "RGB"


class Payload:
    """Pickles to code that makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_weights_with_code_are_refused_before_it_runs(tmp_path):
    marker = tmp_path / "executed"
    torch.save({"Conv2d_1a_3x3.conv.weight": Payload(marker)}, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Payload(marker)))
    for name in ("zip.pth", "plain.pth"):
        with pytest.raises(UserError, match=rf"{name}.*cannot be used"):
            InceptionFeatures(tmp_path / name, CPU)
        assert not marker.exists()
    torch.load(tmp_path / "zip.pth", weights_only=False)  # the payload is live: read without care it runs
    assert marker.exists()


def test_missing_or_wrong_weights_say_which_file_to_get(tmp_path):
    with pytest.raises(UserError, match=r"not there.*--inception_weights.*weights-inception-2015-12-05-6726825d\.pth"):
        InceptionFeatures(tmp_path / "nothing.pth", CPU)
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"cannot be used.*torch-fidelity"):
        InceptionFeatures(tmp_path / "other.pth", CPU)


def test_dino_score_is_the_mean_cosine_of_cls_features(dino_folder, pictures):
    photographs, others = pictures[0][:3], pictures[1]
    dino = ClsFeatures(dino_folder, CPU)
    model = ViTModel.from_pretrained(dino_folder, add_pooling_layer=False).eval()
    features = []
    for path in photographs + others:
        pixels = np.asarray(load_square(path, 32)) / 255
        pixels = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        with torch.no_grad():
            hidden = model(torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None]).last_hidden_state
        features.append(hidden[0, 0].double().numpy())
    cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(features[:3], features[3:], strict=True)]
    assert np.std(cosines) > 1e-3
    assert dino_score(dino(photographs, 4), dino(others, 2)) == pytest.approx(np.mean(cosines), abs=1e-5)


def test_dino_weights_that_are_missing_or_code_are_refused(dino_folder, tmp_path):
    (tmp_path / "config.json").write_text((Path(dino_folder) / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"it lacks \d+ of the model's weights"):
        ClsFeatures(tmp_path, CPU)
    marker = tmp_path / "executed"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload(marker)}))
    with pytest.raises(UserError, match="could not be loaded"):
        ClsFeatures(tmp_path, CPU)
    assert not marker.exists()
