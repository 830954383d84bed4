"""Where a prompt is cut, as each program reads it. Tokenizers and context lengths suffice, so no model is loaded."""

import json
import os
import sys
from collections.abc import Iterator
from typing import get_args

from transformers import CLIPTokenizer

from debias_diffusion.data.bad_records import printable
from debias_diffusion.encoders.spec import READINGS, EncoderSpec, Kind
from debias_diffusion.errors import explain_failure
from debias_diffusion.pipelines.rendering.checkpoints import KINDS, SDXL, Checkpoint
from debias_diffusion.pipelines.rendering.prompts import cleaned
from debias_diffusion.text.chunks import Reading
from debias_diffusion.text.options import LongPromptOptions, PromptLayout
from debias_diffusion.text.prompt import read

from .prompt_options import TokensConfig
from .prompts import check_prompt

_CHUNKS, _CUT_OFF = (32, 36), 31  # of a terminal: green and cyan in turn, red


def show_tokens(config: TokensConfig) -> None:
    """Prints where a prompt is cut and how long its embeddings are: in one reading, or in all, those alike together."""
    check_prompt(config.prompt)
    encoders = load_tokenizers(Checkpoint.parse(config.base), config.spec)
    readings = [config.spec.reading] if config.spec.reading else get_args(Reading)
    layouts = {}
    for reading in readings:
        options = LongPromptOptions(reading=reading, emphasis=config.emphasis)
        with explain_failure("The prompt cannot be read"):
            layouts[reading] = read([cleaned(config.prompt, options)], None, encoders, options).layout()
    if config.json:
        print(json.dumps({reading: layout._asdict() for reading, layout in layouts.items()}))
        return
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    alike: dict[str, list[str]] = {}  # readings by what is printed of them
    for reading, layout in layouts.items():
        alike.setdefault("\n".join(_lines(layout, coloured)), []).append(f"{reading} ({READINGS[reading]})")
    print("\n\n".join(f"{', '.join(readings)}: {lines}" for lines, readings in alike.items()))


def load_tokenizers(checkpoint: Checkpoint, first: EncoderSpec) -> list[tuple[CLIPTokenizer, int]]:
    """The tokenizer and the context length of each text encoder, without its weights.

    Args:
        first: the text encoder in the place of the checkpoint's first one, with the second that was fitted with it.
    """
    given = {"text_encoder": None if first.kind is Kind.ORIGINAL else first}
    if checkpoint.check_kind(KINDS) == SDXL:
        given["text_encoder_2"] = EncoderSpec.parse(first.fitted_second) if first.fitted_second else None
    encoders = []
    for slot, spec in given.items():
        with checkpoint.explain(f"max_position_embeddings in {slot}/config.json"):
            length = spec.context_length if spec else checkpoint.config(slot)["max_position_embeddings"]
        encoders.append((checkpoint.tokenizer(slot), length))
    return encoders


def _lines(layout: PromptLayout, coloured: bool) -> Iterator[str]:
    """What is printed of a layout; encoders that cut alike are shown once."""
    yield f"{layout.tokens} tokens, {layout.positions} positions"
    if layout.schedules:
        yield printable(f"  at the first step; it changes with {', '.join(layout.schedules)}")

    def paint(text: str, colour: int) -> str:
        return f"\x1b[{colour}m{printable(text)}\x1b[0m" if coloured else printable(text)

    encoders = list(zip(layout.texts, layout.cut_off, strict=True))
    names = ["first text encoder", "second text encoder"]
    if len(set(encoders)) == 1:
        names = ["both text encoders" if len(encoders) > 1 else "text encoder"]
    for name, (chunks, (rest, n_rest)) in zip(names, encoders, strict=False):
        yield f"  {name}"
        for number, (text, count) in enumerate(chunks):
            mark = "" if coloured or number == len(chunks) - 1 else " |"
            yield f"  {count:5}  {paint(text, _CHUNKS[number % 2])}{mark}"
        if n_rest:
            yield f"  {n_rest:5}  cut off: {paint(rest, _CUT_OFF)}"
    for taken_out in layout.taken_out:
        yield printable(f"  taken out: {taken_out}")
    for warning in layout.warnings:
        yield printable(f"  {warning}")
