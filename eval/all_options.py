"""Options of `evaluate all` and `evaluate report`. Imports no large library."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from debias_diffusion.encoders.spec import ORIGINAL, Kind
from debias_diffusion.errors import UserError
from debias_diffusion.limits import Checked, PositiveInt

from .options import TOY_BASE, TOY_CLIP, TOY_FEATURES, TOYS, Data, Scoring

GENERATED, GENERATED_TOY = 1000, 200  # images of each encoder


@dataclass
class AllConfig(Scoring, Data):
    """Every evaluation that the options allow, and one page of all; by default in the toy world.

    Attributes:
        encoders: CLIP models to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip. For images, their text encoders
            take the place of SDXL's first, and read prompts as `evaluate generation` says of cut:NAME and
            separate:NAME; original, the SDXL checkpoint's own, is for images only.
        images_per_encoder: Generate images of only the first so many pairs. auto is 1000, as in Table S7 of the
            DeBias-CLIP paper, and 200 with toy/sdxl.
        base: SDXL folder in diffusers' layout, or a hub id, to generate with. Without it no images are generated and no
            drift is measured; auto is toy/sdxl for scenes of the toy world, whose images toy/features scores, and none
            for other data.
        prompts: Prompts of `evaluate following`, whose images are generated with the base.
        judge: Judge of these images, as in `evaluate following`.
        server: Address of the server that it runs on.
        batch_size: Images, texts or questions taken at once; null is each evaluation's own number.
    """

    encoders: list[str] = field(default_factory=lambda: list(TOYS))
    output: str = "runs/evaluation"
    data: str = "toy/test"
    images_per_encoder: PositiveInt | Literal["auto"] = "auto"
    base: str | None = "auto"
    prompts: str | None = None
    judge: str | None = None
    server: str | None = None
    batch_size: PositiveInt | None = field(default=None, kw_only=True)

    WITH_READINGS = True

    def __post_init__(self):
        super().__post_init__()
        if (self.prompts is None) != (self.judge is None):
            raise UserError(f"prompts is {self.prompts!r} and judge {self.judge!r}. Give both, or neither.")
        if self.prompts is not None and self.sdxl is None:
            raise UserError("prompts need a base, the SDXL checkpoint that generates their images.")
        if not self.for_texts:
            raise UserError(
                f"encoders={self.encoders} has none for texts: {ORIGINAL!r} is for images only. Name another one, or "
                "run `evaluate generation` alone."
            )

    @property
    def for_texts(self) -> list[str]:
        """The encoders that read texts without SDXL, each once, however it reads prompts."""
        return list(dict.fromkeys(spec.name for spec in self.specs if spec.kind is not Kind.ORIGINAL))

    @property
    def for_images(self) -> list[str]:
        """The encoders for SDXL, each once; toy/clip in toy/sdxl is the checkpoint's own."""
        renames = {TOY_CLIP: ORIGINAL} if self.sdxl == TOY_BASE else {}
        pairs = zip(self.encoders, self.specs, strict=True)
        names = (name.removesuffix(spec.name) + renames.get(spec.name, spec.name) for name, spec in pairs)
        return list(dict.fromkeys(names))

    @property
    def is_toy(self) -> bool:
        """Whether the data are scenes of the toy world."""
        from debias_diffusion.data.sources import is_toy_scenes

        return is_toy_scenes(self.data)

    @property
    def sdxl(self) -> str | None:
        """The SDXL checkpoint to generate with."""
        return (TOY_BASE if self.is_toy else None) if self.base == "auto" else self.base

    @property
    def generated(self) -> int:
        """How many images of each encoder are generated, at most."""
        count = self.images_per_encoder
        if count == "auto":
            count = GENERATED_TOY if self.sdxl == TOY_BASE else GENERATED
        return count if self.limit is None else min(count, self.limit)

    def settings(self, options: type, **changes) -> Any:
        """The settings of one evaluation: what is given here by the same name, and `changes`."""
        given = vars(self)
        shared = {item.name: given[item.name] for item in fields(options) if item.name in given}
        if self.batch_size is None:
            del shared["batch_size"]
        return options(**(shared | {"encoders": self.for_texts} | changes))

    def drift(self, options: type) -> Any:
        """The settings of `evaluate drift`; None without an SDXL checkpoint, or another encoder than its own."""
        encoders = [name for name in self.for_texts if (self.sdxl, name) != (TOY_BASE, TOY_CLIP)]
        return self.settings(options, base=self.sdxl, encoders=encoders) if self.sdxl and encoders else None

    def generation(self, options: type) -> Any:
        """The settings of `evaluate generation`; None without an SDXL checkpoint."""
        networks = ("dino", "own_features") if self.is_toy else ()
        toy = {name: TOY_FEATURES for name in networks if getattr(self, name) is None}
        return self._images(options, **toy) if self.sdxl else None

    def following(self, options: type) -> Any:
        """The settings of `evaluate following`; None without prompts."""
        return self._images(options) if self.prompts is not None else None

    def _images(self, options: type, **changes) -> Any:
        """The settings of an evaluation of generated images."""
        return self.settings(options, base=self.sdxl, encoders=self.for_images, limit=self.generated, **changes)


@dataclass
class ReportConfig(Checked):
    """One page of any number of results.

    Attributes:
        folder: Folder with results of `evaluate`, at any depth.
        output: Folder for the pages, `report.md` and `report.html`. The default is the folder itself.
    """

    folder: str
    output: str | None = None
