"""The page: what stands where, and what happens when it is used. What it shows is made in `markup`."""

import io
import random
import traceback
from collections.abc import Iterator
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from debias_diffusion.errors import UserError

from . import markup
from .device import Device
from .drawing import Step
from .endpoints import TURN, add_endpoints, decoded
from .examples import examples
from .guard import Blocks
from .models import Models
from .reading import attention, movement, tokens
from .requests import MOST_GUIDANCE, MOST_IMAGES, MOST_STEPS, Request, request_of_png
from .scenes import ToyScene, mark, random_scene

TITLE = "See what your encoder reads"
_HERE = Path(__file__).parent
STYLE = (_HERE / "style.css").read_text()
SCRIPT = (_HERE / "page.js").read_text()
MOST_SCENES = 2**31  # more than anybody looks at
# Not in the line: answered while something is drawn.
BESIDE = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
# Of what is typed, only where it rests is told. Each change waits; the last gives a new number then, others the old.
_WHEN_IT_RESTS = """async () => {
  const mine = (window.changes = (window.changes ?? 0) + 1);
  await new Promise((done) => setTimeout(done, 250));
  if (mine === window.changes) window.rested = String(mine);
  return window.rested ?? "";
}"""
POLICIES = [
    ("As made: encoders of 77 are cut there, long ones read on", "auto"),
    ("Windows: all read everything, piece by piece", "windows"),
    ("Cut: all stop at 77", "cut"),
]
_STOPPED = "Stopped."
_GIVE_BACK = """
<label for="give-back">Give back a PNG that was downloaded here, and everything is set again</label>
<input type="file" id="give-back" accept="image/png,.png">
"""
# The settings stand at the beginning of a PNG. So of any file, however large, that is all that is sent, and the server
# keeps no file.
_SEND_BEGINNING = """
element.addEventListener("change", (event) => {
  const file = event.target.files[0];
  if (!file) return;
  const reader = new FileReader();
  reader.onload = () => trigger("given", { png: reader.result.slice(reader.result.indexOf(",") + 1) });
  reader.readAsDataURL(file.slice(0, 1048576));
  event.target.value = "";
});
"""


def theme() -> gr.themes.Base:
    """The look: the system's own fonts, because others would be fetched from elsewhere."""
    # White on darker teal than gradio's own, or it is hard to read.
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


def build(models: Models, most_waiting: int, budget: int) -> gr.Blocks:
    """The page and its endpoints for these models.

    Args:
        models: what draws and reads.
        most_waiting: requests in the queue; further ones are told to come again.
        budget: denoising steps that one request may take.
    """
    with Blocks(title=TITLE, analytics_enabled=False) as page:
        device = Device(models, budget)
        _Page(device)
        add_endpoints(device)
    # Or whoever does not join the queue would pass all who wait in it.
    return page.queue(max_size=most_waiting, api_open=False)


class _Page:
    """The parts of the page, and what they do."""

    def __init__(self, device: Device):
        self.models, self.device = device.models, device
        self.scene = gr.State(None)  # number of the scene that the prompt describes, or None
        self._head()
        with gr.Row(elem_classes="columns"):
            with gr.Column(scale=5, min_width=320):
                self._prompt()
            with gr.Column(scale=6, min_width=320):
                self._pictures()
                self._reading()
        self._wire()

    # What stands where

    def _head(self) -> None:
        names = ", ".join(self.models.labels)
        gr.Markdown(
            f"# {TITLE}\nOne long prompt, one seed, several text encoders: what each of them reads of it, and what is "
            f"drawn from that by {escape(self.models.base)}. Here are {escape(names)}.",
            elem_id="head",
        )

    def _prompt(self) -> None:
        defaults = self.models.defaults
        hint = "A long prompt, of several sentences"
        self.prompt = gr.Textbox("", label="Prompt", lines=6, max_lines=16, placeholder=hint, elem_id="prompt")
        with gr.Row(elem_classes="examples"):
            self.examples = [
                (gr.Button(name, size="sm", min_width=90), found) for name, found in examples(self.models).items()
            ]
            self.new_scene = gr.Button(
                "Random scene", size="sm", min_width=90, visible=self.models.is_toy, elem_id="new-scene"
            )
        self.encoders = gr.CheckboxGroup(
            self.models.labels, value=list(defaults.encoders), label="Encoders to compare", elem_id="encoders"
        )
        with gr.Row(elem_classes="run"):
            self.draw = gr.Button("Draw", variant="primary", scale=3, min_width=120, elem_id="draw")
            self.stop = gr.Button("Stop", variant="stop", interactive=False, scale=1, min_width=80, elem_id="stop")
        self.status = _html("status")
        gr.Markdown("### Tokens", elem_classes="heading")
        self.tokens = _html("tokens", self._count("", False))
        self.rested = gr.Textbox("", visible="hidden")  # another number whenever the prompt has come to rest
        with gr.Accordion("Advanced settings", open=False, elem_id="advanced"):
            self.settings = self._advanced(defaults)
        self.give_back = _html("given", html_template=_GIVE_BACK, js_on_load=_SEND_BEGINNING)

    def _advanced(self, defaults: Request) -> dict[str, gr.components.Component]:
        """By the names of `Request`."""
        toy = self.models.is_toy
        found = {"negative_prompt": gr.Textbox("", label="Negative prompt", lines=2)}
        with gr.Row():
            # As text, because a browser's numbers end at 2^53.
            found["seed"] = gr.Textbox(str(defaults.seed), label="Seed", elem_id="seed")
            self.new_seed = gr.Button("Another seed", size="sm", min_width=90)
        found["steps"] = gr.Slider(1, MOST_STEPS, defaults.steps, step=1, label="Steps", elem_id="steps")
        found["guidance_scale"] = gr.Slider(0, MOST_GUIDANCE, defaults.guidance_scale, step=0.5, label="Guidance scale")
        with gr.Row(visible=not toy):
            for name in ("height", "width"):
                found[name] = gr.Number(getattr(defaults, name), label=f"{name.capitalize()} in pixels", precision=0)
        found["images"] = gr.Slider(1, MOST_IMAGES, defaults.images, step=1, label="Pictures by each encoder")
        found["scheduler"] = gr.Dropdown(self.models.schedulers, value=defaults.scheduler, label="Scheduler")
        found["long_prompts"] = gr.Radio(POLICIES, value=defaults.long_prompts, label="Prompts past 77 tokens")
        found["weighting"] = gr.Checkbox(defaults.weighting, label="Weights in the prompt: (word:1.3), [word], BREAK")
        return found

    def _pictures(self) -> None:
        gr.Markdown("### Pictures", elem_classes="heading")
        first = '<p class="hint">Choose an example or write a prompt, then press <b>Draw</b>.</p>'
        # One for each picture by all encoders, so that what is there is not sent again with every further one.
        with gr.Column(elem_classes="rows"):
            self.rows = [_html(f"row-{row}", first if row == 0 else "") for row in range(MOST_IMAGES)]

    def _reading(self) -> None:
        gr.Markdown(
            "### What does it read?\nThe end of the text stands for all of it: how much it attends to each word, and "
            "how far each encoder's embedding moves when a sentence goes. Where nothing moves, nothing was read.",
            elem_classes="heading",
        )
        self.look = gr.Button("Look at this prompt", elem_id="look")
        self.read = _html("read")
        self.attention = _html("attention")
        self.movement = _html("movement")

    # What happens

    def _wire(self) -> None:
        weighting = self.settings["weighting"]
        changes = [self.prompt.change, weighting.change]
        gr.on(changes, None, None, self.rested, js=_WHEN_IT_RESTS, trigger_mode="multiple", api_visibility="private")
        self.rested.change(self._count, [self.prompt, weighting], self.tokens, trigger_mode="always_last", **BESIDE)
        start = [self.draw.click, self.prompt.submit]
        gr.on(start, lambda: gr.Button(interactive=True), None, self.stop, **BESIDE)
        drawing = gr.on(
            start,
            self._draw,
            [self.scene, self.prompt, self.encoders, *self.settings.values()],
            [self.status, *self.rows],
            show_progress="minimal",
            show_progress_on=self.status,
            api_visibility="private",
            **TURN,
        )
        drawing.then(self._ended, self.status, [self.status, self.stop], **BESIDE)
        stopped = self.stop.click(None, cancels=[drawing], api_visibility="private")
        stopped.then(lambda: markup.note(_STOPPED), None, self.status, **BESIDE)
        scene = [self.prompt, self.scene, self.status, *self.rows]
        self.new_scene.click(lambda: self._set_scene(random.randrange(MOST_SCENES)), None, scene, **BESIDE)
        for button, example in self.examples:
            button.click(lambda example=example: self._set_example(example), None, scene, **BESIDE)
        self.new_seed.click(lambda: str(random.randrange(2**32)), None, self.settings["seed"], **BESIDE)
        everything = [self.scene, self.status, self.prompt, self.encoders, *self.settings.values()]
        self.give_back.given(self._restore, None, everything, **BESIDE)
        self.look.click(
            self._look,
            [self.prompt, self.encoders],
            [self.read, self.attention, self.movement],
            show_progress="minimal",
            show_progress_on=self.read,
            api_visibility="private",
            **TURN,
        )

    def _count(self, prompt: str, weighting: bool) -> str:
        try:
            return markup.count_tokens(tokens(self.models, prompt or "", weighting))
        except UserError as error:
            return markup.message(str(error))

    def _draw(self, number: int | None, prompt: str, encoders: list[str], *values: Any) -> Iterator[dict]:
        named = dict(zip(self.settings, values, strict=True))
        scene = None if number is None else random_scene(number)
        try:
            # In the order of the page, in whichever they were chosen.
            chosen = tuple(label for label in self.models.labels if label in (encoders or ()))
            request = Request(prompt=prompt, encoders=chosen, **named)
            yield from self._drawn(request, scene if scene and scene.caption == prompt else None)
        except UserError as error:
            yield {self.status: markup.message(str(error))}
        except Exception:
            # What gradio would show here it also shows, at times, of a drawing that was stopped; so it is hidden.
            traceback.print_exc()
            yield {
                self.status: markup.message("Something went wrong that should not; the console of the demo says more.")
            }

    def _ended(self, status: str) -> tuple:
        """What stands there when a drawing is over: of one that was stopped the last step may come late."""
        return markup.note(_STOPPED) if "<progress" in (status or "") else gr.skip(), gr.Button(interactive=False)

    def _drawn(self, request: Request, scene: ToyScene | None) -> Iterator[dict]:
        figures: list[list[str]] = []
        drawing = self.device.draw(request)
        try:
            for news in drawing:
                if isinstance(news, Step):
                    change = {self.status: markup.progress(news, request)}
                    if not figures:
                        figures = self._places(request, scene)
                        change |= self._filled(figures)
                    yield change
                else:
                    row = news.picture - 1
                    marks = mark(scene, news.image) if scene else ()
                    place = -len(request.encoders) + request.encoders.index(news.label)
                    figures[row][place] = markup.drawn(news, marks)
                    yield {self.rows[row]: markup.cards(figures[row])}
        finally:
            drawing.close()
        yield {self.status: markup.note(f"Done: seed {request.seed}, {request.steps} steps.")}

    def _places(self, request: Request, scene: ToyScene | None) -> list[list[str]]:
        """Rows of pictures before they are drawn: the scene's own first, if there is one."""
        rows = [[markup.waiting(label) for label in request.encoders] for _ in range(int(request.images))]
        if scene:
            rows[0].insert(0, _original(scene))
        return rows

    def _filled(self, figures: list[list[str]]) -> dict:
        rows = [markup.cards(row) for row in figures]
        return dict(zip(self.rows, rows + [""] * (len(self.rows) - len(rows)), strict=True))

    def _set_scene(self, number: int) -> dict:
        scene = random_scene(number)
        return {
            self.prompt: scene.caption,
            self.scene: number,
            self.status: "",
            **self._filled([[_original(scene), *map(markup.waiting, self.models.labels)]]),
        }

    def _set_example(self, example: str | int) -> dict:
        return self._set_scene(example) if isinstance(example, int) else {self.prompt: example, self.scene: None}

    def _restore(self, given: gr.EventData) -> dict:
        try:
            png = given.png
        except (AttributeError, TypeError):  # the request is not one that the page sends
            png = None
        try:
            request, notes = request_of_png(decoded(png), self.models)
        except UserError as error:
            return {self.status: markup.message(str(error))}
        values = {field.name: getattr(request, field.name) for field in fields(request)}
        return {
            self.scene: None,
            self.status: markup.note(" ".join(["Everything is set as for that picture.", *notes])),
            self.prompt: values["prompt"],
            self.encoders: list(values["encoders"]),
            **{its: values[name] for name, its in self.settings.items()},
        }

    def _look(self, prompt: str, encoders: list[str]) -> dict:
        try:
            with self.device.alone():
                looked = attention(self.models, prompt, encoders)
                shown = {self.read: "", self.attention: markup.attention(looked)}
                try:
                    rows = movement(self.models, prompt, encoders)
                except UserError as error:  # a single sentence can be looked at all the same
                    return shown | {self.movement: markup.message(str(error))}
            return shown | {self.movement: markup.movement(rows)}
        except UserError as error:
            return {self.read: markup.message(str(error)), self.attention: "", self.movement: ""}


def _html(name: str, value: str = "", js_on_load: str | None = None, **more) -> gr.HTML:
    """A part of the page that `markup` fills, without the look that gradio gives to prose."""
    return gr.HTML(value, js_on_load=js_on_load, elem_id=name, apply_default_css=False, **more)


def _original(scene: ToyScene) -> str:
    file = io.BytesIO()
    scene.original.save(file, format="PNG")
    return markup.original(scene, file.getvalue())
