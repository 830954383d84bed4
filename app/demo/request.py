"""A request to the demo: every setting that decides its images, its limits, and its way into a PNG and back."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.encoders.spec import ORIGINAL
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.limits import between
from debias_diffusion.pipelines.rendering.infotext import read_image
from debias_diffusion.pipelines.rendering.options import KARRAS, ClipSkip, ImageOptions, Sampling
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.text.chunks import Emphasis, Reading
from debias_diffusion.text.options import LongPromptOptions
from debias_diffusion.text.prompt import Plan, read
from debias_diffusion.toyworld.grammar import Caption
from debias_diffusion.toyworld.scenes import Scene

from ..prompts import check_prompt, check_text, parse_seed
from .models import DemoModels

MOST_IMAGES, MOST_SCENES = 8, 2**31
UNUSED = ("prompt_2", "encoder_2", "refiner", "loras")  # of an image's settings


@dataclass
class Request(ImageOptions):
    """Everything that decides the images. Raises UserError for a value that its type does not allow.

    Attributes:
        encoders: labels of the encoders, which take turns.
        negative_prompt: "" for none.
        seed: of the first image's noise; image i, from 0, has seed + i.
        images: images by each encoder.
        scheduler: one of `DemoModels.schedulers`.
        emphasis, reading: see `LongPromptOptions`. Encoders whose name says how they read always read so.
        karras, clip_skip: see `Sampling`.
        scene: number of the toy world's scene that has the prompt as its caption. It changes no image; it is for
            saying what an image shows.
    """

    prompt: str
    encoders: list[str]
    negative_prompt: str = ""
    seed: int = 0
    images: between(int, 1, MOST_IMAGES) = 1
    scheduler: str = field(default="Euler", kw_only=True)
    emphasis: Emphasis | None = None
    reading: Reading = "overlap"
    scene: int | None = None
    karras: bool | None = None
    clip_skip: ClipSkip | None = None

    @classmethod
    def default(cls, models: DemoModels) -> "Request":
        """A request with default settings for these models, without a prompt."""
        return cls("", models.labels, scheduler=next(iter(models.schedulers))).with_defaults(models)

    def with_defaults(self, models: DemoModels) -> "Request":
        """With the checkpoint's own numbers in the place of None."""
        sampling = self.renderer(models).sampling
        names = ("steps", "guidance_scale", "height", "width")
        return replace(self, **{name: getattr(sampling, name) for name in names})

    def renderer(self, models: DemoModels) -> Renderer:
        return models.renderer.with_sampling(Sampling.of(vars(self) | {"scheduler": models.schedulers[self.scheduler]}))


def check(request: Request, models: DemoModels, budget: int | None = None) -> Request:
    """The request, with its encoders in the page's order, and its scene only if the prompt is its caption.

    Raises UserError for what these models do not allow, and for more denoising steps than `budget`.
    """
    if request.scheduler not in models.schedulers:
        raise UserError(f"Unknown scheduler {request.scheduler[:80]!r}. Choose from: {', '.join(models.schedulers)}.")
    check_prompt(request.prompt)
    for label, options in check_texts(request, models).items():
        read_texts(models, label, options, request.prompt, request.negative_prompt)
    parse_seed(parse_seed(request.seed) + request.images - 1)  # of the last image
    request = request.with_defaults(models)
    height, width = models.size
    if request.height * request.width > (most := 2 * height * width):
        raise UserError(
            f"{request.height} x {request.width} pixels are too many: at most {most:,} are allowed, twice the model's "
            f"native {height} x {width}. Make one side smaller."
        )
    scene = request.scene if models.is_toy and scene_of(request.scene, request.prompt) else None
    encoders = [label for label in models.labels if label in request.encoders]
    steps = request.steps * request.images * len(encoders)
    if budget is not None and steps > budget:
        raise UserError(
            f"This request takes {steps:,} steps ({request.steps} steps x {request.images} images x {len(encoders)} "
            f"encoders); one request may take {budget:,} here. Choose fewer steps, images or encoders."
        )
    return replace(request, encoders=encoders, scene=scene)


def demo_scene(number: int) -> tuple[Scene, Caption]:
    """A scene and its caption, by the scene's number from 0, of a split that no model was trained on."""
    return toy_scene(f"test-demo/{number}")


def scene_of(number: int | None, prompt: str) -> tuple[Scene, Caption] | None:
    """The scene of a number, with its caption, if that is the prompt."""
    if number is None or not 0 <= number < MOST_SCENES:
        return None
    scene, caption = demo_scene(number)
    return (scene, caption) if caption.text == prompt else None


def check_texts(request: Request, models: DemoModels) -> dict[str, LongPromptOptions]:
    """How each encoder of a request reads its texts, which may be empty. Raises UserError for a text that is too long
    or no text, an option that cannot be used, and encoders that are none."""
    if not request.encoders or not {*request.encoders} <= {*models.labels}:
        raise UserError(
            f"encoders is {str(request.encoders)[:80]}. Choose at least one of: {', '.join(models.labels)}."
        )
    check_text("prompt", request.prompt)
    check_text("negative prompt", request.negative_prompt)
    renderer = request.renderer(models)
    return {label: renderer.options(models.spec(label, request.reading)) for label in request.encoders}


def read_texts(
    models: DemoModels, label: str, options: LongPromptOptions, prompt: str, negative_prompt: str | None = None
) -> Plan:
    """How an encoder reads a prompt; another thread may generate. Raises UserError for weights that are no numbers."""
    encoders = [(models.counter, models.encoders[label].text_encoder.config.max_position_embeddings)]
    with explain_failure("The prompt cannot be read"):
        return read([prompt], [negative_prompt] if negative_prompt else None, encoders, options)


def from_image(path: str | Path, models: DemoModels) -> tuple[Request, list[str]]:
    """The checked request of an image that `read_image` knows, and in words what had to change: missing encoders are
    left out; a missing scheduler and the size of a toy are replaced by the demo's own.

    Raises UserError if the file is no image with settings, or these cannot be used.
    """
    _, settings, notes = read_image(path)
    with explain_failure("The image's settings cannot be used"):  # there is no end to what a hostile file says
        values = {field.name: settings[field.name] for field in fields(Request) if field.name in settings}
        values["seed"] = parse_seed(parse_seed(settings.get("seed", 0)) - int(settings.get("image", 1)) + 1)
        values["reading"] = settings.get("chosen_reading", settings.get("reading", "overlap"))
        values["negative_prompt"] = settings.get("negative_prompt") or ""
        base = settings.get("base")
        if base is not None and models.base not in (base, Path(base).name):
            notes.append(f"It was generated with the SDXL checkpoint {base[:80]!r}; this demo has {models.base}.")
        # `generate` writes an encoder as it was passed, which may be a path that ends in the label.
        known = {
            name: next((end for end in (name, Path(name).name) if end in models.labels), None)
            for name in settings.get("encoders", [settings["encoder"] or ORIGINAL] if "encoder" in settings else [])
        }
        if missing := ", ".join(name for name, label in known.items() if label is None):
            notes.append(f"The encoder {missing[:80]!r} is not here and is left out.")
        values["encoders"] = list(dict.fromkeys(filter(None, known.values()))) or models.labels
        native = next(iter(models.schedulers))
        if values.setdefault("scheduler", native) not in models.schedulers:
            notes.append(f"There is no scheduler {values['scheduler'][:80]!r} here; {native} is used.")
            values["scheduler"] = native
        of_checkpoint = type(models.encoders[models.labels[0]].scheduler).__name__
        if values.get("karras") and (models.schedulers[values["scheduler"]] or of_checkpoint) not in KARRAS:
            notes.append(f"{values['scheduler']} has no noise levels of Karras.")
            values["karras"] = None
        size = values.get("height"), values.get("width")
        if models.renderer.checkpoint.defaults.fixed_size and size not in (models.size, (None, None)):
            notes.append("Images have another size here.")
            values["height"], values["width"] = models.size
        here = [None, *(models.spec(label, "overlap").fitted_second for label in values["encoders"])]
        notes += [f"The {name} is not used here." for name in UNUSED if settings.get(name) not in here]
        return check(replace(Request.default(models), **values), models), notes
