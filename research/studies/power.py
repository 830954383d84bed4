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
from debias_diffusion.eval.report import Table
from debias_diffusion.text.tokens import clean

from .drawing import SCORES, LongPrompts, draw_texts, pipeline_of
from .harness import publish, read_options

SPLIT, WITHIN = "development", 1.0
GROWING = "log N / log 77"
POWERS = {"1": 1.0, "1.25": 1.25, GROWING: None, "1.5": 1.5, "2": 2.0, "3": 3.0}  # from the smallest


def draw(pipe, power: float | None, prompts: LongPrompts) -> dict:
    """The prompts' scores. Those of a length are drawn together."""
    texts, images = prompts.texts, {}
    lengths = [pipe.prompt_layout(clean(text)).positions for text in texts]
    for length in sorted({*lengths}):
        numbers = [at for at in range(len(texts)) if lengths[at] == length]
        pipe.set_long_prompt(sharpen=math.log(length) / math.log(77) if power is None else power)
        images |= dict(zip(numbers, draw_texts(pipe, [texts[at] for at in numbers], numbers), strict=True))
    return prompts.scores(prompts.read([images[at] for at in range(len(texts))]))


if __name__ == "__main__":
    count, rows = read_options(__doc__, prompts=100).prompts, {}
    prompts = LongPrompts([SPLIT], count)
    for encoder in (ORIGINAL, "toy/debias-clip-sdxl"):
        pipe = pipeline_of(encoder)
        rows |= {(encoder, name): draw(pipe, power, prompts) for name, power in tqdm(POWERS.items(), encoder)}
    means = {
        name: fmean(row["objects_right"]["value"] for (_, of), row in rows.items() if of == name) for name in POWERS
    }
    chosen = next(name for name, mean in means.items() if mean >= max(means.values()) - WITHIN)
    cells = [[*key, *(f"{row[score]['value']:.1f}" for score in SCORES)] for key, row in rows.items()]
    table = Table(["encoder", "power", *SCORES.values()], cells)
    result = {"prompts": count, "rows": {", ".join(key): row for key, row in rows.items()}, "means": means}
    publish("power", result | {"chosen": chosen}, f"Chosen by the rule: {chosen}.", table)
