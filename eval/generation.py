"""Images drawn from captions against the originals: FID (Fréchet inception distance) and DINO score (Table S7)."""

import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, FeatureExtractorInceptionV3
from torchmetrics.image.fid import FrechetInceptionDistance
from tqdm import tqdm
from transformers import AutoModel

from debias_diffusion.data import BadRecord, ImageFolder, Record
from debias_diffusion.data.dataset import UNREADABLE, unreadable
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError
from debias_diffusion.files import write_json
from debias_diffusion.pipelines.loading import check_base, load_sdxl
from debias_diffusion.tokens import clean

from .inputs import check_batch_size, print_left_out, read_pairs
from .report import digest, table, versions, weights_digest

# Of generated and original images alike.
RESIZE = "largest centred square, then Pillow's bicubic with antialiasing to {size} x {size} pixels"
FID_FEATURES = (64, 2048)
GUIDANCE_SCALE = 7.0  # that of the `generate` command
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class GenerationConfig:
    """Settings of an evaluation of generated images.

    Attributes:
        data: JSON file in ShareGPT4V's layout; its captions are the prompts, its images the originals.
        images: Folder that the data file's image paths start from.
        base: SDXL folder in diffusers' layout, or a hub id.
        output: Folder for the result, `generation.json`, and the generated images, `images/000000.png` and so on.
            Images that are finished there are kept, if they were made with the same settings.
        encoder: Text encoder that takes the place of SDXL's first one: a folder written by `export`, or of training.
            The default is SDXL's own.
        limit: Use only the first so many pairs (1000 are ShareGPT4V's validation split). null uses all.
        seed: Image i starts from noise seeded with this number + i, the same on every device.
        steps: Denoising steps.
        inception_weights: File of torch-fidelity's Inception weights, for FID. Without it FID is skipped.
        dino: Folder or hub id of DINO ViT-S/16 in transformers' layout (facebook/dino-vits16), for the DINO score.
            Without it the DINO score is skipped.
        batch_size: Images scored at once; they are generated one by one.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    data: str
    images: str
    base: str
    output: str
    encoder: str | None = None
    limit: int | None = 1000
    seed: int = 0
    steps: int = 30
    inception_weights: str | None = None
    dino: str | None = None
    batch_size: int = 32
    device: str | None = None


def load_square(path: str | os.PathLike, size: int) -> Image.Image:
    """The largest centred square of an image, as RGB, resized with Pillow's antialiased bicubic filter."""
    with Image.open(path) as image:
        image = image.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    # Cropped first, because with box= Pillow's filter would look past the box's edge.
    return image.crop(box).resize((size, size), Image.Resampling.BICUBIC)


def _batches(paths: Sequence[Path], size: int, batch_size: int, what: str) -> Iterator[Tensor]:
    """The images as uint8 [B, 3, size, size]."""
    for start in tqdm(range(0, len(paths), batch_size), desc=what):
        squares = [np.asarray(load_square(path, size)) for path in paths[start : start + batch_size]]
        yield torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)


class InceptionScore:
    """FID with torch-fidelity's Inception, of 64 and of 2048 features.

    Args:
        weights: file of torch-fidelity's Inception weights. It is read as plain tensors only, so that a pickle with
            code in it is refused before anything in it runs.
        device: where the network runs.

    Raises:
        UserError: the file is missing, holds anything but tensors, or the tensors do not fit.
    """

    size = FeatureExtractorInceptionV3.INPUT_IMAGE_SIZE

    def __init__(self, weights: str | os.PathLike, device: torch.device):
        advice = (
            "Pass --inception_weights the file weights-inception-2015-12-05-6726825d.pth of torch-fidelity's releases "
            f"({URL_INCEPTION_V3}), which pytorch-fid calls pt_inception-2015-12-05-6726825d.pth. "
            "Without --inception_weights FID is skipped."
        )
        if not os.path.isfile(weights):
            raise UserError(f"Inception weights {os.fspath(weights)!r} are not there. {advice}")
        try:
            state = torch.load(weights, map_location="cpu", weights_only=True)
            # torch-fidelity unpickles what it is given without restraint. So it is given a copy of these tensors,
            # and never the file itself, which could also change between the check and its reading.
            copy = io.BytesIO()
            torch.save(state, copy)
            copy.seek(0)
            extractor = FeatureExtractorInceptionV3("inception", [str(n) for n in FID_FEATURES], copy)
        except Exception as error:  # whatever a wrong or hostile file makes torch raise
            reason = str(error).strip().splitlines()[0][:300].rstrip(".")
            raise UserError(
                f"Inception weights {os.fspath(weights)!r} cannot be used: {type(error).__name__}: {reason}. {advice}"
            ) from error
        self.extractor = extractor.to(device)
        self.device = device

    @torch.inference_mode()
    def __call__(self, generated: Sequence[Path], originals: Sequence[Path], batch_size: int) -> dict[str, float]:
        """{"fid_64": ..., "fid_2048": ...}; the order of the images does not matter.

        Raises:
            UserError: fewer than two images on a side, which have no covariance.
        """
        if min(len(generated), len(originals)) < 2:
            raise UserError(
                f"FID needs at least 2 images on each side, got {len(generated)} generated and {len(originals)} "
                "original ones. Raise the limit, or set inception_weights to null to skip FID."
            )
        # Both sizes from one pass through the network: the metrics are fed its features.
        metrics = {n: FrechetInceptionDistance(feature=_Identity(n)) for n in FID_FEATURES}
        for paths, real in ((originals, True), (generated, False)):
            for batch in _batches(paths, self.size, batch_size, "Inception features"):
                for metric, features in zip(metrics.values(), self.extractor(batch.to(self.device)), strict=True):
                    metric.update(features.double().cpu(), real=real)
        return {f"fid_{n}": metric.compute().item() for n, metric in metrics.items()}


class _Identity(nn.Module):
    """Hands features on, in the place where torchmetrics expects the network that makes them."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


class DinoScore:
    """Mean cosine similarity of the CLS features of each generated image and its own original (DINO ViT-S/16).

    Args:
        model: folder or hub id of a transformers vision model. Images are normalised with ImageNet's
            mean and standard deviation, as DINO was trained, at the size that the model's configuration names (224).
        device: where the network runs.

    Raises:
        UserError: there is no such model.
    """

    def __init__(self, model: str | os.PathLike, device: torch.device):
        try:
            # Files that are no safetensors are read with weights_only=True.
            loaded, info = AutoModel.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
            # The pooler is not used, and DINO's weights have none.
            missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
            if missing:
                raise ValueError(f"it lacks {len(missing)} of the model's weights, such as {missing[0]}")
            self.model = loaded.to(device).eval()
            self.size = self.model.config.image_size
        except Exception as error:  # whatever a wrong folder or a failed download raises
            reason = str(error).strip().splitlines()[0][:300].rstrip(".")
            raise UserError(
                f"DINO model {os.fspath(model)!r} could not be loaded: {reason}. Give dino a folder of "
                "facebook/dino-vits16 with config.json and its weights, or null to skip the DINO score."
            ) from error
        self.device = device

    @torch.inference_mode()
    def features(self, paths: Sequence[Path], batch_size: int) -> Tensor:
        """CLS features [N, D] after the last norm, on the CPU."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        features = []
        for batch in _batches(paths, self.size, batch_size, "DINO features"):
            pixels = ((batch.float() / 255 - mean) / std).to(self.device)
            features.append(self.model(pixel_values=pixels).last_hidden_state[:, 0].float().cpu())
        return torch.cat(features)

    def __call__(self, generated: Sequence[Path], originals: Sequence[Path], batch_size: int) -> float:
        """The score, in [-1, 1]; `originals[i]` is the original of `generated[i]`."""
        ours, theirs = self.features(generated, batch_size), self.features(originals, batch_size)
        return nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=1).mean().item()


def generate_images(
    config: GenerationConfig, prompts: dict[int, str], settings: dict, device: torch.device
) -> list[Path]:
    """Draws `images/{index:06}.png` for each prompt; what is there already stays.

    Args:
        config: `base`, `encoder`, `output`, `seed` and `steps` are read.
        prompts: caption by index.
        settings: everything that decides what an image looks like, kept in `images/settings.json`.
        device: where the pipeline runs.

    Returns:
        The images' paths, in the order of `prompts`.

    Raises:
        UserError: the folder holds images made with other settings, or the models cannot be loaded.
    """
    folder = Path(config.output) / "images"
    _check_same_settings(folder, settings)
    paths = {index: folder / f"{index:06}.png" for index in prompts}
    missing = [index for index, path in paths.items() if not path.exists()]
    if missing:
        pipe = load_sdxl(config.base, config.encoder, device)
        pipe.set_progress_bar_config(disable=True)
        write_json(folder / "settings.json", settings)
        for index in tqdm(missing, desc="generate"):
            image = pipe(
                clean(prompts[index]),  # as captions were cleaned for training
                num_inference_steps=config.steps,
                guidance_scale=GUIDANCE_SCALE,
                # One generator an image, so that it does not matter which images were there before; on the CPU,
                # because every device's own draws other numbers.
                generator=torch.Generator("cpu").manual_seed(config.seed + index),
            ).images[0]
            unfinished = folder / f".{index:06}.png.tmp"
            image.save(unfinished, format="PNG")
            os.replace(unfinished, paths[index])
    return list(paths.values())


def _check_same_settings(folder: Path, settings: dict) -> None:
    """Refuses a folder whose images were made with other settings."""
    file = folder / "settings.json"
    if not file.exists():
        if any(folder.glob("*.png")):
            raise UserError(f"{str(folder)!r} holds images but no settings.json. Give another output, or remove them.")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{str(file)!r} is not JSON ({error}). Give another output, or remove the folder.") from error
    before = before if isinstance(before, dict) else {}
    if before != settings:
        names = sorted(name for name in before.keys() | settings.keys() if before.get(name) != settings.get(name))
        changes = "; ".join(f"{name} was {before.get(name)!r}, now {settings.get(name)!r}" for name in names)
        raise UserError(
            f"The images in {str(folder)!r} were made with other settings: {changes}. Give another output, go back to "
            "those settings, or remove the folder."
        )


def _with_readable_original(records: Sequence[Record], images: ImageFolder) -> tuple[list[int], list[BadRecord]]:
    """The positions of the records whose original can be decoded, and the others by name."""
    good, bad = [], []
    for index, record in enumerate(tqdm(records, desc="check originals")):
        try:
            images.open(record.image)
        except UNREADABLE as error:
            bad.append(unreadable(record, error))
        else:
            good.append(index)
    return good, bad


def _digest_or_id(model: str) -> str:
    """A folder's digest; a hub id as it is, because its files lie wherever the hub's cache put them."""
    return digest(model) if os.path.exists(model) else model


def evaluate_generation(config: GenerationConfig) -> dict:
    """Generates an image for every caption and scores them; writes `generation.json` and prints a table.

    A run that was killed continues with the images that are missing. Scores that were skipped are null, and `notes`
    says why.

    Returns:
        What the file holds: settings, versions, digests, scores, notes, the resizes, the pairs left out, seconds.

    Raises:
        UserError: a setting cannot be used; all are checked before the first image is generated.
    """
    started = time.monotonic()
    check_batch_size(config.batch_size)
    if config.inception_weights is None and config.dino is None:
        raise UserError(
            "Neither inception_weights nor dino is given, which leaves no score. Give --dino facebook/dino-vits16 (or "
            f"a folder with it), or --inception_weights a file of {URL_INCEPTION_V3}, or both."
        )
    if config.steps < 1:
        raise UserError(f"steps={config.steps} is not allowed. Give a whole number from 1.")
    check_base(config.base)
    device = pick_device(config.device)
    records, bad = read_pairs(config.data, config.limit)
    images = ImageFolder(config.images)
    good, unreadable_originals = _with_readable_original(records, images)
    print_left_out(unreadable_originals)
    if len(good) < (1 if config.inception_weights is None else 2):
        raise UserError(
            f"{len(good)} of {len(records)} pairs have a readable original below {config.images!r}; FID needs at least "
            "2, the DINO score 1. Give the folder that the data file's image paths start from, or raise the limit."
        )

    # Loaded before hours of generation, not after.
    inception = None if config.inception_weights is None else InceptionScore(config.inception_weights, device)
    dino = None if config.dino is None else DinoScore(config.dino, device)
    digests = {
        "data": digest(config.data),
        "base": _digest_or_id(config.base),
        "encoder": config.encoder and _digest_or_id(config.encoder),
        "inception_weights": config.inception_weights and digest(config.inception_weights),
        "dino": None if dino is None else weights_digest(dino.model),
    }
    settings = {name: digests[name] for name in ("data", "base", "encoder")}
    settings |= {"seed": config.seed, "steps": config.steps, "guidance_scale": GUIDANCE_SCALE}
    prompts = {index: records[index].caption for index in good}
    generated = generate_images(config, prompts, settings, device)
    originals = [images.path(records[index].image) for index in good]

    scores, notes, resize = {"fid_64": None, "fid_2048": None, "dino_score": None}, [], {}
    if inception is None:
        notes.append("FID was skipped, because inception_weights is null.")
    else:
        if len(generated) < 2048:
            notes.append(
                f"FID of 2048 features on {len(generated)} images is biased upwards; compare it only between runs of "
                "as many images, or use at least 2048."
            )
        scores |= inception(generated, originals, config.batch_size)
        resize["fid"] = RESIZE.format(size=inception.size)
    if dino is None:
        notes.append("The DINO score was skipped, because dino is null.")
    else:
        scores["dino_score"] = dino(generated, originals, config.batch_size)
        resize["dino_score"] = RESIZE.format(size=dino.size)
    report = {
        "settings": asdict(config),
        "versions": versions(),
        "digests": digests,
        "generation": settings,
        "pairs": len(generated),
        "left_out": [asdict(record) for record in bad + unreadable_originals],
        "resize": resize,
        **scores,
        "notes": notes,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(Path(config.output) / "generation.json", report)
    print(table(["images", *scores], [[str(len(generated)), *scores.values()]]))
    for note in notes:
        print(f"Note: {note}")
    return report
