"""`python -m research referring`: images of captions that refer back, scored by how a caption mentions each object."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.eval.images.generation import evaluate_generation
from debias_diffusion.eval.images.objects import compare_images, count, numbers_of_places, places_of
from debias_diffusion.eval.images.rendered import FOLDER, folder_names
from debias_diffusion.eval.options import GenerationConfig
from debias_diffusion.eval.report import Table, cell
from debias_diffusion.files import write_json
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint
from debias_diffusion.toyworld.grammar import Caption

from .mentions import ACROSS, ALL, ALONE, READERS, WITHIN, Mention, ceilings, read_caption

BY_KIND = "objects_right_by_telling"
# By kind of mention: what is added to the names of the counts of these objects.
KIND_NAMES = {ALONE: "alone", WITHIN: "within_chunk", ACROSS: "across_cut"}
RESULTS = "referring.json"


def evaluate_referring(config: GenerationConfig) -> dict:
    """Generates and scores images as `evaluate generation` does, and scores objects by kind of mention, too.

    Returns:
        What `evaluate_generation` returns, with "ceilings", see `mentions.ceilings`, and of each encoder further
        "scores": "objects_right_by_telling", a list with an entry for each kind of mention: "told", the kind,
        "objects", their number, "value", "low" and "high" of the objects right, and "precision" and "f1"; and of each
        kind objects right and all objects "by_image". It is written to referring.json.
    """
    report = evaluate_generation(config)
    if not report:  # in processes other than the main one
        return report
    scenes, captions = zip(*map(toy_scene, report["records"]["image"]), strict=True)
    readings = _read(config, captions)
    kinds = [{place: mention.kind for place, mention in reading.items()} for reading in readings]
    places = {kind: found for kind in KIND_NAMES if any(found := places_of(kinds, kind.__eq__))}
    report["ceilings"] = ceilings(readings)
    for label, folder in folder_names(list(report["encoders"])).items():
        seen = compare_images(sorted(Path(config.output, FOLDER, folder).glob("*.png"))[: len(scenes)], scenes)
        numbers, groups = report["encoders"][label], report["records"]["group"]
        numbers["scores"][BY_KIND] = [
            {"told": kind} | numbers_of_places(seen, of_kind, groups) for kind, of_kind in places.items()
        ]
        for kind, of_kind in places.items():
            counts = {name: part.astype(int).tolist() for name, part in count(seen, of_kind).items()}
            line = {"above": counts["right"], "below": counts["objects"]}
            numbers["by_image"][f"objects_right_{KIND_NAMES[kind]}"] = line
    write_json(Path(config.output, RESULTS), report)
    print("\n" + table(report).markdown())
    return report


def _read(config: GenerationConfig, captions: Sequence[Caption]) -> list[dict[str, Mention]]:
    """How the prompts mention their objects."""
    tokenizer = Checkpoint.parse(config.base).tokenizer("text_encoder")

    @cache  # sentences repeat
    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    readings = []
    for caption in captions:
        first, *further = caption.sentences
        prefixed = Caption((replace(first, text=config.prefix + first.text), *further))
        readings.append(read_caption(prefixed, count_tokens))
    return readings


def table(report: dict) -> Table:
    """Objects by how they are mentioned, beside what a symbolic reader can know at most."""
    scores, rows = [numbers["scores"] for numbers in report["encoders"].values()], []
    for line in report["ceilings"]:
        numbers = [of_encoder["objects_right"] for of_encoder in scores]
        if line["told"] != ALL:
            numbers = [next(n for n in of_encoder[BY_KIND] if n["told"] == line["told"]) for of_encoder in scores]
        cells = (cell(number["value"], number["low"], number["high"], form=".3g") for number in numbers)
        rows.append([line["told"], line["objects"], *(f"{line[reader]:.1f}" for reader in READERS), *cells])
    readers = (f"symbolic reader, {title}" for title in READERS.values())
    return Table(["objects right, %, by how they are told", "objects", *readers, *report["encoders"]], rows)
