"""Images drawn from captions with several text encoders, against the originals and the captions (Table S7)."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

from debias_diffusion.data import BadRecord, ImageSource, Record, is_toy_scenes, toy_scene
from debias_diffusion.data.bad_records import read_or_bad
from debias_diffusion.errors import UserError
from debias_diffusion.files import sha256
from debias_diffusion.toyworld.scenes import ARRANGEMENTS

from ..common.cache import Parts
from ..common.encoders import check_encoders, labels
from ..common.inputs import check_batch_size, check_max_bad, check_output, check_share, print_left_out, read_pairs
from ..common.processes import Processes
from ..common.report import Table, compared_tables, show, write_report
from .drawing import Drawing, DrawingSettings, Subject, folder_names, how_drawn
from .figures import plot, plot_examples
from .scores import Originals, PictureNumbers, PictureScores, compare, score_cell, score_titles
from .toy_objects import SCORES as OBJECTS
from .toy_objects import compare_objects, objects_numbers, objects_right

NETWORKS = ("inception_weights", "dino", "dinov2", "own_features", "clip_score")
PICTURES = ("examples.png",)
EXAMPLES = 6  # prompts
NAME = "generation"


@dataclass
class GenerationConfig:
    """Settings of an evaluation of generated images.

    Attributes:
        encoders: Text encoders to compare, each in the place of SDXL's first one: training runs, folders, files, hub
            ids, toy/clip, toy/long-clip, toy/debias-clip; original is the base's own.
        base: SDXL folder in diffusers' layout, a hub id, or toy/sdxl.
        output: Folder for the results, `generation.json`, `generation.png` and `examples.png`, and for the generated
            images, `pictures/ENCODER/000000.png` and so on. Images that are finished there are kept, if they were made
            with the same settings.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world. Captions are the prompts, images the originals.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        limit: Use only the first so many pairs (1000 are ShareGPT4V's validation split). null uses all.
        seed: Image i starts from noise seeded with this number + i, the same for every encoder and on every device.
        steps: Denoising steps. auto is 30, and 20 for toy/sdxl.
        guidance_scale: How strongly prompts are followed; 1 is no guidance. auto is 7, as in `generate`, and 5 for
            toy/sdxl.
        images_at_once: Pictures drawn at once, of prompts of like length; more need more memory. auto is 1, and 20 for
            toy/sdxl.
        prefix: Put before each prompt; "photo, detailed, 8k. " in the paper's Figure S10.
        windows: Let encoders of 77 positions read long prompts in several windows, as this package's pipelines do.
            Without it they are cut at 77 tokens, as stock SDXL does.
        inception_weights: File of torch-fidelity's Inception weights, for FID, KID, precision and recall, or cache for
            the one that torch-fidelity has downloaded. Without it they are skipped.
        dino: Folder or hub id of DINO ViT-S/16 in transformers' layout (facebook/dino-vits16), for the DINO score.
            Without it the DINO score is skipped.
        dinov2: Folder or hub id of a DINOv2 in transformers' layout (facebook/dinov2-small), for the same of it.
        own_features: Network on whose CLS features FID, KID, precision and recall are computed besides: a folder of a
            transformers vision model, or toy/features. Its scores compare with nothing published.
        clip_score: CLIP model for CLIPScore, of the whole caption and sentence by sentence: a folder, file, hub id, or
            MODEL:PRETRAINED as open_clip names them.
        batch_size: Images scored at once.
        max_bad: Largest share of originals that may be unreadable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu; under `accelerate launch` each
            process has its own.
    """

    encoders: list[str]
    base: str
    output: str
    data: str
    images: str | None = None
    limit: int | None = 1000
    seed: int = 0
    steps: int | Literal["auto"] = "auto"
    guidance_scale: float | Literal["auto"] = "auto"
    images_at_once: int | Literal["auto"] = "auto"
    prefix: str = ""
    windows: bool = False
    inception_weights: str | None = None
    dino: str | None = None
    dinov2: str | None = None
    own_features: str | None = None
    clip_score: str | None = None
    batch_size: int = 32
    max_bad: float = 0.01
    device: str | None = None


def evaluate_generation(config: GenerationConfig) -> dict:
    """Draws an image of every caption with every encoder and scores them; writes what it finds and prints tables.

    A run that was killed continues with the images that are missing, and computes no score twice. Started by
    `accelerate launch` it draws with several processes, one a GPU, of which the main one scores. Originals that cannot
    be read are left out, and named.

    Returns:
        What `generation.json` holds: settings, versions, digests; by encoder its scores with their 95% intervals, how
        many prompts were cut, digest of its pictures, seconds of drawing; the encoders compared; notes, the resizes,
        the pairs left out, seconds. In processes other than the main one, nothing.

    Raises:
        UserError: a setting cannot be used; all are checked before the first image is drawn.
    """
    return _Generation(config, check_generation(config), Processes(config.device)).run()


def check_generation(config: GenerationConfig) -> DrawingSettings:
    """How pictures are drawn. Raises UserError for settings that cannot be used, whatever the data and the networks."""
    check_output(config.output)
    check_encoders(config.encoders)
    check_batch_size(config.batch_size)
    check_max_bad(config.max_bad)
    return DrawingSettings.of(config)


def load_networks(config: GenerationConfig, device: torch.device) -> PictureScores | None:
    """The networks that score pictures; None where the toy world's own score is all that is asked for.

    Raises:
        UserError: one cannot be loaded, or none is named.
    """
    networks = {name: getattr(config, name) for name in NETWORKS}
    if is_toy_scenes(config.data) and not any(networks.values()):
        return None
    return PictureScores(**networks, batch_size=config.batch_size, device=device)


class _Generation:
    """One evaluation. What is read and scored is in the main process alone."""

    def __init__(self, config: GenerationConfig, settings: DrawingSettings, processes: Processes):
        self.config, self.settings, self.processes = config, settings, processes
        self.output = Path(config.output)
        self.encoders = dict(zip(labels(config.encoders), config.encoders, strict=True))
        self.folders = {
            label: self.output / "pictures" / name for label, name in folder_names(list(self.encoders)).items()
        }
        self.parts = Parts(self.output / "parts")

    def run(self) -> dict:
        with self.processes.only_main_prints():
            subjects, digest = self.processes.from_main(self._read)
            drawing = Drawing(self.settings, self.processes, digest)
            drawing.check(self.encoders.values(), self.folders.values(), subjects)
            with self.processes.alone_in(self.output):
                pictures = {
                    label: drawing.draw(encoder, self.folders[label], subjects, label)
                    for label, encoder in self.encoders.items()
                }
                digests = drawing.digests
                del drawing  # and with it the models, whose memory the networks may need
                return self._report(pictures, digests) if self.processes.is_main else {}

    def _read(self) -> tuple[list[Subject], str]:
        """What to draw, and the digest of the data; the networks are loaded before hours of drawing, not after."""
        config = self.config
        self.is_toy = is_toy_scenes(config.data)
        self.scores = load_networks(config, self.processes.device)
        self.pairs = read_pairs(config.data, config.images, config.limit, config.max_bad)
        records, images = self.pairs.records, self.pairs.images
        good, self.unreadable = _with_readable_original(records, images)
        print_left_out(self.unreadable)
        needs_fid = config.inception_weights is not None or config.own_features is not None
        if len(good) < (2 if needs_fid else 1):
            raise UserError(
                f"{len(good)} of {len(records)} pairs have a readable original in {str(images.root)!r}; FID needs at "
                "least 2, other scores 1. Give the folder that the data file's image paths start from, or raise the "
                "limit."
            )
        check_share(self.unreadable, len(records), config.max_bad)
        self.records = [records[index] for index in good]
        subjects = [Subject(f"{index:06}", records[index].caption, index) for index in good]
        return subjects, self.pairs.digest

    @cached_property
    def _originals(self) -> Originals:
        return self.scores.of_originals([partial(_original, record, self.pairs.images) for record in self.records])

    @cached_property
    def _shown(self) -> str:
        """Changes with the captions, and where the originals' files could have changed."""
        total = hashlib.sha256()
        for record in self.records:
            total.update(self.pairs.images.stamp(record.image))
            total.update(record.caption.encode("utf-8", "surrogatepass") + b"\0")
        return total.hexdigest()

    def _score(self, pictures: Sequence[Path], digest: str) -> PictureNumbers:
        """What the networks say of one encoder's pictures."""
        if self.scores is None:
            return PictureNumbers({}, {}, {}, len(pictures))
        captions = [record.caption for record in self.records]
        depends = {"pictures": digest, "originals": self._shown, **self.scores.depends}
        kept = self.parts.result("scores", depends, lambda: asdict(self.scores(pictures, self._originals, captions)))
        return PictureNumbers(**kept)

    def _objects(self, pictures: Sequence[Path], digest: str) -> list[dict[str, bool]]:
        """Which objects of the toy world are right on one encoder's pictures."""
        scenes = [toy_scene(record)[0] for record in self.records]
        depends = {"pictures": digest, "originals": self._shown}
        return self.parts.result("objects", depends, lambda: {"right": objects_right(pictures, scenes)})["right"]

    def _report(self, pictures: Mapping[str, Sequence[Path]], digests: dict) -> dict:
        found, right, encoders = {}, {}, {}
        told = [toy_scene(record)[1].first_told() for record in self.records] if self.is_toy else []
        for label, files in pictures.items():
            digest = _pictures_digest(files)
            found[label] = self._score(files, digest)
            numbers = dict(found[label].numbers)
            if self.is_toy:
                right[label] = self._objects(files, digest)
                numbers |= objects_numbers(right[label], told)
            encoders[label] = {"scores": numbers, **how_drawn(self.folders[label]), "pictures": digest}
        notes = [*(self.scores.notes if self.scores else ()), *_reading_notes(encoders, len(self.records))]
        notes += [note for its in found.values() for note in its.notes]
        networks = self.scores.digests if self.scores else dict.fromkeys(NETWORKS)
        report = write_report(
            NAME,
            self.config,
            digests={
                "data": self.pairs.digest,
                "base": digests["base"],
                **networks,
                "encoders": {
                    label: digests["encoders"][name] or digests["base"] for label, name in self.encoders.items()
                },
            },
            left_out=self.pairs.bad + self.unreadable,
            seconds=self.parts.seconds + sum(its["seconds"] for its in encoders.values()),
            drawing=asdict(self.settings),
            images=len(self.records),
            resize=self.scores.resize if self.scores else {},
            encoders=encoders,
            compared=_compared(found, right, told),
            notes=list(dict.fromkeys(notes)),
        )
        show(report, tables(report), figures(report) | {PICTURES[0]: self._examples(pictures)})
        return report

    def _examples(self, pictures: Mapping[str, Sequence[Path]]) -> Figure:
        step = ARRANGEMENTS if self.is_toy else 1  # toy scenes in a row show the same objects
        shown = range(0, len(self.records), step)[:EXAMPLES]
        return plot_examples(
            [self.records[place].caption for place in shown],
            [_original(self.records[place], self.pairs.images) for place in shown],
            {label: [files[place] for place in shown] for label, files in pictures.items()},
        )


def _with_readable_original(records: Sequence[Record], images: ImageSource) -> tuple[list[int], list[BadRecord]]:
    """The positions of the records whose original can be decoded, and the others by name."""
    good, bad = [], []
    for index, record in enumerate(tqdm(records, desc="check originals")):
        image = read_or_bad(record, images.open)
        if isinstance(image, BadRecord):
            bad.append(image)
        else:
            good.append(index)
    return good, bad


def _original(record: Record, images: ImageSource) -> Image.Image:
    """A record's image, which could be read when the evaluation began. Raises UserError when it no longer can."""
    image = read_or_bad(record, images.open)
    if isinstance(image, BadRecord):
        raise UserError(
            f"An image that could be read at the start cannot be read now: {image}. Start the same command again, "
            "which leaves out what it cannot read, and leave the images as they are meanwhile."
        )
    return image


def _pictures_digest(files: Sequence[Path]) -> str:
    return hashlib.sha256("\n".join(map(sha256, files)).encode()).hexdigest()


def _compared(
    found: Mapping[str, PictureNumbers], right: Mapping[str, list[dict[str, bool]]], told: Sequence[dict[str, int]]
) -> list[dict]:
    """Every two encoders, the later one against the earlier, by every score."""
    compared = []
    for b, a in combinations(found, 2):
        differences = compare(found[a], found[b])
        if right:
            differences |= compare_objects(right[a], right[b], told)
        compared += [{"a": a, "b": b, "score": score, **numbers} for score, numbers in differences.items()]
    return compared


def _reading_notes(encoders: Mapping[str, dict], count: int) -> list[str]:
    return [
        f"{label} was given the first {its['cut_at']} tokens of a prompt, as stock SDXL does: {its['prompts_cut']} of "
        f"{count} were cut."
        for label, its in encoders.items()
        if its["cut_at"] is not None
    ]


def titles(report: dict) -> dict[str, str]:
    """The scores' names for readers; they name the networks, which decide what a number compares with."""
    settings = report["settings"]
    known = score_titles(**{name: settings[name] for name in NETWORKS if name != "inception_weights"}) | OBJECTS
    for its in report["encoders"].values():
        for score in its["scores"]:
            if score.startswith("clip_score_"):
                known[score] = f"{known['clip_score']}, sentence {score.rpartition('_')[2]}"
    return known


def _single(scores: Mapping) -> dict[str, dict]:
    """The scores that are one number with its interval."""
    return {name: number for name, number in scores.items() if isinstance(number, dict)}


def tables(report: dict) -> list[Table]:
    """A report's scores with their 95% intervals, and the encoders compared."""
    names, encoders = titles(report), report["encoders"]
    scores = dict.fromkeys(score for its in encoders.values() for score in _single(its["scores"]))
    rows = [[names[score], *(_cell(its["scores"].get(score)) for its in encoders.values())] for score in scores]
    rows.append(["prompts cut", *(its["prompts_cut"] for its in encoders.values())])
    rows.append(["seconds of drawing", *(f"{its['seconds']:.0f}" for its in encoders.values())])
    found = [Table([f"{report['images']} images, with 95% intervals", *encoders], rows)]
    # Sentence by sentence they would hide the others; the JSON has them.
    shown = [line for line in report["compared"] if not line["score"].startswith("clip_score_")]
    return found + compared_tables([_readable(line, names) for line in shown])


def _readable(line: dict, names: Mapping[str, str]) -> dict:
    """With three digits that count, because some scores are in thousandths."""
    digits = {name: None if line[name] is None else f"{line[name]:.3g}" for name in ("difference", "low", "high")}
    return line | digits | {"score": names[line["score"]]}


def _cell(number: dict | None) -> str | None:
    return number and score_cell(number)


def figures(report: dict) -> dict[str, Figure]:
    """The picture of a report, by its file's name."""
    return {f"{NAME}.png": plot(report["encoders"], titles(report))}
