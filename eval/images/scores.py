"""Scores of generated images against reference images and captions, their intervals, and the comparison of encoders.

Scores are pure functions of features, which come from `networks`; `ImageScores` combines both. FID, KID, precision and
recall, the distances between two sets of images, are torch-fidelity's.

**Intervals of distances.** A bootstrap does not fit: a repeated image lowers the rank of a covariance (FID), is
compared with itself (KID), and has a neighbour at distance 0 (precision, recall). Against the true spread over 120 data
sets of 200 images its standard errors were 1.0 to 1.8 times as large, for recall 2.5 to 5 times; those of the halves
used here 0.9 to 1.5 times. A half has half of the groups of pairs of an image and its reference, drawn without
replacement. The spread of a score over halves is its spread over sets of as many images as there are (the delete-d
jackknife with d = N / 2: Wu 1986, Shao and Wu 1989; the variance over subsets of h of N is multiplied by h / (N - h)).
Only the spread is used, because FID falls with the number of images: the interval is value +- 1.96 standard errors,
that of the score *at this number of images*.

Two encoders are compared over the same halves: p is of their difference in its standard errors. A randomization test
would be wrong: it asks whether the images are alike, and finds a difference between two encoders that miss the
references equally far in opposite directions (at the 5% level in 25% of 80 data sets; the test over halves in 6%).
"""

import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric
from torch_fidelity.metric_prc import KEY_METRIC_PRECISION, KEY_METRIC_RECALL, prc_features_to_metric
from tqdm import tqdm

from debias_diffusion.text.sentences import split_sentences

from ..intervals import Groups, group_numbers, mean_interval, paired_difference, with_width
from .networks import ClsFeatures, ImageLike, InceptionFeatures, TwoTowerFeatures

HALVES = 200
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000  # torch-fidelity's
NEIGHBOURS = 3  # of precision and recall, torch-fidelity's
_FEWEST = 2 * (NEIGHBOURS + 1)  # groups, for halves with as many neighbours
_ENOUGH_FOR_FID = 2048
_NORMAL = 1.959964  # standard errors of a 95% interval
# By option.
NETWORKS = {
    "inception_weights": InceptionFeatures,
    **{option: partial(ClsFeatures, option=option) for option in ("dino", "dinov2", "own_features")},
    "clip_score": TwoTowerFeatures,
}


# ---- scores of features


def fid(generated: Tensor, references: Tensor) -> float:
    """The Fréchet distance of two sets of features, [N, D] and [M, D], at least two on each side, in any order.

    As torchmetrics' but for rounding, without matrices of D x D if there are fewer images than features: with centred
    features X [N, D] and Y [M, D] the trace of the root of the covariances' product is the sum of the singular values
    of X Y^T / sqrt((N - 1) (M - 1)), exactly for any rank; if N > D, the triangle R of X = Q R replaces X. So halves
    take seconds instead of hours.
    """
    sides = [features.double() for features in (generated, references)]
    means = [features.mean(dim=0) for features in sides]
    centred = [(x - mean) / math.sqrt(len(x) - 1) for x, mean in zip(sides, means, strict=True)]
    variance = sum(x.square().sum() for x in centred)
    x, y = (torch.linalg.qr(x, mode="r").R if len(x) > x.shape[1] else x for x in centred)
    distance = (means[0] - means[1]).square().sum() + variance - 2 * torch.linalg.svdvals(x @ y.T).sum()
    return max(distance.item(), 0.0)  # rounding may give identical sets a value below 0


def kid(generated: Tensor, references: Tensor) -> float:
    """torch-fidelity's kernel inception distance: the mean over subsets of the unbiased squared MMD, polynomial kernel.

    Up to 1,000 images there is one subset, all of them. Being unbiased, the distance can be below 0, and is for
    identical sets.
    """
    size = min(len(generated), len(references), KID_SUBSET_SIZE)
    subsets = 1 if size == len(generated) == len(references) else KID_SUBSETS
    scores = kid_features_to_metric(generated, references, kid_subsets=subsets, kid_subset_size=size, verbose=False)
    return scores[KEY_METRIC_KID_MEAN]


def precision_and_recall(generated: Tensor, references: Tensor) -> tuple[float, float]:
    """torch-fidelity's improved precision and recall (Kynkäänniemi et al. 2019), with 3 neighbours.

    Precision is the share of generated images that are no further from some reference image than its third nearest
    reference image is; recall is the same with the sets exchanged. Needs at least 4 images on each side. On Inception's
    features these differ from torch-fidelity's command line, which uses a VGG-16 for them, as the paper does.
    """
    scores = prc_features_to_metric(generated, references, prc_neighborhood=NEIGHBOURS, verbose=False)
    return scores[KEY_METRIC_PRECISION], scores[KEY_METRIC_RECALL]


def cosines(a: Tensor, b: Tensor) -> list[float]:
    """The cosine of each row of a [N, D] and its row of b [N, D]."""
    return nn.functional.cosine_similarity(a.double(), b.double(), dim=1).tolist()


def clip_scores(images: Tensor, texts: Tensor) -> list[float]:
    """CLIPScore of each image's features [N, D] with its text's [N, D]: 100 * max(cosine, 0), as in torchmetrics.

    Hessel et al. 2021 multiply by 2.5 instead, and put "A photo depicts" before the caption.
    """
    return [100 * max(cosine, 0.0) for cosine in cosines(images, texts)]


# By kind of features, what ends the names of the distances on them.
_DISTANCES = {"2048": "2048", "64": "64", "own_features": "own"}


def _distances(generated: Tensor, references: Tensor, ending: str) -> dict[str, float]:
    """The distances by name: of 64 features FID alone, of few images no precision and recall."""
    values = {"fid": fid(generated, references)}
    if ending != "64":
        values["kid"] = kid(generated, references)
        if min(len(generated), len(references)) > NEIGHBOURS:
            values["precision"], values["recall"] = precision_and_recall(generated, references)
    return {f"{score}_{ending}": value for score, value in values.items()}


# ---- intervals


def halves(groups: Sequence[Hashable], seed: int = 0) -> Iterator[np.ndarray]:
    """`HALVES` times the positions of half of the groups, without replacement; a function of `groups` and `seed`."""
    random, numbers = np.random.default_rng(seed), group_numbers(groups)
    count = numbers.max() + 1
    for _ in range(HALVES):
        yield np.flatnonzero(np.isin(numbers, random.permutation(count)[: count // 2]))


def standard_error(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """The standard error of a score of images in `groups`, from its `values` over `halves(groups)`."""
    half, count = len(set(groups)) // 2, len(set(groups))
    return float(np.std(values, ddof=1)) * math.sqrt(half / (count - half))


@dataclass
class ImageNumbers:
    """The scores of one encoder's images. JSON-ready: `asdict(numbers)`, and `ImageNumbers(**...)` back.

    Attributes:
        numbers: {score: {"value", "low", "high"}}, with the 95% interval, None if there are too few images for one.
            Scores whose network is not given are missing. The order: fid_2048, fid_64, kid_2048, precision_2048,
            recall_2048, fid_own, kid_own, precision_own, recall_own, dino_score, dinov2_score, clip_score (whole
            captions), clip_score_1, clip_score_2, ... (first sentences, second ones; with "pictures", how many captions
            have one).
        halves: {score: its values over `halves(groups)`}, of distances between two sets of images.
        by_image: {score: its value for each image}, of means over images; None if a caption has no such sentence.
        groups: of the images.
        notes: on the numbers.
    """

    numbers: dict[str, dict[str, float | None]]
    halves: dict[str, list[float]]
    by_image: dict[str, list[float | None]]
    groups: list[Hashable]
    notes: list[str] = field(default_factory=list)


def compare_scores(a: ImageNumbers, b: ImageNumbers) -> dict[str, dict[str, float | None]]:
    """The paired comparison of two encoders on the same captions, by score.

    Returns:
        {score: {"difference", a - b, "low", "high" (95% interval), "p" in [0, 1], two-sided}}; the last three are None
        if there are too few images. For means over images see `intervals.paired_difference`, for distances this module.
    """
    compared = {}
    for score in a.numbers:
        if score in a.by_image:
            rows = zip(a.by_image[score], b.by_image[score], a.groups, strict=True)
            compared[score] = paired_difference(*zip(*(row for row in rows if None not in row), strict=True))
            continue
        difference = a.numbers[score]["value"] - b.numbers[score]["value"]
        compared[score] = {"difference": difference, "low": None, "high": None, "p": None}
        if a.halves[score]:
            error = standard_error(np.subtract(a.halves[score], b.halves[score]), a.groups)
            p = math.erfc(abs(difference) / error / math.sqrt(2)) if error else None if difference else 1.0
            low, high = with_width(difference - _NORMAL * error, difference + _NORMAL * error)
            compared[score] = {"difference": difference, "low": low, "high": high, "p": p}
    return compared


# ---- networks and scores together


def network_name(name: str | None) -> str | None:
    """The name of a network in tables: of a path, its last part."""
    return Path(name).name if name and (os.path.isabs(name) or os.path.exists(name)) else name


@dataclass(frozen=True)
class References:
    """What generated images are compared with.

    Attributes:
        features: of the reference images, by kind, [N, D].
        texts: by score with texts, the features [D] of each caption's text; None if it has no such sentence.
        groups: of the images.
        notes: how many texts were cut.
    """

    features: dict[str, Tensor]
    texts: dict[str, list[Tensor | None]]
    groups: list[Hashable]
    notes: list[str]


class ImageScores:
    """The networks that settings name, loaded and checked, and their scores of images.

    Args:
        networks: names of the networks, by option, see `NETWORKS`; None skips a network's scores.
        batch_size: images, or texts, in a batch.
        device: where the networks run.

    Attributes:
        digests: of the networks, everything about them that affects a score; None for one that is not given.
        resize: how images are resized for each network, generated and reference images alike.
        notes: on the scores; notes on one encoder's images are in its `ImageNumbers`.

    Raises:
        UserError: a network cannot be loaded.
    """

    def __init__(self, networks: Mapping[str, str | None], batch_size: int, device: torch.device):
        loaded = {option: load(networks[option], device) for option, load in NETWORKS.items() if networks.get(option)}
        self.digests = dict.fromkeys(NETWORKS) | {option: network.digest() for option, network in loaded.items()}
        self.resize = {option: network.resize for option, network in loaded.items()}
        self.inception, self.clip = loaded.pop("inception_weights", None), loaded.pop("clip_score", None)
        self.networks, self.batch_size = loaded, batch_size
        optional = {"inception_weights": "FID with Inception", "dino": "The DINO score", "clip_score": "CLIPScore"}
        self.notes = [
            f"{score} was skipped, because {name} is null."
            for name, score in optional.items()
            if any(self.digests.values()) and not self.digests[name]
        ]
        if "own_features" in self.networks:
            self.notes.append("FID, KID, precision and recall of own_features compare with nothing published.")
        if "dinov2" in self.networks:
            size = self.networks["dinov2"].size
            self.notes.append(f"DINOv2 read {size} x {size} pixels, with its position table resized to them.")
        if self.clip:
            name = network_name(networks["clip_score"])
            self.notes.append(f"CLIPScore is 100 * max(cosine, 0) with {name}, as in torchmetrics.")

    def of_references(self, images: Sequence[ImageLike], captions: Sequence[str], groups: Groups = None) -> References:
        """The features of reference images and of their captions, in the same order; once for all encoders.

        Args:
            groups: of the images, see `intervals.Groups`.
        """
        features, groups = self._features(images), list(range(len(images)) if groups is None else groups)
        if not self.clip:
            return References(features, {}, groups, [])
        sentences = [split_sentences(caption) for caption in captions]
        columns = {"clip_score": captions}
        columns |= {f"clip_score_{number}": column for number, column in enumerate(zip_longest(*sentences), 1)}
        different = list(dict.fromkeys(text for text in chain(*columns.values()) if text is not None))
        encoded = dict(zip(different, self.clip.of_texts(different, self.batch_size), strict=True))
        notes, tokenizer = [], self.clip.backbone.tokenizer
        for name, group in (("captions", captions), ("sentences", list(chain(*sentences)))):
            if over := sum(tokenizer.count(text) > tokenizer.context_length for text in group):
                length = f"CLIPScore's context length of {tokenizer.context_length} tokens"
                notes.append(f"{over} of {len(group)} {name} exceed {length} and were cut.")
        texts = {score: [encoded.get(text) for text in column] for score, column in columns.items()}
        return References(features, texts, groups, notes)

    def _features(self, images: Sequence[ImageLike]) -> dict[str, Tensor]:
        features = {}
        if self.inception:
            features |= {f"{n}": part for n, part in self.inception(images, self.batch_size).items()}
        return features | {option: network(images, self.batch_size) for option, network in self.networks.items()}

    def __call__(self, generated: Sequence[ImageLike], references: References) -> ImageNumbers:
        """All scores of images, at least two for FID, each with its reference image and caption, in the same order."""
        features, result = self._features(generated), ImageNumbers({}, {}, {}, references.groups)
        for kind, ending in _DISTANCES.items():
            if kind in features:
                _add_distances(result, features[kind], references.features[kind], ending)
        if self.inception:
            result.notes += _notes_of_inception(len(generated))
        for option in ("dino", "dinov2"):
            if option in features:
                _add_mean(result, f"{option}_score", cosines(features[option], references.features[option]))
        images = self.clip.of_images(generated, self.batch_size) if self.clip else None
        for score, texts in references.texts.items():
            present = [index for index, text in enumerate(texts) if text is not None]
            values = clip_scores(images[present], torch.stack([texts[index] for index in present]))
            by_index = dict(zip(present, values, strict=True))
            _add_mean(result, score, [by_index.get(index) for index in range(len(texts))])
        result.notes += references.notes
        return result


def _add_distances(result: ImageNumbers, generated: Tensor, references: Tensor, ending: str) -> None:
    values = _distances(generated, references, ending)
    of_halves: dict[str, list[float]] = {score: [] for score in values}
    if len(set(result.groups)) >= _FEWEST:
        for half in tqdm(halves(result.groups), total=HALVES, desc=f"interval of fid_{ending}"):
            for score, value in _distances(generated[half], references[half], ending).items():
                of_halves[score].append(value)
    else:
        needed = f"at least {_FEWEST} images, or families of toy scenes"
        result.notes.append(f"{', '.join(values)}: no interval, which needs {needed}.")
    result.halves |= of_halves
    for score, value in values.items():
        result.numbers[score] = {"value": value, "low": None, "high": None}
        if of_halves[score]:  # the interval ends where the score does
            reach = _NORMAL * standard_error(of_halves[score], result.groups)
            least = -math.inf if score.startswith("kid") else 0.0
            most = 1.0 if score.startswith(("precision", "recall")) else math.inf
            low, high = with_width(max(value - reach, least), min(value + reach, most))
            result.numbers[score] |= {"low": low, "high": high}


def _add_mean(result: ImageNumbers, score: str, values: list[float | None]) -> None:
    present, groups = zip(*(row for row in zip(values, result.groups, strict=True) if row[0] is not None), strict=True)
    result.by_image[score] = values
    low, high = mean_interval(present, groups)
    result.numbers[score] = {"value": float(np.mean(present)), "low": low, "high": high}
    if len(present) < len(values) or score.startswith("clip_score_"):
        result.numbers[score]["pictures"] = len(present)


def _notes_of_inception(count: int) -> list[str]:
    subsets = f"{KID_SUBSETS} subsets of {KID_SUBSET_SIZE}" if count > KID_SUBSET_SIZE else f"one subset, all {count}"
    notes = [
        f"KID is over {subsets} images.",
        "Precision and recall are on Inception's features, like FID and KID, not on VGG-16's as in their paper.",
    ]
    if count < _ENOUGH_FOR_FID:
        notes.append(
            f"FID of 2048 features on {count} images is biased upwards; compare it only between runs of equally many "
            f"images, or use at least {_ENOUGH_FOR_FID}."
        )
    return notes
