"""The page: its layout and its events. `markup` makes the contents."""

import io
import random
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from debias_diffusion.errors import UserError

from . import markup
from .analysis import attention, movement, tokens
from .device import Device
from .endpoints import TURN, add_endpoints, decoded
from .example_prompts import examples
from .guard import INTERNAL_ERROR, Blocks
from .live_generation import Drawn, Step
from .models import DemoModels
from .request import MOST_GUIDANCE, MOST_IMAGES, MOST_SCENES, MOST_STEPS, LongPrompts, Request
from .restore import image_of_png, request_of_png
from .toy_scenes import ToyScene, mark, random_scene

TITLE = "See what your encoder reads"
_HERE = Path(__file__).parent
STYLE = (_HERE / "style.css").read_text()
SCRIPT = (_HERE / "page.js").read_text()
# Outside the queue: answered while something is drawn.
BESIDE = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
# Counts tokens when typing pauses, not at every key: each change waits, and only the last one returns a new number.
_WHEN_TYPING_PAUSES = """async () => {
  const mine = (window.changes = (window.changes ?? 0) + 1);
  await new Promise((done) => setTimeout(done, 250));
  if (mine === window.changes) window.paused = String(mine);
  return window.paused ?? "";
}"""
POLICIES = [
    ("Default: 77-token encoders cut the prompt, longer ones read on", "auto"),
    ("Overlapping chunks: every encoder reads everything, each chunk with the end of the text before it", "chunks"),
    ("Separate chunks: every encoder reads everything, each chunk by itself", "separate"),
    ("Cut: every encoder stops at 77 tokens", "cut"),
]
_STOPPED = "Stopped."
_RESTORE = """
<label for="png">Restore settings from a PNG</label>
<input type="file" id="png" accept="image/png,.png">
"""
# The settings stand at the beginning of a PNG, so only that part is sent, and the server keeps no file.
_SEND_BEGINNING = """
element.addEventListener("change", (event) => {
  const file = event.target.files[0];
  if (!file) return;
  const reader = new FileReader();
  reader.onload = () => trigger("chosen", { png: reader.result.slice(reader.result.indexOf(",") + 1) });
  reader.readAsDataURL(file.slice(0, 1048576));
  event.target.value = "";
});
"""


def theme() -> gr.themes.Base:
    """The theme, with system fonts: others would be fetched from elsewhere."""
    # White text needs a darker teal than gradio's.
    teal, fill = "*primary_700", {}
    for name in ("button_primary_background_fill", "checkbox_label_background_fill_selected"):
        fill |= {name: teal, f"{name}_dark": teal}
    return gr.themes.Default(
        primary_hue="teal",
        neutral_hue="slate",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    ).set(
        **fill,
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_600",
        button_primary_text_color="white",
        checkbox_label_text_color_selected="white",
    )


def build(models: DemoModels, most_waiting: int, budget: int, notice: str = "") -> gr.Blocks:
    """The page and its endpoints for these models.

    Args:
        models: the demo's models.
        most_waiting: requests in the queue; further ones are refused.
        budget: denoising steps of one request.
        notice: what the status line says at first.
    """
    with Blocks(title=TITLE, analytics_enabled=False) as page:
        device = Device(models, budget)
        _Page(device, notice)
        add_endpoints(device)
    # api_open=True would let direct calls pass the queue.
    return page.queue(max_size=most_waiting, api_open=False)


class _Page:
    """The components of the page and their events."""

    def __init__(self, device: Device, notice: str):
        self.models, self.device, self.notice = device.models, device, notice
        self.scene = gr.State(None)  # number of the scene that the prompt describes, or None
        self.shown = gr.State(None)  # number of the scene whose reference image is on the page, or None
        self._head()
        with gr.Row(elem_classes="columns"):
            with gr.Column(scale=5, min_width=320):
                self._prompt()
            with gr.Column(scale=6, min_width=320):
                self._pictures()
                self._reading()
        self._wire()

    # Layout

    def _head(self) -> None:
        names = ", ".join(self.models.labels)
        gr.Markdown(
            f"# {TITLE}\nCompare text encoders on one long prompt and one seed: how much of it each encoder reads, and "
            f"the image that {escape(self.models.base)} generates from it. Encoders: {escape(names)}.",
            elem_id="head",
        )

    def _prompt(self) -> None:
        defaults = self.models.defaults
        hint = "A long prompt of several sentences"
        self.prompt = gr.Textbox("", label="Prompt", lines=6, max_lines=16, placeholder=hint, elem_id="prompt")
        with gr.Row(elem_classes="examples"):
            self.examples = [
                (gr.Button(name, size="sm", min_width=90), example) for name, example in examples(self.models).items()
            ]
            self.new_scene = gr.Button(
                "Random scene", size="sm", min_width=90, visible=self.models.is_toy, elem_id="new-scene"
            )
        self.encoders = gr.CheckboxGroup(
            self.models.labels, value=list(defaults.encoders), label="Encoders to compare", elem_id="encoders"
        )
        with gr.Row(elem_classes="run"):
            self.draw = gr.Button("Generate", variant="primary", scale=3, min_width=120, elem_id="draw")
            self.stop = gr.Button("Stop", variant="stop", interactive=False, scale=1, min_width=80, elem_id="stop")
        self.status = _html("status", markup.note(self.notice) if self.notice else "")
        gr.Markdown("### Tokens", elem_classes="heading")
        self.tokens = _html("tokens", markup.token_list(tokens(self.models, "")))
        self.paused = gr.Textbox("", visible="hidden")  # changes whenever typing pauses
        with gr.Accordion("Advanced settings", open=False, elem_id="advanced"):
            self.settings = self._advanced(defaults)
        self.restore = _html("restore", html_template=_RESTORE, js_on_load=_SEND_BEGINNING)

    def _advanced(self, defaults: Request) -> dict[str, gr.components.Component]:
        """Components by the field names of `Request`."""
        toy = self.models.is_toy
        parts = {"negative_prompt": gr.Textbox("", label="Negative prompt", lines=2)}
        with gr.Row():
            # As text: numbers in a browser end at 2^53.
            parts["seed"] = gr.Textbox(str(defaults.seed), label="Seed", elem_id="seed")
            self.new_seed = gr.Button("Random seed", size="sm", min_width=90)
        parts["steps"] = gr.Slider(1, MOST_STEPS, defaults.steps, step=1, label="Steps", elem_id="steps")
        parts["guidance_scale"] = gr.Slider(0, MOST_GUIDANCE, defaults.guidance_scale, step=0.5, label="Guidance scale")
        with gr.Row(visible=not toy):
            for name in ("height", "width"):
                parts[name] = gr.Number(getattr(defaults, name), label=f"{name.capitalize()} in pixels", precision=0)
        parts["images"] = gr.Slider(1, MOST_IMAGES, defaults.images, step=1, label="Images per encoder")
        parts["scheduler"] = gr.Dropdown(self.models.schedulers, value=defaults.scheduler, label="Scheduler")
        parts["long_prompts"] = gr.Radio(
            POLICIES,
            value=defaults.long_prompts,
            label="Prompts of more than 77 tokens",
            info="An encoder that is named after its chunks always reads in them.",
        )
        parts["weighting"] = gr.Checkbox(defaults.weighting, label="Read weights: (word:1.3), [word], BREAK")
        return parts

    def _pictures(self) -> None:
        gr.Markdown("### Images", elem_classes="heading")
        hint = '<p class="hint">Choose an example or write a prompt, then press <b>Generate</b>.</p>'
        self.hint = _html("hint", hint)
        # A component for each card, so that finished images are not sent again with every further one.
        self.cards: list[dict[str, gr.HTML]] = []  # by seed and label
        for row in range(MOST_IMAGES):
            with gr.Row(elem_classes="cards"):
                if row == 0:
                    self.original = _html("original")
                cards = {label: _html(f"card-{row}-{place}") for place, label in enumerate(self.models.labels)}
            self.cards.append(cards)

    def _reading(self) -> None:
        gr.Markdown(
            "### What does each encoder read?\nCLIP takes a prompt's embedding at the end token. See how much that "
            "token attends to each word, and how far the embedding moves when a sentence is removed. A sentence that "
            "moves nothing was not read.",
            elem_classes="heading",
        )
        self.look = gr.Button("Analyse this prompt", elem_id="look")
        self.read = _html("read")
        self.attention = _html("attention")
        self.movement = _html("movement")

    # Events

    def _wire(self) -> None:
        weighting = self.settings["weighting"]
        policy = self.settings["long_prompts"]
        reading = [self.prompt, weighting, self.encoders, policy]
        changes = [component.change for component in reading]
        pauses = {"js": _WHEN_TYPING_PAUSES, "trigger_mode": "multiple", "api_visibility": "private"}
        gr.on(changes, None, None, self.paused, **pauses)
        self.paused.change(self._count, reading, self.tokens, trigger_mode="always_last", **BESIDE)
        pictures = [self.shown, self.hint, self.original, *(card for row in self.cards for card in row.values())]
        start = [self.draw.click, self.prompt.submit]
        gr.on(start, lambda: gr.Button(interactive=True), None, self.stop, **BESIDE)
        drawing = gr.on(
            start,
            self._draw,
            [self.scene, self.shown, self.prompt, self.encoders, *self.settings.values()],
            [self.status, *pictures],
            show_progress="minimal",
            show_progress_on=self.status,
            api_visibility="private",
            **TURN,
        )
        drawing.then(self._ended, self.status, [self.status, self.stop], **BESIDE)
        stopped = self.stop.click(None, cancels=[drawing], api_visibility="private")
        stopped.then(lambda: markup.note(_STOPPED), None, self.status, **BESIDE)
        scene = [self.prompt, self.scene, self.status, *pictures]
        self.new_scene.click(lambda: self._set_scene(random.randrange(MOST_SCENES)), None, scene, **BESIDE)
        for button, example in self.examples:
            button.click(lambda example=example: self._set_example(example), None, scene, **BESIDE)
        self.new_seed.click(lambda: str(random.randrange(2**32)), None, self.settings["seed"], **BESIDE)
        everything = [*scene, self.encoders, *self.settings.values()]
        self.restore.chosen(self._restore, None, everything, **BESIDE)
        self.look.click(
            self._look,
            reading,
            [self.read, self.attention, self.movement],
            show_progress="minimal",
            show_progress_on=self.read,
            api_visibility="private",
            **TURN,
        )

    def _count(self, prompt: str, weighting: bool, encoders: list[str] | None, long_prompts: LongPrompts) -> str:
        try:
            # Without any encoder, as all read it.
            return markup.token_list(tokens(self.models, prompt or "", weighting, encoders or None, long_prompts))
        except UserError as error:
            return markup.message(str(error))

    def _draw(
        self, number: int | None, shown: int | None, prompt: str, encoders: list[str], *values: Any
    ) -> Iterator[dict]:
        named = dict(zip(self.settings, values, strict=True))
        if number is not None and random_scene(number).caption != prompt:
            number = None
        try:
            # In the page's order, whatever order they were chosen in.
            chosen = tuple(label for label in self.models.labels if label in (encoders or ()))
            yield from self._drawn(Request(prompt=prompt, encoders=chosen, scene=number, **named), shown)
        except UserError as error:
            yield {self.status: markup.message(str(error))}
        except Exception:
            # gradio's own error display is off, because it sometimes shows stopped drawings as errors.
            traceback.print_exc()
            yield {self.status: markup.message(INTERNAL_ERROR)}

    def _ended(self, status: str) -> tuple:
        """The status after a drawing: the last step of a stopped one may arrive late."""
        return markup.note(_STOPPED) if "<progress" in (status or "") else gr.skip(), gr.Button(interactive=False)

    def _drawn(self, request: Request, shown: int | None) -> Iterator[dict]:
        scene = None if request.scene is None else random_scene(request.scene)
        started, drawing = False, self.device.draw(request)
        try:
            for item in drawing:
                if isinstance(item, Step):
                    change = {self.status: markup.progress(item, request)}
                    if not started:
                        started, labels = True, list(request.encoders)
                        change |= self._reference(request.scene, shown) | self._places(labels, int(request.images))
                    yield change
                else:
                    marks = mark(scene, item.image) if scene else None
                    yield {self.cards[item.picture - 1][item.label]: markup.drawn(item, marks)}
        finally:
            drawing.close()
        yield {self.status: markup.note(f"Done: seed {request.seed}, {request.steps} steps.")}

    def _reference(self, number: int | None, shown: int | None) -> dict:
        """The reference image of the scene, or none, if the page shows another one."""
        if number == shown:
            return {}
        return {self.shown: number, self.original: "" if number is None else _original(random_scene(number))}

    def _places(self, labels: Sequence[str], images: int) -> dict:
        """A placeholder for each image, and nothing in the other places."""
        return {self.hint: ""} | {
            card: markup.waiting(label) if row < images and label in labels else ""
            for row, cards in enumerate(self.cards)
            for label, card in cards.items()
        }

    def _set_scene(self, number: int) -> dict:
        return {
            self.prompt: random_scene(number).caption,
            self.scene: number,
            self.status: "",
            **self._reference(number, None),
            **self._places(self.models.labels, 1),
        }

    def _set_example(self, example: str | int) -> dict:
        return self._set_scene(example) if isinstance(example, int) else {self.prompt: example, self.scene: None}

    def _restore(self, event: gr.EventData) -> dict:
        try:
            png = event.png
        except (AttributeError, TypeError):  # not a request from the page
            png = None
        try:
            file = decoded(png)
            request, notes = request_of_png(file, self.models)
            picture = image_of_png(file, request, self.models)
        except UserError as error:
            return {self.status: markup.message(str(error))}
        values = {field.name: getattr(request, field.name) for field in fields(request)}
        return {
            **({} if picture is None else self._restored(picture, request.scene)),
            self.scene: request.scene,
            self.status: markup.note(" ".join(["All settings are restored.", *notes])),
            self.prompt: values["prompt"],
            self.encoders: list(values["encoders"]),
            **{component: values[name] for name, component in self.settings.items()},
        }

    def _restored(self, picture: Drawn, number: int) -> dict:
        """The image of a scene beside its reference image, marked again."""
        card = markup.drawn(picture, mark(random_scene(number), picture.image))
        return self._reference(number, None) | self._places([], 0) | {self.cards[0][picture.label]: card}

    def _look(self, prompt: str, weighting: bool, encoders: list[str], long_prompts: LongPrompts) -> dict:
        try:
            with self.device.alone():
                shares = attention(self.models, prompt, encoders, weighting, long_prompts)
                shown = {self.read: "", self.attention: markup.attention(shares)}
                try:
                    rows = movement(self.models, prompt, encoders, weighting, long_prompts)
                except UserError as error:  # a single sentence still has attention
                    return shown | {self.movement: markup.message(str(error))}
            return shown | {self.movement: markup.movement(rows)}
        except UserError as error:
            return {self.read: markup.message(str(error)), self.attention: "", self.movement: ""}


def _html(name: str, value: str = "", js_on_load: str | None = None, **more) -> gr.HTML:
    """A part of the page that `markup` fills, without gradio's text styles."""
    return gr.HTML(value, js_on_load=js_on_load, elem_id=name, apply_default_css=False, **more)


def _original(scene: ToyScene) -> str:
    file = io.BytesIO()
    scene.original.save(file, format="PNG")
    return markup.original(scene, file.getvalue())
