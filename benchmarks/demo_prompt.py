"""The scene in which the demo's encoders differ as they do on average, for its third example and its screenshots.

    python benchmarks/demo_prompt.py [--scenes 33]

Generates the image of each scene with every encoder, as the page does at its defaults (seed 0), and compares two shares
of each encoder with their means over all scenes: the scene's objects that it gets right, and unwanted ones for each
place that should be empty. The chosen scene is the one with the least sum of squared differences. Writes
benchmarks/results/demo_prompt.json.
"""

from dataclasses import replace

import numpy as np
from harness import publish, read_options
from tqdm import tqdm

from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.demo.rendering import RenderedImage, render_request
from debias_diffusion.app.demo.request import Request, demo_scene
from debias_diffusion.app.prompt_options import AppConfig
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders.spec import labels
from debias_diffusion.eval.report import Table
from debias_diffusion.toyworld.checker import compare, read_image
from debias_diffusion.toyworld.scenes import PLACES


def scores(models: DemoModels, number: int) -> list[list[float]]:
    """[encoders, 2], in the demo's order: the share of the objects that are right, and of the empty places filled."""
    scene, caption = demo_scene(number)
    items = render_request(models, replace(Request.default(models), prompt=caption.text))
    seen = {item.label: compare(read_image(item.image), scene) for item in items if isinstance(item, RenderedImage)}
    count, empty = len(scene.things), len(PLACES) - len(scene.things)
    return [[sum(seen[label].correct.values()) / count, len(seen[label].invented) / empty] for label in models.labels]


def main() -> None:
    config, count = AppConfig(), read_options(__doc__, scenes=33).scenes
    models, names = DemoModels(config.base, config.encoders, pick_device("cpu")), labels(config.specs)
    table = np.array([scores(models, number) for number in tqdm(range(count))])  # [scenes, encoders, 2]
    means = table.mean(axis=0)
    chosen = int(((table - means) ** 2).sum(axis=(1, 2)).argmin())
    by_scene = {number: dict(zip(names, row.tolist(), strict=True)) for number, row in enumerate(table)}
    lines = [
        [name, *(f"{here:.0%} ({mean:.0%})" for here, mean in zip(*numbers, strict=True))]
        for name, *numbers in zip(names, table[chosen], means, strict=True)
    ]
    measured = {"scenes": by_scene, "means": dict(zip(names, means.tolist(), strict=True)), "of": count}
    shown = Table([f"scene {chosen} of {count} (means)", "objects right", "empty places filled"], lines)
    publish("demo_prompt", measured | {"chosen": chosen}, shown)


if __name__ == "__main__":
    main()
