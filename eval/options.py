"""Settings of all evaluations together, and of the page of their results."""

from dataclasses import dataclass, field
from typing import Literal

from debias_diffusion.models.shipped import TWO_TOWERS

from .settings import OVERLAP, check_settings

TOYS = (TWO_TOWERS[0], OVERLAP + TWO_TOWERS[0], *TWO_TOWERS[1:])


@dataclass
class AllConfig:
    """Settings of all evaluations. Without any, the toy world's encoders are evaluated on its scenes.

    Attributes:
        encoders: CLIP models to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip. For images, their text encoders
            take the place of SDXL's first. overlap:NAME and chunks:NAME are for images only: there NAME, an encoder
            of 77 positions, reads long prompts in overlapping chunks, or in others, instead of cutting them.
        output: Folder for the results, and for report.html. What is finished there is not done again.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        limit: Use only the first so many pairs. null uses all.
        held_out: Use only pairs of the data that a training run among the encoders held out.
        drawn: Generate images of only the first so many of these. auto is 1000, as many as Table S7 of the DeBias-CLIP
            paper has, and 200 with toy/sdxl.
        base: SDXL folder in diffusers' layout, or a hub id, to draw with. Without it no pictures are drawn; auto is
            toy/sdxl for scenes of the toy world, and none for other data.
        inception_weights: File of torch-fidelity's Inception weights, for FID and its kin.
        dino: Folder or hub id of DINO ViT-S/16 in transformers' layout (facebook/dino-vits16), for the DINO score.
        own_features: Network in place of Inception: a folder of a transformers vision model. Its scores compare with
            nothing published. Scenes of the toy world have toy/features in place of both.
        clip_score: CLIP model for CLIPScore, named as in encoders.
        classification: A classification benchmark: imagenet-1k, imagenet-v2, imagenet-a, imagenet-o, cifar-10 or
            cifar-100.
        classification_data: Its folder, as its authors publish it.
        batch_size: Images, or captions, encoded at once.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str] = field(default_factory=lambda: list(TOYS))
    output: str = "runs/evaluation"
    data: str = "toy/test"
    images: str | None = None
    limit: int | None = 1000
    held_out: bool = False
    drawn: int | Literal["auto"] = "auto"
    base: str | None = "auto"
    inception_weights: str | None = None
    dino: str | None = None
    own_features: str | None = None
    clip_score: str | None = None
    classification: str | None = None
    classification_data: str | None = None
    batch_size: int = 64
    device: str | None = None

    def __post_init__(self):
        check_settings(self, of_images=True)


@dataclass
class ReportConfig:
    """Settings of a report.

    Attributes:
        folder: Folder with results of `evaluate`, at any depth.
        output: Folder for the pages, `report.md` and `report.html`. The default is the folder itself.
    """

    folder: str
    output: str | None = None
