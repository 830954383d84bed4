"""The power of `sharpen`, chosen on development scenes by a rule that was written before anything was drawn.

    python -m research.studies.power [--prompts 100]

Of the powers below and log N / log 77, which grows with the number N of positions, the one with the highest mean of
objects right over both encoders wins; if smaller ones lie within one point of it, the smallest of these. What grows
with the length counts as its value at 227 positions, 1.25.

Writes research/results/power.md and .json.
"""

import math
from statistics import fmean

from tqdm import tqdm

from debias_diffusion.encoders.spec import ORIGINAL
from debias_diffusion.eval.images.objects import objects_numbers
from debias_diffusion.eval.report import Table
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.checker import compare, read_image
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, scene

from .drawing import draw_texts, pipeline_of
from .harness import publish, read_options

SPLIT, WITHIN = "development", 1.0
GROWING = "log N / log 77"
POWERS = {"1": 1.0, "1.25": 1.25, GROWING: None, "1.5": 1.5, "2": 2.0, "3": 3.0}  # from the smallest
SCORES = {"objects_right": "objects right, %", "objects_right_late": "first mentioned in sentence 5 or later, %"}
SCORES |= {"objects_precision": "precision, %", "empty_filled": "empty places filled, %"}


def draw(pipe, power: float | None, count: int) -> dict:
    """Scores of so many prompts, drawn together with others of their length."""
    captions, shown = [caption(SPLIT, at) for at in range(count)], {}
    lengths = [pipe.prompt_layout(clean(told.text)).positions for told in captions]
    for length in sorted({*lengths}):
        numbers = [at for at in range(count) if lengths[at] == length]
        pipe.set_long_prompt(sharpen=math.log(length) / math.log(77) if power is None else power)
        images = draw_texts(pipe, [captions[at].text for at in numbers], numbers)
        shown |= {at: compare(read_image(image), scene(SPLIT, at)) for at, image in zip(numbers, images, strict=True)}
    mentions, families = [told.first_mentions() for told in captions], [at // ARRANGEMENTS for at in range(count)]
    return objects_numbers([shown[at] for at in range(count)], mentions, groups=families)


if __name__ == "__main__":
    count, rows = read_options(__doc__, prompts=100).prompts, {}
    for encoder in (ORIGINAL, "toy/debias-clip-sdxl"):
        pipe = pipeline_of(encoder)
        rows |= {(encoder, name): draw(pipe, power, count) for name, power in tqdm(POWERS.items(), encoder)}
    means = {
        name: fmean(row["objects_right"]["value"] for (_, of), row in rows.items() if of == name) for name in POWERS
    }
    chosen = next(name for name, mean in means.items() if mean >= max(means.values()) - WITHIN)
    cells = [[*key, *(f"{row[score]['value']:.1f}" for score in SCORES)] for key, row in rows.items()]
    table = Table(["encoder", "power", *SCORES.values()], cells)
    result = {"prompts": count, "rows": {", ".join(key): row for key, row in rows.items()}, "means": means}
    publish("power", result | {"chosen": chosen}, f"Chosen by the rule: {chosen}.", table)
