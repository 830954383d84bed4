"""Images drawn from captions against the originals: FID (Fréchet inception distance) and DINO score (Table S7)."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import Tensor
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
from tqdm import tqdm

from debias_diffusion.data import BadRecord, ImageSource, Record
from debias_diffusion.data.dataset import UNREADABLE, unreadable
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError
from debias_diffusion.files import changed_settings, write_json
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.loading import check_base, load_sdxl
from debias_diffusion.tokens import clean
from debias_diffusion.toyworld.shipped import shipped

from .feature_networks import RESIZE, ClsFeatures, InceptionFeatures, Picture
from .inputs import check_batch_size, print_left_out, read_pairs
from .picture_scores import dino_score, fid_inception, fid_own
from .report import digest, table, versions, weights_digest


@dataclass
class GenerationConfig:
    """Settings of an evaluation of generated images.

    Attributes:
        data: JSON file in ShareGPT4V's layout, JSONL file, or folder of WebDataset shards. Its captions are the
            prompts, its images the originals.
        base: SDXL folder in diffusers' layout, or a hub id.
        output: Folder for the result, `generation.json`, and the generated images, `images/000000.png` and so on.
            Images that are finished there are kept, if they were made with the same settings.
        images: Folder that the data file's image paths start from; not for shards, which hold theirs.
        encoder: Text encoder that takes the place of SDXL's first one: a folder written by `export`, or of training.
            The default is SDXL's own.
        limit: Use only the first so many pairs (1000 are ShareGPT4V's validation split). null uses all.
        seed: Image i starts from noise seeded with this number + i, the same on every device.
        steps: Denoising steps.
        inception_weights: File of torch-fidelity's Inception weights, for FID. Without it FID is skipped.
        dino: Folder or hub id of DINO ViT-S/16 in transformers' layout (facebook/dino-vits16), for the DINO score.
            Without it the DINO score is skipped.
        own_features: Network whose CLS features FID is computed on, in place of Inception: a folder of a transformers
            vision model. Its scores compare with nothing published.
        truncate: Cut prompts at 77 tokens, as stock SDXL does.
        guidance_scale: How strongly prompts are followed; 1 is no guidance. The default is that of `generate`.
        images_at_once: Pictures drawn at once, of prompts of like length; more need more memory.
        batch_size: Images scored at once.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    data: str
    base: str
    output: str
    images: str | None = None
    encoder: str | None = None
    limit: int | None = 1000
    seed: int = 0
    steps: int = 30
    inception_weights: str | None = None
    dino: str | None = None
    own_features: str | None = None
    truncate: bool = False
    guidance_scale: float = 7.0
    images_at_once: int = 1
    batch_size: int = 32
    device: str | None = None


def drawing_settings(config: GenerationConfig, **digests: str | None) -> dict:
    """Everything that decides what an image looks like; `digests` are those of prompts and models."""
    names = ("seed", "steps", "guidance_scale", "truncate")
    return digests | {name: getattr(config, name) for name in names}


def generate_images(
    config: GenerationConfig, prompts: dict[int, str], settings: dict, device: torch.device
) -> list[Path]:
    """Draws `images/{index:06}.png` for each prompt; what is there already stays.

    Args:
        config: `base`, `encoder`, `output`, `images_at_once` and what `drawing_settings` names are read.
        prompts: caption by index.
        settings: `drawing_settings`, kept in `images/settings.json`.
        device: where the pipeline runs.

    Returns:
        The images' paths, in the order of `prompts`.

    Raises:
        UserError: the folder holds images made with other settings, or the models cannot be loaded.
    """
    folder = Path(config.output) / "images"
    _check_same_settings(folder, settings)
    paths = {index: folder / f"{index:06}.png" for index in prompts}
    # As captions were cleaned for training.
    missing = {index: clean(prompts[index]) for index, path in paths.items() if not path.exists()}
    if missing:
        pipe = load_sdxl(config.base, config.encoder, device)
        batches = _batches_to_draw(pipe, missing, config)
        if config.truncate:
            pipe = _truncating(pipe)
        pipe.set_progress_bar_config(disable=True)
        write_json(folder / "settings.json", settings)
        with _errors_only(), tqdm(desc="generate", total=len(missing)) as bar:
            for batch in batches:
                for index, image in zip(batch, _draw(pipe, missing, batch, config), strict=True):
                    unfinished = folder / f".{index:06}.png.tmp"
                    image.save(unfinished, format="PNG")
                    os.replace(unfinished, paths[index])
                bar.update(len(batch))
    return list(paths.values())


@contextmanager
def _errors_only() -> Iterator[None]:
    """Keeps diffusers from warning of every prompt that it was asked to cut."""
    before = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(before)


def _batches_to_draw(
    pipe: StableDiffusionXLLongPromptPipeline, prompts: dict[int, str], config: GenerationConfig
) -> list[list[int]]:
    """The prompts' indices in batches of one length, so that none is padded further than it would be alone."""
    groups: dict[int, list[int]] = {}
    guided = config.guidance_scale > 1
    for index, prompt in prompts.items():
        positions = 0 if config.truncate else pipe.prompt_layout(prompt, do_classifier_free_guidance=guided).positions
        groups.setdefault(positions, []).append(index)
    size = config.images_at_once
    return sorted(group[i : i + size] for group in groups.values() for i in range(0, len(group), size))


def _truncating(pipe: StableDiffusionXLLongPromptPipeline) -> StableDiffusionXLPipeline:
    """The same models in diffusers' own pipeline, which cuts prompts at what the tokenizers say."""
    # Both encoders must read equally much, and the second one is stock.
    pipe.tokenizer.model_max_length = pipe.tokenizer_2.model_max_length
    zeros = pipe.config.force_zeros_for_empty_prompt
    return StableDiffusionXLPipeline(**pipe.components, force_zeros_for_empty_prompt=zeros, add_watermarker=False)


def _draw(
    pipe: StableDiffusionXLPipeline, prompts: dict[int, str], batch: Sequence[int], config: GenerationConfig
) -> list[Image.Image]:
    return pipe(
        [prompts[index] for index in batch],
        num_inference_steps=config.steps,
        guidance_scale=config.guidance_scale,
        # One generator an image, so that it does not matter which images were there before or are drawn with it; on the
        # CPU, because every device's own draws other numbers.
        generator=[torch.Generator("cpu").manual_seed(config.seed + index) for index in batch],
    ).images


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
        raise UserError(
            f"The images in {str(folder)!r} were made with other settings: {changed_settings(before, settings)}. Give "
            "another output, go back to those settings, or remove the folder."
        )


def _with_readable_original(records: Sequence[Record], images: ImageSource) -> tuple[list[int], list[BadRecord]]:
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
    model = shipped(model)
    return digest(model) if os.path.exists(model) else model


class _Scores:
    """The networks that a configuration names, loaded, and what they say of images.

    Attributes:
        digests: of the networks, None where there is none.
    """

    def __init__(self, config: GenerationConfig, device: torch.device):
        self.batch_size = config.batch_size
        self.inception = config.inception_weights and InceptionFeatures(config.inception_weights, device)
        self.dino = config.dino and ClsFeatures(config.dino, device)
        self.own = config.own_features and ClsFeatures(config.own_features, device, "own_features")
        self.digests = {
            "inception_weights": config.inception_weights and digest(config.inception_weights),
            "dino": self.dino and weights_digest(self.dino.model),
        }
        if self.own:
            self.digests["own_features"] = weights_digest(self.own.model)

    def __call__(
        self, generated: Sequence[Picture], originals: Sequence[Picture]
    ) -> tuple[dict, list[str], dict[str, str]]:
        """The scores, null where skipped, notes for whoever reads them, and how images were resized for each."""
        scores, notes, resize = {"fid_64": None, "fid_2048": None, "dino_score": None}, [], {}
        if self.inception:
            if len(generated) < 2048:
                notes.append(
                    f"FID of 2048 features on {len(generated)} images is biased upwards; compare it only between runs "
                    "of as many images, or use at least 2048."
                )
            scores |= fid_inception(*self._features(self.inception, generated, originals))
            resize["fid"] = RESIZE.format(size=self.inception.size)
        else:
            notes.append("FID was skipped, because inception_weights is null.")
        if self.dino:
            scores["dino_score"] = dino_score(*self._features(self.dino, generated, originals))
            resize["dino_score"] = RESIZE.format(size=self.dino.size)
        else:
            notes.append("The DINO score was skipped, because dino is null.")
        if self.own:
            notes.append("fid_own is of a network of your own; compare it with nothing published.")
            scores["fid_own"] = fid_own(*self._features(self.own, generated, originals))
            resize["fid_own"] = RESIZE.format(size=self.own.size)
        return scores, notes, resize

    def _features(
        self, network: ClsFeatures | InceptionFeatures, *sides: Sequence[Picture]
    ) -> list[Tensor] | list[dict[int, Tensor]]:
        return [network(pictures, self.batch_size) for pictures in sides]


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
    _check(config)
    device = pick_device(config.device)
    pairs = read_pairs(config.data, config.images, config.limit)
    records, images = pairs.records, pairs.images
    good, unreadable_originals = _with_readable_original(records, images)
    print_left_out(unreadable_originals)
    needs_fid = config.inception_weights is not None or config.own_features is not None
    if len(good) < (2 if needs_fid else 1):
        raise UserError(
            f"{len(good)} of {len(records)} pairs have a readable original in {str(images.root)!r}; FID needs at least "
            "2, the DINO score 1. Give the folder that the data file's image paths start from, or raise the limit."
        )

    # Loaded before hours of generation, not after.
    score = _Scores(config, device)
    models = {"data": pairs.digest, "base": _digest_or_id(config.base)}
    models["encoder"] = config.encoder and _digest_or_id(config.encoder)
    settings = drawing_settings(config, **models)
    prompts = {index: records[index].caption for index in good}
    generated = generate_images(config, prompts, settings, device)
    scores, notes, resize = score(generated, [partial(images.open, records[index].image) for index in good])
    report = {
        "settings": asdict(config),
        "versions": versions(),
        "digests": models | score.digests,
        "generation": settings,
        "pairs": len(generated),
        "left_out": [asdict(record) for record in pairs.bad + unreadable_originals],
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


def _check(config: GenerationConfig) -> None:
    """Raises UserError for what can be known before anything is read."""
    check_batch_size(config.batch_size)
    if config.inception_weights is None and config.dino is None and config.own_features is None:
        raise UserError(
            "None of inception_weights, dino and own_features is given, which leaves no score. Give --dino "
            f"facebook/dino-vits16 (or a folder with it), or --inception_weights a file of {URL_INCEPTION_V3}, or both."
        )
    for name in ("steps", "images_at_once"):
        if getattr(config, name) < 1:
            raise UserError(f"{name}={getattr(config, name)} is not allowed. Give a whole number from 1.")
    check_base(config.base)
