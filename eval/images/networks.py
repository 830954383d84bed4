"""Networks whose features scores are computed from, and how each of them reads images."""

import io
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import torch
from open_clip.constants import IMAGENET_MEAN, IMAGENET_STD
from PIL import Image
from torch import Tensor
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, FeatureExtractorInceptionV3
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm
from transformers import AutoModel

from debias_diffusion.clip.weight_files import check_finite, model_digest, read_state
from debias_diffusion.data.images import open_image
from debias_diffusion.data.retrieval import embed_texts
from debias_diffusion.encoders.hub import load_pretrained
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import path_digest
from debias_diffusion.toyworld.shipped import shipped

# Of generated and reference images alike.
RESIZE = "largest centred square, then Pillow's bicubic with antialiasing to {size} x {size} pixels"
FID_FEATURES = (64, 2048)
CACHED = "cache"  # in place of a file: the one that torch-fidelity has downloaded
# DINOv2's position table is of 518 pixels, but it was trained at 224, and its processor uses that.
DINOV2_SIZE = 224
# An image, its file, or a function that returns it as RGB.
ImageLike = Image.Image | str | os.PathLike | Callable[[], Image.Image]


def load_image(image: ImageLike) -> Image.Image:
    """The image, as RGB. Raises UserError for a file that cannot be read."""
    if not isinstance(image, str | os.PathLike):
        return image() if callable(image) else image.convert("RGB")
    advice = "Delete it, and start the command that generated it again."
    with explain_failure(f"The image {os.fspath(image)!r} cannot be used", advice):
        return open_image(image)


def load_square(image: ImageLike, size: int) -> Image.Image:
    """The largest centred square of an image, as RGB, resized with Pillow's antialiased bicubic filter."""
    image = load_image(image)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    # Cropped first, because with box= Pillow's filter would read pixels outside of the box.
    square = image.crop((left, top, left + side, top + side))
    return square.resize((size, size), Image.Resampling.BICUBIC)


_INCEPTION_ADVICE = (
    "Pass --inception-weights the file weights-inception-2015-12-05-6726825d.pth of torch-fidelity's releases "
    f"({URL_INCEPTION_V3}), which pytorch-fid calls pt_inception-2015-12-05-6726825d.pth, or 'cache' when "
    "torch-fidelity has downloaded it before. Without --inception-weights FID is skipped."
)


class InceptionFeatures:
    """The features of torch-fidelity's Inception, 64 and 2048 of them, of whole images as it reads them.

    It resizes inside, without antialiasing and without keeping the ratio of width to height.

    Args:
        weights: file of torch-fidelity's Inception weights, or "cache" for the one in torch hub's cache. It is read as
            plain tensors only: a pickle that holds code is refused, and nothing in it runs.

    Raises:
        UserError: the file is missing, or does not hold the tensors of this network.
    """

    resize = "torch-fidelity's own: the whole image to 299 x 299 pixels, TensorFlow 1's bilinear without antialiasing"

    def __init__(self, weights: str | os.PathLike, device: torch.device):
        cached = Path(torch.hub.get_dir()) / "checkpoints" / URL_INCEPTION_V3.rsplit("/", 1)[1]
        self.file = cached if weights == CACHED else Path(weights)
        named = f"Inception weights {str(self.file)!r}"
        with explain_failure(f"{named} cannot be used", _INCEPTION_ADVICE):
            if not self.file.is_file():
                raise UserError(f"{named} are not there. {_INCEPTION_ADVICE}")
            state = read_state(self.file)
            check_finite(state.items(), named)
            # torch-fidelity unpickles its file without any check. So it gets a copy of these tensors, never the file
            # itself, which could also change after our check.
            copy = io.BytesIO()
            torch.save(state, copy)
            copy.seek(0)
            extractor = FeatureExtractorInceptionV3("inception", [str(n) for n in FID_FEATURES], copy)
        self.extractor, self.device = extractor.to(device), device

    def digest(self) -> str:
        """Of the file."""
        return path_digest(self.file)

    @torch.inference_mode()
    def __call__(self, images: Sequence[ImageLike], batch_size: int) -> dict[int, Tensor]:
        """{64: [N, 64], 2048: [N, 2048]} features of the images, from one pass, on the CPU."""
        features = []
        for start in tqdm(range(0, len(images), batch_size), desc="Inception features"):
            pixels = [pil_to_tensor(load_image(image)) for image in images[start : start + batch_size]]
            for _, of_one_size in groupby(pixels, lambda image: image.shape):
                features.append([part.cpu() for part in self.extractor(torch.stack([*of_one_size]).to(self.device))])
        return {n: torch.cat(parts) for n, parts in zip(FID_FEATURES, zip(*features, strict=True), strict=True)}


class ClsFeatures:
    """A transformers vision model's CLS features after its last norm.

    Args:
        model: its folder, hub id, or "toy/features". Images are normalised with ImageNet's mean and standard deviation,
            as DINO was trained, at the size that the model's configuration names; DINOv2 at 224 pixels (or fewer, if
            its configuration names fewer), to which it resizes its position table.
        option: the setting that names the model, for error messages.

    Attributes:
        size: side of the images that the model reads, in pixels.

    Raises:
        UserError: the model cannot be loaded.
    """

    def __init__(self, model: str | os.PathLike, device: torch.device, option: str = "dino"):
        advice = (
            f"Give {option} a folder of a transformers vision model with config.json and its weights, or a hub id "
            f"(facebook/dino-vits16, facebook/dinov2-small) once the hub's cache holds it, or null to skip its score."
        )
        with explain_failure(f"The model {os.fspath(model)!r} could not be loaded", advice):
            location = shipped(model)
            # Files other than safetensors are read with weights_only=True.
            options = {"dtype": torch.float32, "trust_remote_code": False}
            loaded = load_pretrained(AutoModel, location, repr(os.fspath(model)), **options)
            if getattr(loaded, "pooler", None) is not None:
                loaded.pooler = None  # random if its weights are missing, and the digest must not depend on it
            self.model = loaded.to(device)
            self.size = self.model.config.image_size
            if self.model.config.model_type == "dinov2":
                self.size = min(self.size, DINOV2_SIZE)
        self.resize, self.device = RESIZE.format(size=self.size), device

    def digest(self) -> str:
        """See `model_digest`."""
        return model_digest(self.model, self.model.config)

    @torch.inference_mode()
    def __call__(self, images: Sequence[ImageLike], batch_size: int) -> Tensor:
        """[N, width] features of the images, on the CPU."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        features = []
        for start in tqdm(range(0, len(images), batch_size), desc="CLS features"):
            squares = [pil_to_tensor(load_square(image, self.size)) for image in images[start : start + batch_size]]
            pixels = ((torch.stack(squares).float() / 255 - mean) / std).to(self.device)
            features.append(self.model(pixel_values=pixels).last_hidden_state[:, 0].float().cpu())
        return torch.cat(features)


class TwoTowerFeatures:
    """The features of images and texts by the CLIP that `load_two_tower` loads, with its own transform and tokenizer.

    Attributes:
        resize: how the model reads images, in words.

    Raises:
        UserError: there is no such model, or it has no image tower.
    """

    def __init__(self, name: str, device: torch.device):
        self.backbone, self.device = load_two_tower(name).to(device), device
        self.digest = self.backbone.digest
        self.resize = f"the model's own: {', '.join(map(str, self.backbone.read_pixels.transforms[:-2]))}"

    @torch.inference_mode()
    def of_images(self, images: Sequence[ImageLike], batch_size: int) -> Tensor:
        """[N, D] features of the images, on the CPU."""
        features = []
        for start in tqdm(range(0, len(images), batch_size), desc="two-tower features"):
            pixels = [self.backbone.read_pixels(load_image(image)) for image in images[start : start + batch_size]]
            features.append(self.backbone.encode_image(torch.stack(pixels).to(self.device)).float().cpu())
        return torch.cat(features)

    def of_texts(self, texts: Sequence[str], batch_size: int) -> Tensor:
        """[N, D] features of the texts, cut at the context length, on the CPU."""
        return embed_texts(self.backbone, texts, batch_size, self.device)
