"""The page and its endpoints: components, and what their events do."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from math import sqrt
from typing import Any

import gradio as gr
from PIL import Image

from debias_diffusion.encoders import Reading
from debias_diffusion.errors import UserError

from .drawing import Drawn, draw
from .examples import examples
from .models import DemoModels
from .reading import attention, count_tokens, movement
from .request import MOST_GUIDANCE, MOST_IMAGES, MOST_STEPS, Request
from .settings import from_png
from .toy import MOST_SCENES, mark, random_scene

TITLE = "See what your encoder reads"
KEPT = (300, 3600)  # seconds: every 300, files older than an hour are deleted
# Who reads a token. The colours differ in lightness too, and the sentences below the tokens say it in words.
READ_BY = {"all": "read by every encoder", "some": "read by some encoders", "none": "read by no encoder"}
COLOURS = dict(zip(READ_BY.values(), ("#5eead4", "#fcd34d", "#fb7185"), strict=True))
READINGS = [
    ("overlap: chunks, each read with the end of the text before it", "overlap"),
    ("separate: chunks, each read by itself", "separate"),
    ("cut: the first 77 tokens alone", "cut"),
]
EXPLANATION = """### What does each encoder read?
How much the end token, where CLIP takes a prompt's embedding, attends to each word; and how far the embedding moves
when a sentence is removed. A sentence that moves nothing was not read."""
STYLE = """
.gradio-container { max-width: 1320px !important; margin: 0 auto !important; }
#movement { contain: inline-size; } /* a wide table scrolls, instead of the page */
/* Captions below the images, not on them. */
#images .grid-wrap { max-height: none; }
#images .grid-container { grid-template-columns: repeat(auto-fill, minmax(145px, 1fr)); padding: 0; }
#images .thumbnail-item { display: flex; flex-direction: column; aspect-ratio: auto; height: 100%; }
#images .thumbnail-item img { aspect-ratio: 1; height: auto; }
#images .caption-label { position: static; width: 100%; max-width: none; white-space: normal; text-align: left; }
"""
TURN = {"concurrency_id": "device", "concurrency_limit": 1}  # one request at a time uses the device
BESIDE = {"queue": False, "show_progress": "hidden"}  # answered while something is generated
PRIVATE = {"api_visibility": "private"}


def theme() -> gr.themes.Base:
    """System fonts, because others would be fetched from elsewhere; a teal on which white text can be read."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    return gr.themes.Default(primary_hue="teal", neutral_hue="slate", **fonts).set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_text_color="white",
    )


@contextmanager
def shown_errors() -> Iterator[None]:
    """Passes a UserError on to the visitor; escaped, because gradio shows it as HTML."""
    try:
        yield
    except UserError as error:
        raise gr.Error(escape(str(error), quote=False), duration=None, print_exception=False) from None


def build(models: DemoModels, budget: int, most_waiting: int, notice: str = "") -> gr.Blocks:
    """The page and its endpoints for these models.

    Args:
        models: the demo's models.
        budget: denoising steps of one request.
        most_waiting: requests in the queue; further ones are refused.
        notice: what the page says at its top.
    """
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=KEPT) as page:
        _Page(models, budget, notice)
    return page.queue(max_size=most_waiting, default_concurrency_limit=1, api_open=False)


class _Page:
    """The components of the page and their events."""

    def __init__(self, models: DemoModels, budget: int, notice: str):
        self.models, self.budget = models, budget
        self.scene = gr.State(None)  # number of the toy world's scene that was chosen last, or None
        self.analysed = gr.State(None)  # what the analysis on the page is of
        gr.Markdown(
            f"# {TITLE}\nOne prompt, one seed, up to five text encoders in {escape(models.base)}: how much of a long "
            f"prompt each encoder reads, and the image generated from it.{f' **{notice}**' if notice else ''}"
        )
        with gr.Row():
            with gr.Column(scale=5, min_width=320):
                self._inputs()
                self._advanced(models.defaults)
            with gr.Column(scale=6, min_width=320):
                looks = {"columns": 3, "height": "auto", "show_label": False, "buttons": ["download", "fullscreen"]}
                self.images = gr.Gallery(label="Images", format="png", interactive=False, elem_id="images", **looks)
                gr.Markdown(EXPLANATION)
                self.analyse = gr.Button("Analyse this prompt")
                self.analysis = [gr.HighlightedText(visible=False) for _ in models.labels]
                self.analysis.append(gr.Dataframe(visible=False, interactive=False, wrap=True, elem_id="movement"))
        self._wire()

    def _inputs(self) -> None:
        hint = "A long prompt of several sentences"
        self.prompt = gr.Textbox(label="Prompt", lines=6, max_lines=16, placeholder=hint)
        with gr.Row():
            self.examples = {
                name: gr.Button(name, size="sm", min_width=90) for name in [*examples(self.models), "Random scene"]
            }
        self.examples["Random scene"].visible = self.models.is_toy
        self.encoders = gr.CheckboxGroup(self.models.labels, value=self.models.labels, label="Encoders to compare")
        with gr.Row():
            self.generate = gr.Button("Generate", variant="primary", scale=3, min_width=120)
            self.stop = gr.Button("Stop", variant="stop", scale=1, min_width=80)
        self.status = gr.HTML("", min_height=60)  # no Markdown, in which a hostile PNG could say an image's address
        self.tokens = gr.HighlightedText(label="Tokens", color_map=COLOURS, show_legend=True)
        self.readings = gr.Markdown()

    def _advanced(self, defaults: Request) -> None:
        with gr.Accordion("Advanced settings", open=False):
            parts = {"negative_prompt": gr.Textbox("", label="Negative prompt", lines=2)}
            parts["seed"] = gr.Textbox("0", label="Seed")  # as text: numbers in a browser end at 2^53
            self.new_seed = gr.Button("Random seed", size="sm")
            parts["steps"] = gr.Slider(1, MOST_STEPS, defaults.steps, step=1, label="Steps")
            parts["guidance_scale"] = gr.Slider(
                0, MOST_GUIDANCE, defaults.guidance_scale, step=0.5, label="Guidance scale"
            )
            with gr.Row(visible=not self.models.is_toy):
                parts["height"] = gr.Number(defaults.height, label="Height in pixels", precision=0)
                parts["width"] = gr.Number(defaults.width, label="Width in pixels", precision=0)
            parts["images"] = gr.Slider(1, MOST_IMAGES, 1, step=1, label="Images per encoder")
            parts["scheduler"] = gr.Dropdown(self.models.schedulers, value=defaults.scheduler, label="Scheduler")
            parts["weighting"] = gr.Checkbox(False, label="Read weights: (word:1.3), [word], BREAK")
            hint = "An encoder whose name says how it reads always reads so."
            parts["reading"] = gr.Radio(READINGS, value="overlap", label="Reading of long prompts", info=hint)
        self.settings = parts  # by the fields of a request
        self.png = gr.UploadButton("Restore settings from a PNG", file_types=[".png"], size="sm")

    def _wire(self) -> None:
        text = [self.prompt, self.encoders, self.settings["weighting"], self.settings["reading"]]
        request = [self.prompt, self.encoders, *self.settings.values()]
        on_status = {"show_progress_on": self.status, **TURN}
        outputs = [*self.analysis, self.analysed]
        analysing = self.analyse.click(self.look, text, outputs, api_name="attention", **on_status)
        gr.on(
            [component.change for component in text],
            self.count,
            text,
            [self.tokens, self.readings],
            api_name="tokens",
            trigger_mode="always_last",
            **BESIDE,
        )
        for event in (*(component.change for component in text), analysing.then):
            event(self._hide_stale, [self.analysed, *text], self.analysis, **BESIDE, **PRIVATE)
        drawing = gr.on(
            [self.generate.click, self.prompt.submit],
            self.draw,
            [self.scene, *request],
            self.images,
            api_name="generate",
            **on_status,
        )
        drawing.success(lambda: "Done.", None, self.status, **BESIDE, **PRIVATE)
        stopped = self.stop.click(None, cancels=[drawing], **PRIVATE)
        stopped.then(lambda: "Stopped.", None, self.status, **BESIDE, **PRIVATE)
        for name, example in {**examples(self.models), "Random scene": None}.items():
            chosen = [self.prompt, self.scene, self.images]
            self.examples[name].click(lambda example=example: _choose(example), None, chosen, **BESIDE, **PRIVATE)
        self.new_seed.click(lambda: str(random.randrange(2**32)), None, self.settings["seed"], **BESIDE, **PRIVATE)
        restored = [self.status, self.scene, self.images, *request]
        self.png.upload(self.restore, self.png, restored, api_name="settings", **BESIDE)

    # Endpoints, whose parameters have the names that programs use

    def draw(
        self, scene, prompt, encoders, negative_prompt, seed, steps, guidance_scale, height, width, images, scheduler,
        weighting, reading, progress=gr.Progress(),  # noqa: B008
    ) -> Iterator[list[tuple]]:  # fmt: skip
        """Generates images of a prompt with each encoder: PNG files with their settings inside, and captions."""
        request = Request(
            prompt, tuple(label for label in self.models.labels if label in encoders), negative_prompt, seed, steps,
            guidance_scale, height, width, images, scheduler, weighting, reading, scene,
        )  # fmt: skip
        drawing, shown = draw(self.models, request, self.budget), _reference(scene, prompt)
        try:
            with shown_errors(), tempfile.TemporaryDirectory() as folder:
                for item in drawing:
                    if isinstance(item, Drawn):
                        shown.append(
                            (str(item.save(folder)), _caption(item.label, item.seed, item.read, item.image, request))
                        )
                        yield shown
                    else:
                        place = f"{item.label}, image {item.number}, step {item.step} of {item.steps}"
                        progress(item.done_share, place)
                        yield gr.skip()  # here a stopped request ends
        finally:
            drawing.close()

    def count(self, prompt: str, encoders: list[str], weighting: bool, reading: Reading) -> tuple:
        """Counts a prompt's tokens with the encoders' tokenizer: each with who reads it, and how each encoder reads."""
        # Without any encoder, as all read it.
        request = Request(prompt, tuple(encoders or self.models.labels), weighting=weighting, reading=reading)
        try:
            counted = count_tokens(self.models, request)
        except UserError as error:
            return gr.HighlightedText([(str(error), None)], label="Tokens"), ""
        tokens = [(token, READ_BY[read_by]) for token, read_by in counted.tokens]
        title = f"Tokens: {len(tokens):,}, sentences: {counted.sentences:,}"
        lines = [f"- **{escape(label)}** {each.in_words()}" for label, each in counted.readings.items()]
        return gr.HighlightedText(tokens, label=title), "\n".join(lines if tokens else [])

    def look(self, prompt: str, encoders: list[str], weighting: bool, reading: Reading) -> list:
        """What each encoder reads of a prompt: how much the end token attends to each word in the last layer, for each
        encoder, and 1 - cosine of each encoder's embedding before and after an edit of the prompt."""
        request = Request(prompt, tuple(encoders), weighting=weighting, reading=reading)
        with shown_errors(), self.models.alone():
            shares, moved = attention(self.models, request), movement(self.models, request)
        shown = [
            _attention(label, shares[label]) if label in shares else gr.HighlightedText(visible=False)
            for label in self.models.labels
        ]
        edits = [": ".join(filter(None, (row["edit"], row["text"]))) for row in moved]
        rows = [
            [edit, *(f"{far:.4f}" for far in row["distance"].values())] for edit, row in zip(edits, moved, strict=True)
        ]
        headers, widths = ["1 - cosine after", *shares], ["190px", *["84px"] * len(shares)]
        table = gr.Dataframe(rows, headers=headers, column_widths=widths, visible=bool(rows))
        return [*shown, table, [prompt, encoders, weighting, reading]]

    def _hide_stale(self, analysed: list | None, *text) -> list:
        """Hides an analysis of another prompt, whether it was shown before or came late."""
        return [gr.skip() if analysed == [*text] else gr.update(visible=False)] * len(self.analysis)

    def restore(self, png: str) -> list[Any]:
        """Reads the settings in a PNG from this demo or from `debias-diffusion generate`."""
        with shown_errors():
            restored = from_png(png, self.models)
        request, images = restored.request, gr.skip()
        if request.scene is not None and restored.label:
            with Image.open(png, formats=("PNG",)) as image:
                if image.size == (request.width, request.height):
                    caption = _caption(restored.label, restored.seed, "", image, request)
                    images = [*_reference(request.scene, request.prompt), (png, caption)]
        status = escape(" ".join(["All settings are restored.", *restored.notes]))
        settings = [getattr(request, name) for name in self.settings]
        return [status, request.scene, images, request.prompt, list(request.encoders), *settings]


def _choose(example: str | int | None) -> tuple:
    """The prompt, the scene and the images of an example: a text, the number of a scene, or None for a random one."""
    if isinstance(example, str):
        return example, None, []
    number = random.randrange(MOST_SCENES) if example is None else example
    prompt = random_scene(number).caption
    return prompt, number, _reference(number, prompt)


def _reference(number: int | None, prompt: str) -> list[tuple]:
    """The reference image of a scene, if the prompt is its caption."""
    scene = None if number is None else random_scene(number)
    if scene is None or scene.caption != prompt:
        return []
    objects = "; ".join(f"{name} (sentence {sentence})" for name, sentence in scene.objects)
    return [(scene.reference, f"Reference image: {objects}")]


def _caption(label: str, seed: int, read: str, image: Image.Image, request: Request) -> str:
    """Of an image: its encoder, its seed, how the prompt was read, and what it shows of the scene."""
    parts = [": ".join(filter(None, (f"{label}, seed {seed}", read)))]
    if request.scene is not None and (scene := random_scene(request.scene)).caption == request.prompt:
        parts.append(mark(scene, image).in_words())
    return ". ".join(parts)


def _attention(label: str, share: dict) -> gr.HighlightedText:
    """An encoder's words, shaded by the square root of their share of the attention: a few words take most of it."""
    most = max(word["after_softmax"] for chunk in share["chunks"] for word in chunk["words"]) or 1.0
    words, title = [], f"{label} {share['reading']}"
    for number, chunk in enumerate(share["chunks"], 1):
        place = (
            f"chunk {number}, tokens {chunk['first'] + 1:,} to {chunk['end']:,}: " if len(share["chunks"]) > 1 else ""
        )
        start, end = (f"{chunk[name]['after_softmax']:.1%}" for name in ("sot", "eot"))
        words.append((f"{place}start token {start}, end token {end} ", None))
        words += [(f"{word['word']} ", round(sqrt(word["after_softmax"] / most), 3)) for word in chunk["words"]]
    return gr.HighlightedText(words, label=title, visible=True)
