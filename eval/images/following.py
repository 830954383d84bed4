"""Which sentences of a prompt are in the image: a judge answers a question about each, or those of a prompt set."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from debias_diffusion.data.bad_records import print_left_out
from debias_diffusion.data.sources import is_toy_scenes
from debias_diffusion.files import bytes_digest, sha256
from debias_diffusion.pipelines.rendering.prompts import ImageTask
from debias_diffusion.processes import Processes

from ..intervals import by_group, drawn_ratios, mean_interval, paired_difference, percent_ends
from ..judge import Questioning, corrected, error_table, filled, load_judge
from ..options import FollowingConfig
from ..report import Table, cell, compared_tables, draw_curves, image_url, write_page
from ..session import Session, compare_encoders
from .networks import load_image
from .prompt_sets import BAND_NAMES, Prompt, PromptSet, Question, ask_sentences, band, read_prompt_set
from .rendered import image_task, render_all, rendering_settings

NAME = "following"
PAGE, TEMPLATE = "following.html", "following.html.j2"
GROUPINGS = ("by_sentence", "by_position", "by_category")
TITLES = {
    "mean_p": "mean p(yes), %",
    "geometric_mean": "geometric mean of p(yes) a prompt, %",
    "shown": "questions with p(yes) above 0.5, %",
}
NOTES = (
    "Numbers are the judge's, and depend on it: compare only runs of one judge. A question counts as shown if its "
    "p(yes), and that of all questions it depends on, is above 0.5. An unanswered one has p(yes) = 0.5.",
)
_ON_PAGE, _SIDE = 20, 320  # prompts, and pixels of an image's longer side


def evaluate_following(config: FollowingConfig) -> dict:
    """Asks a judge about each sentence on images generated with each encoder; writes a report and prints tables.

    A killed run generates only missing images and asks only about images without answers. Started by `accelerate
    launch` it generates in several processes, one on each GPU; the main one asks.

    Returns:
        The content of `following.json`: settings, versions, digests, numbers of prompts and questions, "judge", see
        `judge.control`; by encoder `score`, "unanswered" questions, how prompts were read, the digest of the images,
        and "answers", p(yes) of each question by image; "records", the prompts and questions that these answer; the
        encoders compared in points; notes, the bad records, seconds. In processes other than the main one, {}.
        Of scenes told twice, scores are of the long prompts, "twins" is that of `twins`, and answers to the short
        prompts' questions follow, on images of long prompts, then of short ones. Of one `image` "sentences" alone.

    Raises:
        UserError: the prompts or a model cannot be used, or the judge does not look at images, which is checked before
            any is generated, or answers too little.
    """
    if config.image is not None:
        sentences = ask_sentences(load_judge(config), config.image, config.prompt)
        rows = [[f"{number}. {sentence}", p] for number, (sentence, p) in enumerate(sentences, 1)]
        print(Table([f"is it in the image? {config.judge}", "p(yes)"], rows))
        return {"sentences": sentences}
    started, processes, count = time.monotonic(), Processes.connect(config.device), config.images_per_prompt
    drawing = rendering_settings(config)  # before a judge is asked
    judge: Questioning | None = None  # of the main process

    def read() -> tuple[PromptSet, list[ImageTask]]:
        """The prompts and the images to generate."""
        nonlocal judge
        data = read_prompt_set(config.prompts, config.limit)
        print_left_out(data.bad)
        judge = Questioning(config, config.output)
        places = enumerate((prompt, number) for prompt in (*data.prompts, *data.short) for number in range(count))
        scenes = len(data.prompts) * count  # both prompts of one start from the same noise
        tasks = [image_task(config, f"{of.name}/{number}", of.text, at % scenes) for at, (of, number) in places]
        return data, tasks

    with processes.only_main_prints():
        data, tasks = processes.from_main(read)
        rendered, digests = render_all(config, processes, tasks)
    if judge is None:
        return {}
    session, results, told, encoders = Session(NAME, config, data, processes.device), {}, {}, {}
    scenes = len(data.prompts) * count
    # Prompts, and the first image that their questions are asked of: those of short prompts are asked of both.
    views = [(data.prompts, 0), *[(data.short, 0), (data.short, scenes)] * bool(data.short)]
    # A judge's errors on toy scenes are those on images of toy scenes only.
    errors = judge.of_toys if is_toy_scenes(config.prompts) else None
    for label, images in rendered.items():
        shas = [*map(sha256, images.files)]
        asked = [
            (partial(load_image, images.files[at]), shas[at], [question.text for question in prompt.questions])
            for prompts, first in views
            for at, prompt in enumerate((prompt for prompt in prompts for _ in range(count)), first)
        ]
        answers = judge.ask(asked, f"ask, {label}")
        blocks = (answers[at : at + scenes] for at in range(0, len(answers), scenes))
        results[label], *both = (Answers.of(of, next(blocks), count) for of, _ in views)
        encoders[label] = score(results[label], errors) | {"unanswered": [*chain(*answers)].count(None)}
        if both:
            told[label] = both[0]
            encoders[label]["twins"] = twins(*both, told)
        encoders[label] |= images.reading | {
            "images_digest": bytes_digest(["\n".join(shas).encode()]),
            "answers": answers,
        }
    session.digests |= judge.depends | digests
    _write_page(config, data.prompts, {label: images.files for label, images in rendered.items()}, results)
    return session.report(
        tables,
        figures,
        encoders,
        compare(results),
        NOTES,
        seconds=time.monotonic() - started,
        drawing=drawing,
        prompts=len(data.prompts),
        questions=sum(len(prompt.questions) for prompt in data.prompts),
        judge=judge.of_toys,
        records=[
            {**prompt._asdict(), "questions": [*map(Question._asdict, prompt.questions)]}
            for prompt in (*data.prompts, *data.short)
        ],
    )


def _write_page(config: FollowingConfig, prompts: Sequence[Prompt], files: Mapping, results: Mapping) -> None:
    """The page of the first prompts: the first image of each encoder side by side, and p(yes) of every question."""
    entries, at, count = [], 0, config.images_per_prompt
    for number, prompt in enumerate(prompts[:_ON_PAGE]):
        images = [load_image(of_encoder[number * count]) for of_encoder in files.values()]
        for image in images:
            image.thumbnail((_SIDE, _SIDE))  # never enlarges
        of_first = zip(*(result.p[at : at + len(prompt.questions)] for result in results.values()), strict=True)
        percent = [[round(100 * float(p)) for p in of_question] for of_question in of_first]
        rows = sorted(zip(prompt.questions, percent, strict=True), key=lambda row: row[0].sentence or 0)
        entries.append({"prompt": prompt, "images": [*map(image_url, images)], "rows": rows})
        at += count * len(prompt.questions)
    write_page(Path(config.output, PAGE), TEMPLATE, shown=entries, labels=[*files], judge=config.judge)


# ---- scores


@dataclass(frozen=True)
class Answers:
    """The answers to questions, an entry for each question of each image, [N].

    Attributes:
        p: p(yes), 0 to 1.
        shown: 100 if p, and that of all questions that it depends on, is above 0.5, else 0.
        image: the index of its image.
        group: of its prompt, whose answers belong together.
        places: by_sentence, by_position and by_category, the name of its place; None for none.
    """

    p: np.ndarray
    shown: np.ndarray
    image: np.ndarray
    group: np.ndarray
    places: dict[str, np.ndarray]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], answers: Sequence[Sequence[float | None]], count: int) -> "Answers":
        """Of `count` images of each prompt, one prompt after the other."""
        rows = []
        for image, of_image in enumerate(answers):
            prompt, p = prompts[image // count], filled(of_image)
            for question, *of_question in zip(prompt.questions, p, shown(prompt.questions, p > 0.5), strict=True):
                places = question.sentence, question.position and band(question.position), question.category or None
                rows.append((*of_question, image, prompt.group, *places))
        p, held, image, group, *places = (np.array(column, dtype=object) for column in zip(*rows, strict=True))
        numbers = p.astype(float), 100 * held.astype(float), image.astype(int)
        return cls(*numbers, group, dict(zip(GROUPINGS, places, strict=True)))

    def members(self, grouping: str) -> dict[str, np.ndarray]:
        """The entries of each place, [N] bool, by its name, in order."""
        names = self.places[grouping]
        found = {name for name in names.tolist() if name is not None}
        key = BAND_NAMES.index if grouping == "by_position" else None
        return {str(name): names == name for name in sorted(found, key=key)}

    def by_image(self) -> dict[str, tuple[np.ndarray, list]]:
        """By score: the value of each image, 0 to 100, and its prompt's group."""
        with np.errstate(divide="ignore"):  # a geometric mean with a 0 is 0
            columns = self.p, np.log(self.p), self.shown / 100
        means = [np.bincount(self.image, column) / np.bincount(self.image) for column in columns]
        groups = self.group[np.unique(self.image, return_index=True)[1]].tolist()
        values = means[0], np.exp(means[1]), means[2]
        return {name: (100 * each, groups) for name, each in zip(TITLES, values, strict=True)}


def shown(questions: Sequence[Question], yes: Sequence[bool]) -> list[bool]:
    """Which questions of one image are answered yes, as are all that they depend on, however far back."""
    answered = {question.number: bool(answer) for question, answer in zip(questions, yes, strict=True)}
    parents = {question.number: question.parents for question in questions}

    @cache
    def holds(number: int) -> bool:
        return answered[number] and all(map(holds, parents[number]))

    return [bool(answer) and all(map(holds, question.parents)) for question, answer in zip(questions, yes, strict=True)]


def score(answers: Answers, errors: dict | None = None) -> dict:
    """The scores, all 0 to 100, with 95% intervals over prompts (families of toy scenes).

    Args:
        errors: of the judge on such images, see `judge.control`, to correct shares by.

    Returns:
        "scores", means over images, of `TITLES`: "value", "low" and "high"; mean_p and geometric_mean are Soft-TIFA's
        (Kamath et al. 2025), shown is DPG-Bench's (Hu et al. 2024). By `GROUPINGS`, for each place: of the questions
        shown "value", "low", "high", and "corrected" with `errors`; their number on all images, and "mean_p".
    """
    numbers: dict = {name: {} for name in ("scores", *GROUPINGS)}
    for name, (values, groups) in answers.by_image().items():
        low, high = mean_interval(values, groups)
        numbers["scores"][name] = {"value": float(values.mean()), "low": low, "high": high}
    for grouping in GROUPINGS:
        for name, mask in answers.members(grouping).items():
            above, below = by_group(answers.shown[mask], answers.group[mask].tolist())
            value, drawn = float(above.sum() / below.sum()), drawn_ratios(above, below)
            low, high = percent_ends(value, len(above), drawn)
            line = {"value": value, "low": low, "high": high} | {"questions": int(mask.sum())}
            line["mean_p"] = 100 * float(answers.p[mask].mean())
            numbers[grouping][name] = line | ({"corrected": corrected(value, drawn, errors)} if errors else {})
    return numbers


def twins(long: Answers, short: Answers, told: Mapping[str, Answers]) -> dict:
    """By title, the short prompts' questions shown on both prompts' images, %. `told`: `long` of encoders so far."""
    first = next(iter(told))
    (of_long, groups), (of_short, _), (of_first, _) = (each.by_image()["shown"] for each in (long, short, told[first]))
    return {
        "short prompts": score(short)["scores"]["shown"],
        "long prompts": score(long)["scores"]["shown"],
        "long - short": paired_difference(of_long, of_short, groups),
        f"long - long of {first}": paired_difference(of_long, of_first, groups),
    }


def compare(results: Mapping[str, Answers]) -> list[dict]:
    """Every two encoders compared in points, paired by prompt: the scores, and questions shown by place."""
    values: dict[str, dict] = {}
    for label, answers in results.items():
        values[label] = dict(answers.by_image())
        for grouping, word in (("by_sentence", "sentence"), ("by_position", "position")):
            for name, mask in answers.members(grouping).items():
                values[label][f"shown, {word} {name}"] = answers.shown[mask], answers.group[mask].tolist()
    return compare_encoders(values, lambda a, b, _: paired_difference(a[0], b[0], a[1]))


# ---- for people


def tables(report: dict) -> list[Table]:
    """A report's scores, the shares shown by place and category, the judge's errors, and the encoders compared."""
    encoders = report["encoders"]
    rows = [
        [title, *(cell(*numbers["scores"][name].values()) for numbers in encoders.values())]
        for name, title in TITLES.items()
    ]
    rows.append(["unanswered questions, on all images", *(numbers["unanswered"] for numbers in encoders.values())])
    found = [Table([f"{report['prompts']} prompts, {report['questions']} questions", *encoders], rows)]
    for grouping in GROUPINGS:
        lists = [numbers[grouping] for numbers in encoders.values()]
        rows = [
            [name, first["questions"], *(cell(*[*each[name].values()][:3]) for each in lists)]
            for name, first in lists[0].items()
        ]
        title = f"questions shown, %, {grouping.replace('_', ' ').replace('position', 'token position')}"
        found += [Table([title, "questions", *encoders], rows)] if rows else []
    told = [numbers.get("twins", {}) for numbers in encoders.values()]
    rows = [
        [title, *(cell(*[*each[title].values()][:3]) if title in each else None for each in told)]
        for title in dict.fromkeys(chain(*told))
    ]
    found += [Table(["short prompts' questions shown, %, on images of", *encoders], rows)] if rows else []
    shown = [line for line in report["compared"] if "sentence" not in line["score"]]  # those are in the JSON
    return [*found, error_table("on toy scenes", report["judge"]), *compared_tables(shown, TITLES)]


def figures(report: dict) -> dict[str, Figure]:
    """The figure of a report, by file name: questions shown, with 95% intervals, by sentence and token position."""
    figure = Figure(figsize=(12, 4.2), layout="constrained", dpi=150)
    titles = {"by_sentence": "sentence", "by_position": "position in the prompt (CLIP tokens)"}
    for axes, (grouping, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        draw_curves(axes, {label: numbers[grouping] for label, numbers in report["encoders"].items()})
        axes.set(xlabel=title, ylim=(0, 105))
    figure.axes[0].set_ylabel("questions shown (%), 95% intervals")
    figure.axes[0].legend(fontsize="small")
    return {f"{NAME}.png": figure}
