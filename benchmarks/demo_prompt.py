"""The scene in which the demo's encoders differ as they do on average, for its third example and its screenshots.

    python benchmarks/demo_prompt.py [--scenes 33]

Generates the image of each scene with every encoder, as the page does at its defaults (seed 0), and compares two shares
of each encoder with their means over all scenes: the scene's objects that it gets right, and unwanted ones for each
place that should be empty. The chosen scene is the one with the least sum of squared differences. Scores are kept in
benchmarks/results/demo_prompt.json after every scene, and scenes that are there are not generated again.
"""

from dataclasses import replace

import numpy as np
from harness import RESULTS, publish, read_options
from tqdm import tqdm

from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.demo.rendering import RenderedImage, render_request
from debias_diffusion.app.demo.request import Request
from debias_diffusion.app.demo.toy import random_scene
from debias_diffusion.app.options import AppConfig
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders import labels
from debias_diffusion.eval.report import Table
from debias_diffusion.files import read_json_object, write_json
from debias_diffusion.toyworld.checker import compare
from debias_diffusion.toyworld.scenes import PLACES


def scores(models: DemoModels, number: int, names: list[str]) -> dict[str, list[float]]:
    """By name, in the demo's order, the share of the objects that are right, and of the empty places filled."""
    scene = random_scene(number)
    items = render_request(models, replace(Request.default(models), prompt=scene.caption))
    seen = {item.label: compare(item.image, scene.scene) for item in items if isinstance(item, RenderedImage)}
    count, empty = len(scene.objects), len(PLACES) - len(scene.objects)
    shares = [[sum(seen[label].correct.values()) / count, len(seen[label].invented) / empty] for label in models.labels]
    return dict(zip(names, shares, strict=True))


def main() -> None:
    scenes, file = range(read_options(__doc__, scenes=33).scenes), RESULTS / "demo_prompt.json"
    config = AppConfig()
    names, by_scene = labels(config.specs), read_json_object(file).get("scenes", {})
    missing = [number for number in scenes if str(number) not in by_scene]
    models = DemoModels(config.base, config.encoders, pick_device("cpu")) if missing else None
    for number in tqdm(missing):
        by_scene[str(number)] = scores(models, number, names)
        write_json(file, {"scenes": by_scene})
    table = np.array([[by_scene[str(number)][name] for name in names] for number in scenes])
    means = table.mean(axis=0)  # [encoders, 2]
    differences = ((table - means) ** 2).sum(axis=(1, 2))  # [scenes]
    chosen = scenes[int(differences.argmin())]
    by_encoder = dict(zip(names, means.tolist(), strict=True))
    lines = [
        [name, *(f"{here:.0%} ({mean:.0%})" for here, mean in zip(by_scene[str(chosen)][name], of_name, strict=True))]
        for name, of_name in by_encoder.items()
    ]
    table = Table([f"scene {chosen} of {len(scenes)} (means)", "objects right", "empty places filled"], lines)
    publish("demo_prompt", {"scenes": by_scene, "means": by_encoder, "of": len(scenes), "chosen": chosen}, table)


if __name__ == "__main__":
    main()
