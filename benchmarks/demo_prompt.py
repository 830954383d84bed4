"""The scene in which the demo's encoders differ as they do on average, for its third example and its screenshots.

    python benchmarks/demo_prompt.py [--scenes 33]

Generates the image of each scene with every encoder, as the page does at its defaults (seed 0), and compares two shares
of each encoder with their means over all scenes: the scene's objects that it gets right, and unwanted ones for each
place that should be empty. The chosen scene is the one with the least sum of squared differences. Scores are kept in
benchmarks/results/demo_prompt.json after every scene, and scenes that are there are not generated again.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from debias_diffusion.app.demo.live_generation import Drawn, draw
from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.demo.toy_scenes import mark, random_scene
from debias_diffusion.app.options import AppConfig
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders import labels
from debias_diffusion.files import read_json_object, write_json
from debias_diffusion.toyworld.scenes import PLACES

RESULTS = Path(__file__).parent / "results" / "demo_prompt.json"


def scores(models: DemoModels, number: int) -> dict[str, list[float]]:
    """By label, the share of the scene's objects that are right, and of its empty places that are filled."""
    scene = random_scene(number)
    drawing = draw(models, replace(models.defaults, prompt=scene.caption), lambda: False)
    marks = {item.label: mark(scene, item.image) for item in drawing if isinstance(item, Drawn)}
    empty = len(PLACES) - len(scene.objects)
    return {
        label: [np.mean([item.correct for item in each.objects]), len(each.invented) / empty]
        for label, each in marks.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=33)
    scenes = range(parser.parse_args().scenes)
    config = AppConfig()
    names, by_scene = labels(config.specs), read_json_object(RESULTS).get("scenes", {})
    missing = [number for number in scenes if str(number) not in by_scene]
    models = DemoModels(config.base, config.encoders, pick_device("cpu")) if missing else None
    for number in tqdm(missing):
        by_scene[str(number)] = scores(models, number)
        write_json(RESULTS, {"scenes": by_scene})
    table = np.array([[by_scene[str(number)][name] for name in names] for number in scenes])
    means = table.mean(axis=0)  # [encoders, 2]
    differences = ((table - means) ** 2).sum(axis=(1, 2))  # [scenes]
    chosen = scenes[int(differences.argmin())]
    by_encoder = dict(zip(names, means.tolist(), strict=True))
    write_json(RESULTS, {"scenes": by_scene, "means": by_encoder, "of": len(scenes), "chosen": chosen})
    print(f"Scene {chosen} of {len(scenes)}: objects right, empty places filled (means over all scenes)")
    for label, (right, filled) in zip(names, means, strict=True):
        here = by_scene[str(chosen)][label]
        print(f"{label:32} {here[0]:.0%} ({right:.0%}), {here[1]:.0%} ({filled:.0%})")


if __name__ == "__main__":
    main()
