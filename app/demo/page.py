"""The page and its endpoints: components, and what their events do."""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from html import escape
from itertools import islice
from math import sqrt
from pathlib import Path
from typing import Any, Literal, get_args

import gradio as gr
from PIL import Image

from debias_diffusion.encoders.spec import READINGS
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.prompt_sets import ask_sentences
from debias_diffusion.files import open_regular
from debias_diffusion.pipelines.rendering.png import read_settings
from debias_diffusion.text.chunks import MOST_SHARPENING, Emphasis, Reading
from debias_diffusion.toyworld.checker import describe, read_image
from debias_diffusion.toyworld.grammar import Caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene

from ..prompts import parse_seed, sheet_prompts
from .models import DemoModels
from .reading import attention, count_tokens, movement
from .rendering import RenderedImage, render_request
from .request import MOST_IMAGES, MOST_SCENES, Request, demo_scene, from_image, scene_of

# Numbers of the toy world's scenes; None for a random one. The encoders differ on the third as on average, see
# benchmarks/demo_prompt.py.
SCENES = {"Two rings": 3, "Six on black": 5, "Circles and a star": 14, "Random scene": None}
TITLE = "See what your encoder reads"
TYPES = [".png", ".jpg", ".jpeg", ".webp"]  # whose settings are read
KEPT = (300, 3600)  # seconds: every 300, files older than an hour are deleted
# Who reads a token. The colours differ in lightness too, and the sentences below the tokens say it in words.
READ_BY = {"all": "read by every encoder", "some": "read by some encoders", "none": "read by no encoder"}
COLOURS = dict(zip(READ_BY.values(), ("#5eead4", "#fcd34d", "#fb7185"), strict=True))
CUT = "✂"  # between tokens
EXPLANATION = """### What does each encoder read?
How much the end token, where CLIP takes a prompt's embedding, attends to each word; and how far the embedding moves
when a sentence is removed. A sentence that moves nothing was not read."""
STYLE = """
.gradio-container { max-width: 1320px !important; margin: 0 auto !important; }
#movement, #judged { contain: inline-size; } /* a wide table scrolls, instead of the page */
#movement th *, #judged th * { word-break: normal; overflow-wrap: normal; font: 600 12px system-ui, sans-serif; }
@media (max-width: 800px) { #status { min-height: 90px; } } /* two lines and a bar */
/* Captions below the images, not on them. */
#images .grid-wrap { max-height: none; }
#images .grid-container { grid-template-columns: repeat(auto-fill, minmax(145px, 1fr)); padding: 0; }
#images .thumbnail-item { display: flex; flex-direction: column; aspect-ratio: auto; height: 100%; }
#images .thumbnail-item img { aspect-ratio: 1; height: auto; }
#images .caption-label { position: static; width: 100%; max-width: none; white-space: normal; text-align: left; }
"""
# On a narrow page progress and images are below all settings: they come to the visitor.
TO_IMAGES = "() => innerWidth < 800 && document.querySelector('#status').scrollIntoView({behavior: 'smooth'})"
TURN = {"concurrency_id": "device", "concurrency_limit": 1}  # one request at a time uses the device
AS_SENT = {"preprocess": False}  # `Request` checks types and choices, and says what is allowed
BESIDE = {"queue": False, "show_progress": "hidden"}  # answered while something is generated
# of a request, in the order of the components
SETTINGS = (
    *("prompt", "encoders", "negative_prompt", "seed", "steps", "guidance_scale", "height", "width", "images"),
    *("scheduler", "emphasis", "reading", "sharpen", "karras", "clip_skip"),
)
PRIVATE = {"api_visibility": "private"} | BESIDE


def theme() -> gr.themes.Base:
    """System fonts, because others would be fetched from elsewhere; a teal on which white text can be read."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    return gr.themes.Default(primary_hue="teal", neutral_hue="slate", **fonts).set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_text_color="white",
    )


def build(models: DemoModels, budget: int, most_waiting: int, notice: str = "", judge: Any = None) -> gr.Blocks:
    """The page and its endpoints for these models; `notice` stands at its top, `judge` is as `load_judge` gives it."""
    endpoints, defaults = _Endpoints(models, budget, judge), Request.default(models)
    with _Page(title=TITLE, analytics_enabled=False, delete_cache=KEPT) as page:
        scene = gr.State(None)  # number of the toy world's scene that was chosen last, or None
        analysed = gr.State(None)  # what the analysis on the page is of
        gr.Markdown(
            f"# {TITLE}\nOne prompt, one seed, up to five text encoders in {escape(models.base)}: how much of a long "
            f"prompt each encoder reads, and the image generated from it.{f' **{notice}**' if notice else ''}"
        )
        cost = gr.Markdown(endpoints.cost(), visible=not models.is_toy)
        with gr.Row():
            with gr.Column(scale=5, min_width=320):
                hint = "A long prompt of several sentences"
                prompt = gr.Textbox(label="Prompt", lines=6, max_lines=16, placeholder=hint)
                with gr.Row():
                    named = SCENES if models.is_toy else dict(islice(sheet_prompts().items(), 2))
                    chosen = [(gr.Button(name, size="sm", min_width=90), example) for name, example in named.items()]
                encoders = gr.CheckboxGroup(
                    endpoints.titled("overlap"), value=models.labels, label="Encoders to compare"
                )
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", scale=3, min_width=120)
                    stop = gr.Button("Stop", scale=1, min_width=80)
                tokens = gr.HighlightedText(label="Tokens", color_map=COLOURS, show_legend=True)
                readings = gr.Markdown()
                with gr.Accordion("Advanced settings", open=False):
                    negative = gr.Textbox("", label="Negative prompt", lines=2)
                    seed = gr.Textbox("0", label="Seed")  # as text: numbers in a browser end at 2^53
                    new_seed = gr.Button("Random seed", size="sm")
                    scale = defaults.guidance_scale
                    steps = gr.Slider(1, 100, defaults.steps, step=1, label="Steps")
                    guidance = gr.Slider(0, 30, scale, step=0.5, label="Guidance scale")
                    with gr.Row(visible=not models.renderer.checkpoint.defaults.fixed_size):
                        height = gr.Number(defaults.height, label="Height in pixels", precision=0)
                        width = gr.Number(defaults.width, label="Width in pixels", precision=0)
                    count = gr.Slider(1, MOST_IMAGES, 1, step=1, label="Images per encoder")
                    scheduler = gr.Dropdown([*models.schedulers], value=defaults.scheduler, label="Scheduler")
                    karras = gr.Checkbox(False, label="Noise levels of Karras")
                    hint = "The layer of the text encoders that is read, counted from the last; 0 is the usual one."
                    clip_skip = gr.Slider(0, 24, 0, step=1, label="Clip skip", info=hint)
                    names = [name for name in get_args(Emphasis) if name != "a1111"]
                    choices = [("as the reading does", ""), *names]
                    emphasis = gr.Dropdown(choices, value="", label="Weights: (word:1.3), [word], BREAK")
                    hint = "An encoder whose name says how it reads always reads so."
                    choices = [(title.capitalize(), name) for name, title in READINGS.items()]
                    reading = gr.Radio(choices, value="overlap", label="Reading of long prompts", info=hint)
                    hint = "More than 1 brings out details of prompts beyond 77 tokens; try 2."
                    sharpen = gr.Slider(0.1, MOST_SHARPENING, 1, step=0.1, label="Sharpen", info=hint)
                file = gr.UploadButton("Restore settings from an image", file_types=TYPES, size="sm")
            with gr.Column(scale=6, min_width=320):
                # No Markdown, in which a hostile PNG could say an image's address.
                status = gr.HTML("", min_height=60, elem_id="status")
                looks = {"columns": 3, "height": "auto", "show_label": False, "buttons": ["download", "fullscreen"]}
                looks |= {"format": "png", "type": "filepath", "elem_id": "images", "interactive": False}
                images = gr.Gallery(label="Images", **looks)
                judged = gr.Dataframe(visible=False, interactive=False, wrap=True, elem_id="judged")
                gr.Markdown(EXPLANATION)
                analyse = gr.Button("Analyse this prompt")
                analysis = [gr.HighlightedText(visible=False) for _ in models.labels]
                analysis.append(gr.Dataframe(visible=False, interactive=False, wrap=True, elem_id="movement"))

        text = [prompt, encoders, emphasis, reading]
        last = [sharpen, karras, clip_skip]
        settings = [negative, seed, steps, guidance, height, width, count, scheduler, emphasis, reading, *last]
        request, on_status = [prompt, encoders, *settings], {"show_progress_on": status, **AS_SENT, **TURN}
        changes = [component.change for component in text]
        counted = {"api_name": "tokens", "trigger_mode": "always_last", **AS_SENT, **BESIDE}
        gr.on(changes, endpoints.count, text, [tokens, readings], **counted)
        outputs = [*analysis, analysed]
        analysing = analyse.click(endpoints.analyse, text, outputs, api_name="attention", **on_status)
        for event in (*changes, analysing.then):
            event(endpoints.hide_stale, [analysed, *text], analysis, **PRIVATE)
        reading.change(lambda chosen: gr.CheckboxGroup(endpoints.titled(chosen)), reading, encoders, **PRIVATE)
        starts = [generate.click, prompt.submit]
        gr.on(starts, js=TO_IMAGES, api_visibility="private")
        rendering = gr.on(starts, endpoints.render, [scene, *request], images, api_name="generate", **on_status)
        rendering.success(lambda: ("Done.", endpoints.cost()), None, [status, cost], **PRIVATE)
        if judge:
            images.change(endpoints.judged, images, judged, api_visibility="private", show_progress="hidden")
        stopped = stop.click(None, cancels=[rendering], api_visibility="private")
        stopped.then(lambda: "Stopped.", None, status, **PRIVATE)
        for button, example in chosen:
            button.click(lambda example=example: choose(example), None, [prompt, scene, images], **PRIVATE)
        new_seed.click(lambda: str(random.randrange(2**32)), None, seed, **PRIVATE)
        file.upload(endpoints.restore, file, [status, scene, images, *request], api_name="settings", **BESIDE)
    return page.queue(max_size=most_waiting, default_concurrency_limit=1, api_open=False)


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Passes a UserError on to the visitor; escaped, because gradio shows it as HTML."""
    try:
        yield
    except UserError as error:
        raise gr.Error(escape(str(error), quote=False), duration=None, print_exception=False) from None


class _Page(gr.Blocks):
    async def preprocess_data(self, *arguments, **options):
        """Refuses in a sentence what gradio refuses by itself."""
        with _shown_errors():
            try:
                return await super().preprocess_data(*arguments, **options)
            except Exception as error:
                raise UserError(
                    'An argument is missing, of a wrong type, or a file that was not uploaded. "Use via API" at the '
                    "foot of the page says what each is."
                ) from error


class _Endpoints:
    """What the page asks for. Parameters have the names that programs use, docstrings are those of "Use via API"."""

    def __init__(self, models: DemoModels, budget: int, judge: Any = None):
        self.models, self.budget = models, budget
        self.judge = judge and lru_cache(100)(partial(ask_sentences, judge))  # files of one path are alike
        self.pace = ""  # of the last image, in words

    def titled(self, reading: Reading) -> list[tuple[str, str]]:
        """The encoders' titles and labels, as they read with this reading."""
        return [(self.models.title(label, reading), label) for label in self.models.labels]

    def cost(self) -> str:
        """What the models and an image take."""
        renderer = self.models.renderer
        kind = f"{str(renderer.dtype).removeprefix('torch.')}, {renderer.device}"
        return f"The models take {self.models.weights / 1e9:.2f} GB of memory ({kind}). {self.pace}"

    def render(
        self, scene, prompt, encoders, negative_prompt, seed, steps, guidance_scale, height, width, images, scheduler,
        emphasis, reading, sharpen, karras, clip_skip, progress=gr.Progress(),  # noqa: B008
    ) -> Iterator[list[tuple]]:  # fmt: skip
        """Generates images of a prompt with each encoder: PNG files with their settings inside, and captions."""
        with _shown_errors(), tempfile.TemporaryDirectory() as folder:
            request = Request(
                prompt, encoders, negative_prompt, parse_seed(seed), images, emphasis or None, reading, scene,
                scheduler=scheduler, steps=steps, guidance_scale=guidance_scale, height=height, width=width,
                sharpen=sharpen,
                karras=karras or None, clip_skip=clip_skip or None,
            )  # fmt: skip
            toy_scene = scene_of(scene, prompt)
            shown, started = _reference(toy_scene), time.monotonic()
            with closing(render_request(self.models, request, self.budget)) as items:
                for item in items:
                    if isinstance(item, RenderedImage):
                        caption = f"{self.models.title(item.label, reading)}, seed {item.seed}: {item.read}"
                        shown.append((str(item.save(folder)), caption + _marks(item.image, toy_scene)))
                        seconds, started = time.monotonic() - started, time.monotonic()
                        steps = request.steps or self.models.renderer.sampling.steps
                        self.pace = f"The last image took {seconds:.1f} s, {seconds / steps:.2f} s a step."
                        yield shown
                    else:
                        progress(*item)
                        yield gr.skip()  # here a stopped request ends

    def count(self, prompt: str, encoders: list[str], emphasis: Emphasis | Literal[""], reading: Reading) -> tuple:
        """Counts a prompt's tokens with the encoders' tokenizer: each with who reads it, and how each encoder reads."""
        try:  # without any encoder, as all read it
            labels = self.models.labels if encoders == [] else encoders
            request = Request(prompt, labels, emphasis=emphasis or None, reading=reading)
            counted, sentences, readings = count_tokens(self.models, request)
        except UserError as error:
            return gr.HighlightedText([(str(error), None)], label="Tokens"), ""
        cuts = {chunk.kept.start for each in readings.values() for chunk in each.chunks} - {0}
        tokens = []
        for place, (token, read_by) in enumerate(counted):
            tokens += [(CUT, None)] * (place in cuts) + [(token, READ_BY[read_by])]
        title = f"Tokens: {len(counted):,}, sentences: {sentences:,}" + f"; {CUT} an encoder's next chunk" * bool(cuts)
        titles = {label: title for title, label in self.titled(reading)}
        lines = [f"- **{escape(titles[label])}** {each.in_words()}" for label, each in readings.items()]
        lines += dict.fromkeys(f"- {escape(each)}" for reading in readings.values() for each in reading.warnings)
        return gr.HighlightedText(tokens, label=title), "\n".join(lines if tokens else [])

    def analyse(self, prompt: str, encoders: list[str], emphasis: Emphasis | Literal[""], reading: Reading) -> list:
        """What each encoder reads of a prompt: how much the end token attends to each word in the last layer, for each
        encoder, and 1 - cosine of each encoder's embedding before and after an edit of the prompt."""
        with _shown_errors(), self.models.held():
            request = Request(prompt, encoders, emphasis=emphasis or None, reading=reading)
            shares, moved = attention(self.models, request), movement(self.models, request)
        shown = [
            _attention(title, shares[label]) if label in shares else gr.HighlightedText(visible=False)
            for title, label in self.titled(reading)
        ]
        rows = [[edit, *(f"{far:.4f}" for far in by_label.values())] for edit, by_label in moved.items()]
        titles = [self.models.title(label, reading).partition(" (")[0] for label in shares]
        headers, widths = ["1 - cosine after", *titles], ["180px", *["92px"] * len(shares)]
        table = gr.Dataframe(rows, headers=headers, column_widths=widths, visible=bool(rows))
        return [*shown, table, [prompt, encoders, emphasis, reading]]

    def judged(self, images: list[tuple[str, str]] | None) -> gr.Dataframe:
        """p(yes) of each sentence of the prompt that generated images hold, by image."""
        files = {caption.partition(":")[0]: (path, read_settings(Path(path))) for path, caption in images or []}
        with _shown_errors():  # a reference image has no settings
            asked = {title: self.judge(path, held["prompt"]) for title, (path, held) in files.items() if held}
        rows = [
            [of[0][0], *("-" if p is None else f"{p:.2f}" for _, p in of)] for of in zip(*asked.values(), strict=True)
        ]
        return gr.Dataframe(rows, headers=["Is it in the image? p(yes)", *asked], visible=bool(rows))

    def hide_stale(self, analysed: list | None, *text) -> list:
        """Hides an analysis of another prompt, whether it was shown before or came late."""
        shown = gr.skip() if analysed == [*text] else gr.update(visible=False)
        return [shown] * (len(self.models.labels) + 1)

    def restore(self, path: str) -> list[Any]:
        """Reads the settings in an image from this demo, `debias-diffusion generate`, A1111, Forge or ComfyUI."""
        with _shown_errors():
            request, notes = from_image(path, self.models)
        toy_scene = scene_of(request.scene, request.prompt)
        images = _reference(toy_scene)
        if images:
            with open_regular(path) as file, Image.open(file, formats=("PNG",)) as image:
                if image.size == (request.width, request.height):
                    images.append((path, f"The PNG{_marks(image, toy_scene)}"))
        status = escape(
            " ".join(["Settings are restored, but not all." if notes else "All settings are restored.", *notes])
        )
        values = vars(request) | {"seed": str(request.seed), "emphasis": request.emphasis or ""}
        values |= {"karras": bool(request.karras), "clip_skip": request.clip_skip or 0}
        return [status, request.scene, images or gr.skip(), *(values[name] for name in SETTINGS)]


def choose(example: str | int | None) -> tuple:
    """The prompt, the scene and the images of an example: a text, the number of a scene, or None for a random one."""
    if isinstance(example, str):
        return example, None, []
    number = random.randrange(MOST_SCENES) if example is None else example
    scene, caption = demo_scene(number)
    return caption.text, number, _reference((scene, caption))


def _reference(toy_scene: tuple[Scene, Caption] | None) -> list[tuple]:
    """The reference image of the prompt's scene, if it has one, with its objects and the sentences that mention them
    first."""
    if toy_scene is None:
        return []
    scene, first_mentions = toy_scene[0], toy_scene[1].first_mentions()
    objects = "; ".join(f"{one.description} (sentence {first_mentions[one.place] + 1})" for one in scene.things)
    return [(render(scene), f"Reference image: {objects}")]


def _marks(image: Image.Image, toy_scene: tuple[Scene, Caption] | None) -> str:
    """What an image shows of the prompt's scene, to end its caption with."""
    return "" if toy_scene is None else f". {describe(read_image(image), toy_scene[0])}"


def _attention(title: str, share: dict) -> gr.HighlightedText:
    """An encoder's words, shaded by the square root of their share of the attention: a few words take most of it."""
    chunks, words = share["chunks"], []
    most = max(word["after_softmax"] for chunk in chunks for word in chunk["words"]) or 1.0
    for number, chunk in enumerate(chunks, 1):
        place = f"chunk {number}, tokens {chunk['first'] + 1:,} to {chunk['end']:,}: " if len(chunks) > 1 else ""
        start, end = (f"{chunk[name]['after_softmax']:.1%}" for name in ("sot", "eot"))
        words.append((f"{place}start token {start}, end token {end} ", None))
        words += [(f"{word['word']} ", round(sqrt(word["after_softmax"] / most), 3)) for word in chunk["words"]]
    return gr.HighlightedText(words, label=f"{title} {share['reading']}", visible=True)
