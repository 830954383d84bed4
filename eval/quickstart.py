"""What the quickstart's numbers say: objects by the sentence that tells them, chance, and the method's claims."""

from collections.abc import Sequence

import numpy as np

TRAINED = ("long-clip", "debias-clip")
ENCODERS = ("clip", *TRAINED)
LATE = 4  # number, from 0, of the first sentence that lies beyond what the opening says
_ROUNDING = 1e-9  # so that a difference of exactly what is allowed is allowed


def objects_correct_by_sentence(right: Sequence[dict[str, bool]], told: Sequence[dict[str, int]]) -> dict:
    """How much of what prompts name was drawn, by the sentence that first names it.

    Args:
        right: for each picture, by place, whether the object there was drawn right.
        told: for each picture, by place, the number of the sentence that first tells the object there, from 0.

    Returns:
        "objects_correct", share of 1 of all objects (None where there is none); "objects_by_sentence", their counts,
        indexed by the sentence's number; "objects_correct_by_sentence", the share of each, None where there is none.

    Raises:
        KeyError: an object that no sentence tells.
    """
    by_number: dict[int, list[bool]] = {}
    for its_right, its_told in zip(right, told, strict=True):
        for place, is_right in its_right.items():
            by_number.setdefault(its_told[place], []).append(is_right)
    numbered = [by_number.get(number, []) for number in range(max(by_number, default=-1) + 1)]
    return {
        "objects_correct": _share([is_right for group in numbered for is_right in group]),
        "objects_correct_by_sentence": [_share(group) for group in numbered],
        "objects_by_sentence": [len(group) for group in numbered],
    }


def _share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def paired_bootstrap(
    a: Sequence[dict[str, bool]], b: Sequence[dict[str, bool]], samples: int = 10_000, seed: int = 0
) -> dict[str, float]:
    """The difference of two shares of objects drawn right, a - b, with what chance makes of it.

    Pictures are drawn anew, with replacement, and always both pictures of a prompt together: the objects of a picture
    succeed or fail together, and so do pictures of one prompt.

    Args:
        a, b: for each picture, by place, whether the object there was drawn right; of the same prompts.
        samples: how often the pictures are drawn anew.
        seed: of these draws.

    Returns:
        "difference", in shares of 1, and "low" and "high", the ends of its 95% interval.

    Raises:
        ValueError: a and b are not of the same objects, or there are none.
    """
    if [set(picture) for picture in a] != [set(picture) for picture in b] or not any(a):
        raise ValueError("a and b must be of the same pictures, with the same objects, at least one")
    objects = np.array([len(picture) for picture in a])
    ahead = np.array([sum(x.values()) - sum(y.values()) for x, y in zip(a, b, strict=True)])
    # [samples, pictures] how often each picture was drawn
    drawn = np.random.default_rng(seed).multinomial(len(a), np.full(len(a), 1 / len(a)), size=samples)
    drawn = drawn[drawn @ objects > 0]
    low, high = np.percentile(drawn @ ahead / (drawn @ objects), [2.5, 97.5])
    return {"difference": float(ahead.sum() / objects.sum()), "low": float(low), "high": float(high)}


def expectations(report: dict) -> list[dict]:
    """What the method claims, against what a report found.

    Args:
        report: "retrieval", "generation" and "bootstrap" as the quickstart's report.json has them.

    Returns:
        {"expectation": what is claimed, "found": the numbers, "met": True, False, or None where they do not decide}
    """
    retrieval = report["retrieval"]
    return [
        _whole_captions(retrieval, "t2i_r1", "text to image"),
        _whole_captions(retrieval, "i2t_r1", "image to text"),
        _loses_less(retrieval, "move4", "sentences 1 and 4 are swapped", 0.6),
        _loses_less(retrieval, "remove", "sentence 1 is removed", 0.85),
        _draws_more(report["generation"]),
        _draws_later(report["generation"]),
        _beats_long_clip(report["bootstrap"]["debias-clip - long-clip"]),
    ]


def _line(expectation: str, found: str, met: bool | None) -> dict:
    return {"expectation": expectation, "found": found, "met": met}


def _whole_captions(retrieval: dict, direction: str, name: str) -> dict:
    ours, theirs = (retrieval[encoder]["keep"][direction] for encoder in ("debias-clip", "long-clip"))
    return _line(
        f"With whole captions, DeBias-CLIP's R@1 ({name}) is at most 1 point below Long-CLIP's.",
        f"{ours:.1f}% against {theirs:.1f}%",
        ours >= theirs - 1 - _ROUNDING,
    )


def _loses_less(retrieval: dict, edit: str, what: str, most: float) -> dict:
    expectation = f"When {what}, DeBias-CLIP loses at most {most} of the points that Long-CLIP loses (text to image)."
    kept, after = (
        {encoder: retrieval[encoder][how]["t2i_r1"] for encoder in ("debias-clip", "long-clip")}
        for how in ("keep", edit)
    )
    ours, theirs = (kept[encoder] - after[encoder] for encoder in kept)
    if theirs <= 0:
        found = f"Long-CLIP loses no points, from {kept['long-clip']:.1f}% to {after['long-clip']:.1f}%"
        return _line(expectation, found, None)
    return _line(
        expectation,
        f"{ours:.1f} points against {theirs:.1f}: {ours / theirs:.2f}",
        ours <= most * theirs + _ROUNDING,
    )


def _draws_more(generation: dict) -> dict:
    ours, theirs = (generation[encoder]["objects_correct"] for encoder in ("debias-clip", "clip"))
    return _line(
        "With DeBias-CLIP more of the named objects are drawn right than with the original, cut at 77 tokens.",
        f"{100 * ours:.1f}% against {100 * theirs:.1f}%",
        ours > theirs,
    )


def _draws_later(generation: dict) -> dict:
    expectation = f"The gain over the original is larger for objects first told in sentence {LATE + 1} or later."
    shares = {encoder: _early_and_late(generation[encoder]) for encoder in ("debias-clip", "clip")}
    early, late = (None if None in pair else 100 * (pair[0] - pair[1]) for pair in zip(*shares.values(), strict=True))
    if early is None or late is None:
        return _line(expectation, "no objects are told on one side", None)
    return _line(expectation, f"{late:+.1f} points, and {early:+.1f} for objects told before", late > early)


def _early_and_late(its: dict) -> tuple[float | None, float | None]:
    """Shares of objects drawn right, of those told before sentence `LATE` and of the others."""
    told = list(zip(its["objects_by_sentence"], its["objects_correct_by_sentence"], strict=True))
    return _mean(told[:LATE]), _mean(told[LATE:])


def _mean(told: Sequence[tuple[int, float | None]]) -> float | None:
    objects = sum(count for count, _ in told)
    return sum(count * share for count, share in told if count) / objects if objects else None


def _beats_long_clip(found: dict[str, float]) -> dict:
    difference, low, high = (100 * found[name] for name in ("difference", "low", "high"))
    open_ = low <= 0 <= high
    return _line(
        "With DeBias-CLIP more of the named objects are drawn right than with Long-CLIP.",
        f"{difference:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}"
        + (": no difference shown" if open_ else ""),
        None if open_ else difference > 0,
    )
