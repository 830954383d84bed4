"""Length apart from content, and captions without place words: what more tokens cost, and what `sharpen` mends.

    python -m research.studies.length [--seeds 43 44 45] [--prompts 60] [--power 2]

- Filler: three objects in five sentences of 77 positions, and true sentences about the background and empty places
  between them, which say nothing new, until the prompt takes 152, 227, 302 or 527 positions.
- Facts: three, five, seven or nine objects, each in a sentence, with the summary and the background alone.
- Relations: four to six objects of different names, of which every pair is told apart in one sentence, such as "The red
  star stands above the blue ring." No place is named. A sentence is right if the image shows both things anywhere, and
  as it says. "Found": of the objects, those that the image shows anywhere.

Each with attention as it is and with `sharpen`. Intervals are paired, over prompts. Writes research/results/length.md
and .json.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, count
from typing import NamedTuple

import torch
from PIL import Image

from debias_diffusion.encoders.spec import ORIGINAL
from debias_diffusion.eval.intervals import paired_ratio_difference
from debias_diffusion.eval.report import Table
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld import grammar
from debias_diffusion.toyworld.checker import compare, read_image
from debias_diffusion.toyworld.scenes import PLACES, Scene, Thing, draw_scene, generator

from .drawing import draw_texts, pipeline_of
from .harness import publish, read_options

LENGTHS, COUNTS = (77, 152, 227, 302, 527), (3, 5, 7, 9)
# By a word of the sentence, where the first thing stands.
SIDES = {"left": "left", "right": "right", "above": "above", "higher": "above", "below": "below", "lower": "below"}


class Told(NamedTuple):
    """A scene, what is said of it, and of each pair that is told apart "left", "right", "above" or "below"."""

    scene: Scene
    text: str
    relations: list[tuple[Thing, Thing, str]] = []  # noqa: RUF012 - never changed


def with_filler(pipe, split: str, at: int, positions: int) -> Told:
    rng = generator(split, at, "filler")
    things = draw_scene(rng, 3, 3)
    sentences = [sentence.text for sentence in grammar.full_caption(things, rng).sentences]
    empty = PLACES.keys() - {thing.place for thing in things.things}
    filler = [wording.format(place) for wording in grammar._EMPTY for place in sorted(empty)]
    filler += [wording.format(things.background) for wording in grammar._BACKGROUNDS]
    longer = sentences
    while positions > LENGTHS[0] and pipe.prompt_layout(clean(" ".join(longer))).positions <= positions:
        sentences, longer = longer, added(longer, filler, rng)
    return Told(things, " ".join(sentences))


def added(sentences: list[str], filler: list[str], rng: random.Random) -> list[str]:
    """With one more, anywhere behind the summary."""
    at = rng.randint(1, len(sentences))
    return [*sentences[:at], rng.choice(filler), *sentences[at:]]


def facts(split: str, at: int, objects: int) -> Told:
    rng = generator(split, at, f"{objects} facts")
    things = draw_scene(rng, objects, objects)
    return Told(things, grammar.full_caption(things, rng).text)


def related(split: str, at: int) -> Told:
    rng = generator(split, at, "relations")
    scene = next(
        scene
        for scene in (draw_scene(rng) for _ in count())
        if len({(thing.kind, thing.colour) for thing in scene.things}) == len(scene.things)
    )
    told = [relation(scene, *rng.sample(pair, 2), rng) for pair in combinations(scene.things, 2)]
    rng.shuffle(told)
    text = " ".join([grammar._summary(scene, rng).text, *(sentence for sentence, _ in told)])
    return Told(scene, text, [relation for _, relation in told])


def relation(scene: Scene, a: Thing, b: Thing, rng: random.Random) -> tuple[str, tuple[Thing, Thing, str]]:
    """A sentence that says where one thing stands beside another, and what it says."""
    of_one_size = (replace(thing, size="small") for thing in (a, b))  # or the sentence could be about their sizes
    text = grammar._relation(scene, *of_one_size, rng).text
    return text, (a, b, next(side for word, side in SIDES.items() if word in text))


def holds(seen: list[Thing], a: Thing, b: Thing, side: str) -> bool:
    """Whether some things of these names stand so."""
    places = [
        [PLACES[each.place] for each in seen if (each.kind, each.colour) == (of.kind, of.colour)] for of in (a, b)
    ]
    axis, sign = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}[side]
    return any(sign * (one[axis] - other[axis]) > 0 for one in places[0] for other in places[1])


def counts(image: Image.Image, told: Told) -> dict[str, tuple[int, int]]:
    """By score, how many are right, and of how many."""
    reading = read_image(image)
    if not told.relations:
        correct = compare(reading, told.scene).correct
        return {"objects right, %": (sum(correct.values()), len(correct))}
    seen = [thing for thing in reading.objects.values() if isinstance(thing, Thing)]
    names, things = {(thing.kind, thing.colour) for thing in seen}, told.scene.things
    found = sum((thing.kind, thing.colour) in names for thing in things)
    right = sum(holds(seen, *relation) for relation in told.relations)
    return {"relations right, %": (right, len(told.relations)), "found, %": (found, len(things))}


def rows(pipe, seeds: list[int], prompts: int, power: float) -> Iterator[dict]:
    kinds = {f"filler, {length} positions": partial(with_filler, pipe, positions=length) for length in LENGTHS}
    kinds |= {f"{number} objects": partial(facts, objects=number) for number in COUNTS}
    for name, tell in (kinds | {"relations": related}).items():
        told = [tell(f"test-{seed}", at) for seed in seeds for at in range(prompts)]
        lengths = [pipe.prompt_layout(clean(each.text)).positions for each in told]
        # In the order of their lengths, so that those that are drawn together share theirs.
        order = sorted(range(len(told)), key=lengths.__getitem__)
        scored = []
        for sharpen in (1.0, power):
            images = draw_texts(pipe.set_long_prompt(sharpen=sharpen), [told[at].text for at in order], order)
            scored.append([counts(image, told[at]) for image, at in zip(images, order, strict=True)])
        pipe.set_long_prompt()
        for score in scored[0][0]:
            (above, below), (sharper, _) = (zip(*(each[score] for each in part), strict=True) for part in scored)
            yield {
                "prompts": name,
                "positions": [min(lengths), max(lengths)],
                "score": score,
                "plain": 100 * sum(above) / sum(below),
                "sharpened": 100 * sum(sharper) / sum(below),
                "counts": {"of": below, "plain": above, "sharpened": sharper},
                **paired_ratio_difference(*(([100 * right for right in part], below) for part in (sharper, above))),
            }


if __name__ == "__main__":
    options = read_options(__doc__, seeds=[43, 44, 45], prompts=60, power=2.0)
    with torch.no_grad():
        found = [*rows(pipeline_of(ORIGINAL), options.seeds, options.prompts, options.power)]
    cells = [
        [
            *(row["prompts"], "-".join(map(str, dict.fromkeys(row["positions"]))), row["score"]),
            *(f"{row['plain']:.1f}", f"{row['sharpened']:.1f}"),
            "{difference:+.1f} ({low:+.1f} to {high:+.1f})".format(**row),
        ]
        for row in found
    ]
    titles = ["prompts", "positions", "score", "plain", f"sharpen {options.power:g}", "difference (95%)"]
    publish("length", vars(options) | {"rows": found}, Table(titles, cells))
