"""Images generated from captions with several text encoders, and their scores (Table S7)."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import combinations
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

from debias_diffusion.data.bad_records import BadRecord, check_share, print_left_out, printable, read_or_bad
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.data.sources import is_toy_scenes
from debias_diffusion.data.toy_scenes import family, toy_scene
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import bytes_digest, sha256
from debias_diffusion.pipelines.rendering.prompts import ImageTask
from debias_diffusion.processes import Processes
from debias_diffusion.toyworld.checker import Comparison

from ..intervals import first_of_each
from ..options import GenerationConfig
from ..report import Table, cell, compared_tables, draw_curves, error_lengths
from ..session import Session, read_source
from .networks import FID_FEATURES, load_image
from .objects import BY_SENTENCE, compare_images, compare_objects, objects_numbers, sums_by_image
from .objects import NOTE as OBJECTS_NOTE
from .objects import SCORES as OBJECTS
from .rendered import Rendered, image_task, render_all, rendering_settings
from .scores import NETWORKS, ImageNumbers, ImageScores, References, compare_scores, network_name

NAME = "generation"
EXAMPLES = 6  # prompts
OF_SENTENCE = "clip_score_"  # begins the names of scores of one sentence each, before its number
_COLUMNS = 4  # of the figure
_SHOWN = 300  # pixels of an example's longer side
_MOST_CHARACTERS = 520  # of a prompt beside its images


def evaluate_generation(config: GenerationConfig) -> dict:
    """Generates an image from every caption with every encoder and scores them; writes a report and prints tables.

    A killed run continues with the missing images, and computes no score twice. Started by `accelerate launch` it
    generates in several processes, one on each GPU; the main one scores. Pairs with an unreadable reference image are
    skipped and reported.

    Returns:
        The content of `generation.json`: settings, versions, digests; "records", name and group of each image; by
        encoder its scores with 95% intervals, "by_image", each image's value of a mean, or its counts above and below
        the line of a ratio, in the order of the records, how many prompts were cut, the digest of its images, seconds
        of generating; the encoders compared; notes, the resizes, the bad records, seconds. In processes other than the
        main one, {}.

    Raises:
        UserError: the data or a model cannot be used; all are checked before the first image is generated.
    """
    evaluation = _Generation(config, Processes.connect(config.device))
    processes = evaluation.processes
    with processes.only_main_prints():
        rendered, digests = render_all(config, processes, processes.from_main(evaluation.read))
        return evaluation.report(rendered, digests) if processes.is_main else {}


def load_networks(config: GenerationConfig, device: torch.device) -> ImageScores:
    """The networks that score images; there may be none for the toy world, which has scores of its own.

    Raises:
        UserError: a network cannot be loaded, or none is named.
    """
    networks = {name: getattr(config, name) for name in NETWORKS}
    if not any(networks.values()) and not is_toy_scenes(config.data):
        raise UserError(
            f"None of {', '.join(NETWORKS)} is given, which leaves no score. Give at least one, such as --dino "
            "facebook/dino-vits16."
        )
    return ImageScores(networks, config.batch_size, device)


class _Generation:
    """One evaluation. Only the main process reads and reports."""

    def __init__(self, config: GenerationConfig, processes: Processes):
        self.config, self.processes, self.is_toy = config, processes, is_toy_scenes(config.data)

    def read(self) -> list[ImageTask]:
        """The images to generate."""
        config = self.config
        self.drawing = rendering_settings(config)
        load_networks(config, torch.device("cpu"))  # what cannot be loaded should not stop it after hours of generating
        self.pairs = read_source(config, config.labelled, config.held_out, beside=config.second_encoders)
        records, images = self.pairs.records, self.pairs.images
        unreadable, good = check_images(records, images)
        print_left_out(unreadable)
        needs_fid = config.inception_weights is not None or config.own_features is not None
        if len(good) < (2 if needs_fid else 1):
            raise UserError(
                f"{len(good)} of {len(records)} pairs have a readable reference image in {str(images.root)!r}; FID "
                "needs at least 2, other scores 1. Give the folder that the data file's image paths start from, or "
                "raise the limit."
            )
        check_share(unreadable, len(records), config.max_bad)
        self.records = [records[index] for index in good]
        self.captions = [record.caption for record in self.records]
        self.names = [printable(record.image) for record in self.records]  # those in shards may be no UTF-8
        self.groups = [*map(family, self.names)]
        self.session = Session(NAME, config, self.pairs, self.processes.device)
        self.session.left_out += unreadable
        return [image_task(config, f"{index:06}", records[index].caption, index) for index in good]

    def report(self, rendered: Mapping[str, Rendered], digests: dict) -> dict:
        networks, session = load_networks(self.config, self.processes.device), self.session
        scenes, captions = (
            zip(*(toy_scene(record.image) for record in self.records), strict=True) if self.is_toy else ((), ())
        )
        mentions = [caption.first_mentions() for caption in captions]
        # Of the captions, and of what shows that the files of the reference images have changed.
        references_digest = bytes_digest(
            self.pairs.images.stamp(record.image) + record.caption.encode("utf-8", "surrogatepass") + b"\0"
            for record in self.records
        )
        images_of_pairs = [partial(_reference, record, self.pairs.images) for record in self.records]

        @cache
        def references() -> References:
            return networks.of_references(images_of_pairs, self.captions, self.groups)

        def score_images(files: Sequence[Path]) -> dict:
            return asdict(networks(files, references()))

        def read_images(files: Sequence[Path]) -> dict:
            return {"images": [*map(asdict, compare_images(files, scenes))]}

        scores, objects, encoders = {}, {}, {}
        for label, images in rendered.items():
            digest = bytes_digest(["\n".join(map(sha256, images.files)).encode()])
            depends = {"images": digest, "references": references_digest}
            of_scores = depends | {"networks": networks.digests, "groups": self.groups}
            result = session.cache.result("scores", of_scores, partial(score_images, images.files))
            scores[label] = ImageNumbers(**result)
            numbers, by_image = dict(scores[label].numbers), dict(scores[label].by_image)
            if self.is_toy:
                result = session.cache.result("objects", depends, partial(read_images, images.files))
                objects[label] = [Comparison(**image) for image in result["images"]]
                numbers |= objects_numbers(objects[label], mentions, self.groups)
                for score, (above, below) in sums_by_image(objects[label], mentions).items():
                    by_image[score] = {"above": above.astype(int).tolist(), "below": below.astype(int).tolist()}
            encoders[label] = {"scores": numbers, **images.reading, "images_digest": digest, "by_image": by_image}
        compared = []
        for b, a in combinations(rendered, 2):
            differences = compare_scores(scores[a], scores[b])
            if self.is_toy:
                differences |= compare_objects(objects[a], objects[b], mentions, self.groups)
            compared += [{"a": a, "b": b, "score": score, **numbers} for score, numbers in differences.items()]
        notes = [
            f"{label} read the first {numbers['cut_at']} tokens of a prompt: {numbers['prompts_cut']} of "
            f"{len(self.records)} were cut."
            for label, numbers in encoders.items()
            if numbers["cut_at"] is not None
        ]
        notes = networks.notes + notes + [note for label in rendered for note in scores[label].notes]
        notes += [OBJECTS_NOTE] * self.is_toy
        session.digests |= networks.digests | digests
        shown = first_of_each(self.groups)[:EXAMPLES]  # scenes of one family show the same objects
        columns = {"reference image": images_of_pairs} | {label: images.files for label, images in rendered.items()}
        examples = {title: [load_image(images[index]) for index in shown] for title, images in columns.items()}
        return session.report(
            tables,
            figures,
            encoders,
            compared,
            list(dict.fromkeys(notes)),
            saved={"examples.png": plot_examples([self.captions[index] for index in shown], examples)},
            seconds=session.cache.seconds + sum(numbers["seconds"] for numbers in encoders.values()),
            drawing=self.drawing,
            images=len(self.records),
            records={"image": self.names, "group": self.groups},
            resize=networks.resize,
        )


def check_images(records: Sequence[Record], images: ImageSource) -> tuple[list[BadRecord], list[int]]:
    """The bad records, whose image cannot be decoded, and the positions of the others."""
    bad, good = [], []
    for index, record in enumerate(tqdm(records, desc="check reference images")):
        image = read_or_bad(record, images.open)
        if isinstance(image, BadRecord):
            bad.append(image)
        else:
            good.append(index)
    return bad, good


def _reference(record: Record, images: ImageSource) -> Image.Image:
    """The image of a record that was readable when the evaluation began. Raises UserError if it no longer is."""
    advice = "Start the same command again, which skips unreadable images, and do not change the images meanwhile."
    with explain_failure(f"The reference image {printable(record.image)!r} cannot be read any more", advice):
        return images.open(record.image)


def titles(report: dict) -> dict[str, str]:
    """Titles of the scores. They name the network, which decides what a number can be compared with."""
    features, dino, dinov2, clip = (
        network_name(report["settings"].get(option)) for option in ("own_features", "dino", "dinov2", "clip_score")
    )
    distances = {"fid": "FID", "kid": "KID", "precision": "precision", "recall": "recall"}
    known = {f"{score}_2048": title for score, title in distances.items()}
    known |= {f"{score}_own": f"{title} ({features})" for score, title in distances.items()}
    known |= {f"fid_{count}": f"FID ({count})" for count in FID_FEATURES}
    known |= {"dino_score": f"DINO score ({dino})", "dinov2_score": f"DINOv2 score ({dinov2})"}
    known["clip_score"] = f"CLIPScore ({clip})"
    for score in _single(report):
        if score.startswith(OF_SENTENCE):
            known[score] = f"{known['clip_score']}, sentence {score.removeprefix(OF_SENTENCE)}"
    return known | {score: title for score, (title, *_) in OBJECTS.items()}


def tables(report: dict) -> list[Table]:
    """A report's scores with their 95% intervals, objects by sentence, and the encoders compared."""
    names, encoders = titles(report), report["encoders"]
    rows = [
        [names[score], *(_cell(numbers["scores"].get(score)) for numbers in encoders.values())]
        for score in _single(report)
    ]
    rows.append(["prompts cut", *(numbers["prompts_cut"] for numbers in encoders.values())])
    rows.append(["seconds of generating", *(f"{numbers['seconds']:.0f}" for numbers in encoders.values())])
    scores = Table([f"{report['images']} images, with 95% intervals", *encoders], rows)
    # Without those of single sentences, which are in the JSON: they would hide the others.
    shown = [line for line in report["compared"] if not line["score"].startswith(OF_SENTENCE)]
    compared = compared_tables(shown, names, form=".3g")  # some scores are in thousandths
    return [scores, *_by_sentence(encoders), *compared]


def _single(report: dict) -> list[str]:
    """The scores of one number, not a list."""
    every = [score for numbers in report["encoders"].values() for score in numbers["scores"].items()]
    return list(dict.fromkeys(name for name, number in every if isinstance(number, dict)))


def _cell(number: dict | None) -> str | None:
    return number and cell(number["value"], number["low"], number["high"], form=".3g")


def _by_sentence(encoders: Mapping[str, dict]) -> list[Table]:
    """The table of objects by the sentence that first mentions them; none of images of other worlds."""
    lists = [numbers["scores"].get(BY_SENTENCE) for numbers in encoders.values()]
    if None in lists:
        return []

    def shares(line: dict) -> str:
        return " / ".join(
            f"{number['value']:.1f}" if number else "-" for number in (line, line["precision"], line["f1"])
        )

    header = ["objects right / precision / F1, %, by the sentence that first mentions them", "objects", *encoders]
    lines = zip(*lists, strict=True)
    return [Table(header, [[line[0]["sentence"], line[0]["objects"], *map(shares, line)] for line in lines])]


def figures(report: dict) -> dict[str, Figure]:
    """By file name: every score with its 95% interval, a row for each encoder; below, scores by sentence."""
    scores = {label: numbers["scores"] for label, numbers in report["encoders"].items()}
    names, labels = titles(report), list(scores)
    single = [name for name in _single(report) if not name.startswith(OF_SENTENCE)]
    series = _series(scores, names)
    rows, row_height = -(-len(single) // _COLUMNS), 0.9 + 0.28 * len(labels)
    heights = [row_height] * rows + [3.0] * bool(series)
    figure = Figure(figsize=(12, sum(heights)), layout="constrained", dpi=150)
    grid = figure.add_gridspec(len(heights), _COLUMNS, height_ratios=heights)
    for place, name in enumerate(single):
        row, column = divmod(place, _COLUMNS)
        axes = figure.add_subplot(grid[row, column])
        _draw_score(axes, {label: numbers.get(name) for label, numbers in scores.items()}, is_first=not column)
        axes.set_title(names[name], fontsize="medium")
    width = _COLUMNS // max(len(series), 1)
    for place, (title, lines) in enumerate(series.items()):
        axes = figure.add_subplot(grid[rows, place * width : (place + 1) * width])
        draw_curves(axes, lines)
        axes.set_xlabel("sentence")
        axes.set_title(title, fontsize="medium")
        axes.legend(fontsize="small")
    return {f"{NAME}.png": figure}


def _draw_score(axes: Axes, numbers: Mapping[str, dict | None], is_first: bool) -> None:
    for row, number in enumerate(numbers.values()):
        if number:
            ends = error_lengths([number["value"]], [[number["low"], number["high"]]])
            axes.errorbar([number["value"]], [row], xerr=ends, fmt="o", color=f"C{row}", elinewidth=2)
            text = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"{number['value']:.3g}", (number["value"], row), (0, 5), **text)
    axes.set_yticks(range(len(numbers)), numbers if is_first else [""] * len(numbers))
    axes.set_ylim(len(numbers) - 0.5, -0.75)
    axes.margins(x=0.15)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", alpha=0.3)


def _series(scores: Mapping[str, dict], names: Mapping[str, str]) -> dict[str, dict[str, dict[int, dict]]]:
    """{title: {label: {sentence: number}}} of the scores by sentence."""
    titles = ("objects right, %, by the sentence that first mentions them",)
    titles += ("precision of objects, %, in the places of each sentence", f"{names['clip_score']}, by sentence")
    series = {title: {} for title in titles}
    for label, numbers in scores.items():
        lines = {line["sentence"]: line for line in numbers.get(BY_SENTENCE, ())}
        clip = {name.removeprefix(OF_SENTENCE): each for name, each in numbers.items() if name.startswith(OF_SENTENCE)}
        parts = lines, {sentence: line["precision"] for sentence, line in lines.items()}, clip
        for by_title, part in zip(series.values(), parts, strict=True):
            by_title[label] = part
    return {title: lines for title, lines in series.items() if any(lines.values())}


def plot_examples(captions: Sequence[str], columns: Mapping[str, Sequence[Image.Image]]) -> Figure:
    """A row for each prompt: the prompt, and the image of each column, by title; small ones as pixels."""
    figure = Figure(figsize=(3.4 + 2.2 * len(columns), 2.35 * len(captions)), layout="constrained", dpi=110)
    grid = figure.add_gridspec(len(captions), 1 + len(columns), width_ratios=[1.5, *[1] * len(columns)])
    for row, caption in enumerate(captions):
        axes = figure.add_subplot(grid[row, 0])
        axes.axis("off")
        text = textwrap.shorten(printable(" ".join(caption.split())), _MOST_CHARACTERS, placeholder=" …")
        # parse_math: a $ is a $
        axes.text(0, 0.98, textwrap.fill(text, 48), va="top", fontsize=8, parse_math=False, transform=axes.transAxes)
        for column, (label, images) in enumerate(columns.items(), 1):
            axes = figure.add_subplot(grid[row, column])
            axes.axis("off")
            image = images[row]
            image.thumbnail((_SHOWN, _SHOWN))  # never enlarges
            axes.imshow(image, interpolation="nearest" if max(image.size) < _SHOWN else None)
            if not row:
                axes.set_title(textwrap.fill(label, 20), fontsize="medium")
    return figure
