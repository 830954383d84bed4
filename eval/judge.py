"""A judge: what of an image answers a question with yes, as a probability."""

import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import numpy as np
from PIL import Image
from tqdm import tqdm

from debias_diffusion.data.images import OPENED_AS
from debias_diffusion.errors import UserError
from debias_diffusion.files import bytes_digest
from debias_diffusion.toyworld.checker import read_image
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, COLOURS, KINDS, PLACES, Thing, scene

from .intervals import ends, hits_interval, wilson
from .multimodal import ANSWER, LEAST, TOP, ServerModel
from .options import Judging
from .report import Table, cell
from .session import ResultCache

TOY = "toy/checker"
CONTROLS = 200  # scenes that a judge is tested on
_SPLIT, _SIDE = "test-judge", 192  # the scenes, which no prompt shows, and the pixels of a side
MOST_UNANSWERED = 0.05  # share
LEAST_GAP = 0.1  # between the mean p(yes) of questions whose answer is yes and no
_NAMED = [re.compile(rf"\b({'|'.join(sorted(names, key=len)[::-1])})\b") for names in (COLOURS, KINDS, PLACES)]

OfImage = tuple[Callable[[], Image.Image], str, list[str]]  # opens an image, its digest, questions about it


def load_judge(config: Judging) -> "ServerModel | ToyJudge":
    """The judge that settings name. Raises UserError if there is none."""
    if config.server is None:
        return ToyJudge(config.judge)
    return ServerModel(config.server, config.judge, config.batch_size)


class ToyJudge:
    """The toy world's checker, which may err at known rates; the same question of the same image errs alike."""

    batch = 1  # images that may be asked about at once

    def __init__(self, name: str):
        self.model, rate = name, r"(0|1|0?\.\d+)"
        if not (rates := re.fullmatch(rf"{TOY}(?::{rate}:{rate})?", name)):
            raise UserError(
                f"The judge {name!r} has no usable rates of wrong yes and of wrong no, each from 0 to 1, as in "
                f"{TOY}:0.1:0.1. Give them, or {TOY}, which does not err."
            )
        self.false_yes, self.false_no = (float(each or 0) for each in rates.groups())

    def __call__(self, image: Image.Image, questions: Sequence[str]) -> list[float | None]:
        """1.0 for yes and 0.0 for no to each question that names one colour, one kind and one place; None to others."""
        seen, pixels, answers = read_image(image).objects, bytes_digest([image.tobytes()]), []
        for question in questions:
            match [names.findall(question) for names in _NAMED]:
                case [[colour], [kind], [place]]:
                    truth = isinstance(there := seen[place], Thing) and (there.colour, there.kind) == (colour, kind)
                    rate = self.false_no if truth else self.false_yes
                    answers.append(float(truth ^ (random.Random(f"{pixels} {question}").random() < rate)))
                case _:
                    answers.append(None)
        return answers


class Questioning:
    """A judge, and what it answered before: the cache of an output folder.

    Attributes:
        depends: what decides its answers.
        of_toys: its errors on toy scenes, see `control`.

    Raises:
        UserError: there is no such judge, or it does not look at images, which is checked at once.
    """

    def __init__(self, config: Judging, output: str):
        self._results, self._judge = ResultCache(output), load_judge(config)
        self.depends = {"judge": config.judge, "rule": [ANSWER, TOP, LEAST]}  # by which yes and no are read
        self.of_toys = self._results.result("judge", self.depends, lambda: control(self._judge))

    def ask(self, asked: Sequence[OfImage], title: str) -> list[list[float | None]]:
        """p(yes) of each question of each image; those in the cache are not asked again.

        Raises UserError if too many are unanswered.
        """

        def answer(of_image: OfImage) -> list[float | None]:
            open_image, digest, questions = of_image
            depends = self.depends | {"image": [OPENED_AS, digest], "questions": questions}
            result = self._results.result("answers", depends, lambda: {"answers": self._judge(open_image(), questions)})
            return result["answers"]

        with ThreadPoolExecutor(self._judge.batch) as pool:  # after an error, `map` asks the rest no more
            found = [*tqdm(pool.map(answer, asked), desc=title, total=len(asked))]
        check_answered(self.depends["judge"], [*chain(*found)])
        return found


def object_question(thing: Thing) -> str:
    """What `ToyJudge` can answer, of kind, colour and place."""
    return f"Is there {'an' if thing.colour == 'orange' else 'a'} {thing.colour} {thing.kind} in the {thing.place}?"


def control(judge: ServerModel | ToyJudge) -> dict:
    """How often a judge errs on toy scenes, whose truth is known.

    Each question is asked of two scenes, one of which shows it: who does not look at the image is right half the time.

    Returns its `errors`. Raises UserError if it answers too few, or the same whatever an image shows.
    """
    answers: dict[bool, list[float | None]] = {False: [], True: []}
    scenes = [scene(_SPLIT, ARRANGEMENTS * index) for index in range(CONTROLS)]  # with other objects each
    for pair in tqdm([*zip(scenes[::2], scenes[1::2], strict=True)], desc=f"check {judge.model}"):
        seen = [[replace(thing, size="") for thing in shown.things] for shown in pair]
        things = [next(thing for thing in seen[a] if thing not in seen[b]) for a, b in ((0, 1), (1, 0))]
        for shown, there in zip(pair, seen, strict=True):
            found = judge(render(shown, _SIDE), [*map(object_question, things)])
            for thing, p in zip(things, found, strict=True):
                answers[thing in there].append(p)
    answered = answers[False] + answers[True]
    check_answered(judge.model, answered)
    p, truth = filled(answered), np.repeat([False, True], [*map(len, answers.values())])
    no, yes = p[~truth], p[truth]
    if yes.mean() - no.mean() < LEAST_GAP:
        raise UserError(
            f"The judge {judge.model!r} does not tell what an image shows: to {CONTROLS} questions about toy scenes "
            f"whose answer is yes its mean p(yes) is {yes.mean():.3f}, to {CONTROLS} whose answer is no "
            f"{no.mean():.3f}. Give another model."
        )
    return errors(p, truth)


def errors(p: np.ndarray, truth: np.ndarray, groups: np.ndarray | None = None) -> dict:
    """How often a judge errs, on questions whose answer is no, and on those whose answer is yes.

    Args:
        p: p(yes) of each question, [N].
        truth: whether its answer is yes, [N] bool.
        groups: of the questions, [N]; None: questions are independent, and have Wilson's interval.

    Returns [2] each: "asked", their number, "mean_p", "wrong", "wrong_percent", "interval_percent"; None of none.
    """
    found: dict = {name: [] for name in ("asked", "mean_p", "wrong", "wrong_percent", "interval_percent")}
    for answer in (False, True):
        chosen = truth == answer
        asked, hits = int(chosen.sum()), 100.0 * ((p > 0.5) != truth)[chosen]
        wrong = int(np.count_nonzero(hits))
        means = (float(p[chosen].mean()), float(hits.mean())) if asked else (None, None)
        interval = wilson(wrong, asked) if groups is None or not asked else hits_interval(hits, groups[chosen])
        for column, value in zip(found.values(), (asked, means[0], wrong, means[1], interval), strict=True):
            column.append(value)
    return found


def corrected(percent: float, drawn: np.ndarray, numbers: dict) -> dict:
    """The percentage answered with yes by a judge without errors (Rogan & Gladen 1978), by the rates of its `errors`.

    Its interval is wider: errors hide a part of what differs, and their rates are estimates too. All numbers are kept
    within 0 to 100, which the correction exceeds where the judge errs less on these images than its rates say.

    Args:
        percent, drawn: of the judge itself, and in bootstrap samples, [S].

    Returns:
        "value", "low" and "high"; the last two None where there is no interval, see `intervals`.
    """

    def correct(percent, false_yes, false_no):
        return np.clip((percent - 100 * false_yes) / (1 - false_yes - false_no), 0, 100)

    random, counts = np.random.default_rng(0), [*zip(numbers["wrong"], numbers["asked"], strict=True)]
    rates = (random.beta(hits + 0.5, asked - hits + 0.5, len(drawn)) for hits, asked in counts)  # Jeffreys' posterior
    low, high = ends(correct(drawn, *rates))
    return {"value": float(correct(percent, *(hits / asked for hits, asked in counts))), "low": low, "high": high}


def error_table(title: str, numbers: dict) -> Table:
    """The table of `errors`."""
    rows = []
    for index, answer in enumerate(("no", "yes")):
        error = cell(numbers["wrong_percent"][index], *numbers["interval_percent"][index])
        rows.append(
            [f"the answer is {answer}", numbers["asked"][index], cell(numbers["mean_p"][index], form=".3f"), error]
        )
    return Table([f"the judge {title}", "questions", "mean p(yes)", "wrong, %"], rows)


def filled(answers: Sequence[float | None]) -> np.ndarray:
    """p(yes) of each, 0.5 of an unanswered one."""
    return np.array([0.5 if p is None else p for p in answers])


def check_answered(name: str, answers: Sequence[float | None]) -> None:
    """Raises UserError if a judge left more than `MOST_UNANSWERED` of its questions unanswered."""
    if (unanswered := answers.count(None)) > MOST_UNANSWERED * len(answers):
        raise UserError(
            f"The judge {name!r} said neither yes nor no to {unanswered} of {len(answers)} questions, more than "
            f"{MOST_UNANSWERED:.0%}. Give a model that follows instructions."
        )
