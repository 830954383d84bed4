"""Scores of pictures against their originals and captions, how sure each is, and the comparison of two encoders.

The scores are pure functions of features, which `feature_networks` gives; `PictureScores` brings both together. The
distances between two sets of pictures (FID, KID, precision and recall) are those of torch-fidelity and torchmetrics.

**How sure a distance is.** The usual bootstrap, which draws pictures with replacement, does not fit these scores: a
picture that comes twice lowers the rank of a covariance (FID), is compared with itself (KID), and has a neighbour at no
distance (precision and recall), so that the draws lie beside the score that they are drawn for. So pictures are drawn
without replacement, each time half of the pairs of a picture and its original. The spread of a score over such halves
is its spread over sets of as many pictures as there are (Wu 1986, Shao and Wu 1989: the delete-d jackknife with
d = N / 2; the variance over subsets of h of N is to be multiplied by h / (N - h)). The value over halves itself is
another one, because FID falls with the number of pictures: only the spread is used, and the interval is
value +- 1.96 standard errors. It is that of the score *at this number of pictures*, never of the limit of many.
Against the true spread over 120 data sets of 200 pictures (64 and 400 features), halves gave standard errors 0.9 to 1.5
times as large, the bootstrap 1.0 to 1.8 times, and 2.5 to 5 times for recall.

Two encoders are compared over the same halves: p is of their difference in its standard errors. A randomization test,
which swaps the two pictures of a caption between the encoders, would be wrong here: it asks whether the pictures are
alike, and finds two encoders that miss the originals equally far, in opposite directions, to differ (at the 5% level,
in 25% of 80 data sets of 100 pictures and 8 features; the test over halves in 6% of 150, and less in other cases).
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric
from torch_fidelity.metric_prc import KEY_METRIC_PRECISION, KEY_METRIC_RECALL, prc_features_to_metric
from torchmetrics.image.fid import FrechetInceptionDistance
from tqdm import tqdm

from debias_diffusion.errors import UserError
from debias_diffusion.files import path_digest
from debias_diffusion.models.weights import weights_digest
from debias_diffusion.sentences import split_sentences

from ..common.encoders import how_used
from ..common.intervals import mean_interval, paired_difference
from .networks import FID_FEATURES, RESIZE, ClsFeatures, InceptionFeatures, Picture, TwoTowerFeatures

HALVES = 200
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000  # torch-fidelity's
NEIGHBOURS = 3  # of precision and recall, torch-fidelity's
_FEWEST = 2 * (NEIGHBOURS + 1)  # pictures, for halves with as many neighbours
_ENOUGH_FOR_FID = 2048
_NORMAL = 1.959964  # standard errors of a 95% interval


# ---- scores of features


def fid(generated: Tensor, originals: Tensor) -> float:
    """The Fréchet distance of two sets of features, [N, D] and [M, D]; the order of the rows does not matter.

    Raises:
        UserError: fewer than two images on a side, which have no covariance.
    """
    if min(len(generated), len(originals)) < 2:
        raise UserError(
            f"FID needs at least 2 images on each side, got {len(generated)} generated and {len(originals)} "
            "original ones. Raise the limit, or set inception_weights and own_features to null to skip FID."
        )
    metric = FrechetInceptionDistance(feature=_Identity(generated.shape[1]))
    metric.update(originals.double(), real=True)
    metric.update(generated.double(), real=False)
    return max(metric.compute().item(), 0.0)  # rounding leaves a set and itself a little below


class _Identity(nn.Module):
    """Hands features on, in the place where torchmetrics expects the network that makes them."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def fast_fid(generated: Tensor, originals: Tensor) -> float:
    """The same number as `fid`, without matrices of D x D where there are fewer pictures than features.

    With centred features X [N, D] and Y [M, D] the trace of the root of the covariances' product is the sum of the
    singular values of X Y^T / sqrt((N - 1) (M - 1)), which is exact for any rank; where N > D the triangle R of X = Q R
    does as well as X. It takes halves in seconds that would take hours.
    """
    sides = [features.double() for features in (generated, originals)]
    means = [features.mean(dim=0) for features in sides]
    centred = [(x - mean) / math.sqrt(len(x) - 1) for x, mean in zip(sides, means, strict=True)]
    variance = sum(x.square().sum() for x in centred)
    x, y = (torch.linalg.qr(x, mode="r").R if len(x) > x.shape[1] else x for x in centred)
    root = torch.linalg.svdvals(x @ y.T).sum()
    return ((means[0] - means[1]).square().sum() + variance - 2 * root).item()


def kid(generated: Tensor, originals: Tensor) -> float:
    """torch-fidelity's kernel inception distance: the mean over subsets of the unbiased squared MMD, polynomial kernel.

    Where there are no more than 1,000 images the one subset is all of them. Being unbiased, it can be below 0, and is
    for a set and itself.
    """
    size = min(len(generated), len(originals), KID_SUBSET_SIZE)
    subsets = 1 if size == len(generated) == len(originals) else KID_SUBSETS
    scores = kid_features_to_metric(generated, originals, kid_subsets=subsets, kid_subset_size=size, verbose=False)
    return scores[KEY_METRIC_KID_MEAN]


def precision_and_recall(generated: Tensor, originals: Tensor) -> tuple[float, float]:
    """torch-fidelity's improved precision and recall (Kynkäänniemi et al. 2019), with 3 neighbours.

    Precision is the share of generated images that lie no further from some original than its third nearest original
    does; recall is the same the other way round. Needs at least 4 images on each side. On Inception's features these
    are not the numbers of torch-fidelity's command line, which takes a VGG-16 for them, as the paper does.
    """
    scores = prc_features_to_metric(generated, originals, prc_neighborhood=NEIGHBOURS, verbose=False)
    return scores[KEY_METRIC_PRECISION], scores[KEY_METRIC_RECALL]


def cosines(a: Tensor, b: Tensor) -> list[float]:
    """The cosine of each row of a [N, D] and its row of b [N, D]."""
    return nn.functional.cosine_similarity(a.double(), b.double(), dim=1).tolist()


def dino_score(generated: Tensor, originals: Tensor) -> float:
    """Mean cosine, in [-1, 1], of the features [N, D] of each generated image and its own original."""
    return float(np.mean(cosines(generated, originals)))


def clip_scores(images: Tensor, texts: Tensor) -> list[float]:
    """CLIPScore of each image's features [N, D] with its text's [N, D]: 100 * max(cosine, 0), as torchmetrics has it.

    Hessel et al. 2021 multiply by 2.5 instead, and set "A photo depicts" before the caption, which is not done here.
    """
    return [100 * max(cosine, 0.0) for cosine in cosines(images, texts)]


def _distances(generated: Tensor, originals: Tensor, names: dict[str, str], fid=fid) -> dict[str, float]:
    """The scores in `names`, "fid", "kid", "precision", "recall", each under the name that it has there."""
    found = {"fid": fid(generated, originals)}
    if "kid" in names:
        found["kid"] = kid(generated, originals)
    if "precision" in names and min(len(generated), len(originals)) > NEIGHBOURS:
        found["precision"], found["recall"] = precision_and_recall(generated, originals)
    return {names[score]: value for score, value in found.items()}


# ---- how sure they are


def halves(count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """`HALVES` times the positions of half of `count` pairs, drawn without replacement; the same for the same count."""
    random = np.random.default_rng(seed)
    for _ in range(HALVES):
        yield random.permutation(count)[: count // 2]


def standard_error(values: Sequence[float], count: int) -> float:
    """The standard error of a score of `count` pairs whose `values` over `halves(count)` are these."""
    half = count // 2
    return float(np.std(values, ddof=1)) * math.sqrt(half / (count - half))


def _interval(value: float, error: float, score: str) -> dict[str, float]:
    low, high = value - _NORMAL * error, value + _NORMAL * error
    bounded_below, bounded_above = not score.startswith("kid"), score.startswith(("precision", "recall"))
    return {
        "value": value,
        "low": max(low, 0.0) if bounded_below else low,
        "high": min(high, 1.0) if bounded_above else high,
    }


@dataclass
class PictureNumbers:
    """What is said of one encoder's pictures. JSON-ready: `asdict(numbers)`, and `PictureNumbers(**...)` back.

    Attributes:
        numbers: {score: {"value", "low", "high"}}, with the ends of the 95% interval, None where there are too few
            pictures for one. Scores whose network is not given are left out. In this order, if all are there: fid_2048,
            fid_64, kid_2048, precision_2048, recall_2048, fid_own, kid_own, precision_own, recall_own, dino_score,
            dinov2_score, clip_score (whole captions), clip_score_1, clip_score_2, ... (first sentences, second ones;
            with "pictures", how many captions have one).
        halves: {score: its values over `halves(pictures)`}, of distances between two sets of pictures.
        pictures: {score: its value for each picture}, of means over pictures; None where a caption has no such
            sentence.
        count: how many pictures.
        notes: for whoever reads the numbers.
    """

    numbers: dict[str, dict[str, float | None]]
    halves: dict[str, list[float]]
    pictures: dict[str, list[float | None]]
    count: int
    notes: list[str] = field(default_factory=list)


def compare(a: PictureNumbers, b: PictureNumbers) -> dict[str, dict[str, float | None]]:
    """The paired comparison of two encoders that drew the same captions, by score.

    Returns:
        {score: {"difference", a - b, "low", "high" (95% interval), "p" in [0, 1], two-sided}}; the last three are None
        where there are too few pictures. Of means over pictures, see `intervals.paired_difference`; of distances, see
        this module.

    Raises:
        ValueError: they are not of as many pictures, or not of the same scores.
    """
    if a.count != b.count or list(a.numbers) != list(b.numbers):
        raise ValueError("both must be of the same captions and scores")
    compared = {}
    for score in a.numbers:
        if score in a.pictures:
            both = [pair for pair in zip(a.pictures[score], b.pictures[score], strict=True) if None not in pair]
            compared[score] = paired_difference(*zip(*both, strict=True))
        else:
            compared[score] = _difference_of_distances(a, b, score)
    return compared


def _difference_of_distances(a: PictureNumbers, b: PictureNumbers, score: str) -> dict[str, float | None]:
    difference = a.numbers[score]["value"] - b.numbers[score]["value"]
    if not a.halves[score]:
        return {"difference": difference, "low": None, "high": None, "p": None}
    ahead = np.subtract(a.halves[score], b.halves[score])
    error = standard_error(ahead, a.count)
    p = math.erfc(abs(difference) / error / math.sqrt(2)) if error else float(difference == 0)
    return {
        "difference": difference,
        "low": difference - _NORMAL * error,
        "high": difference + _NORMAL * error,
        "p": p,
    }


# ---- networks and scores together


def score_titles(
    dino: str | None = None, dinov2: str | None = None, own_features: str | None = None, clip_score: str | None = None
) -> dict[str, str]:
    """Titles of the scores, for tables. They name the network, because another one's numbers compare with nothing."""
    titles = {"fid_2048": "FID (2048)", "fid_64": "FID (64)", "kid_2048": "KID"}
    titles |= {"precision_2048": "precision", "recall_2048": "recall"}
    titles |= {
        f"{score.lower()}_own": f"{score} ({_short(own_features)})" for score in ("FID", "KID", "precision", "recall")
    }
    titles["dino_score"] = f"DINO score ({_short(dino)})"
    titles["dinov2_score"] = f"DINOv2 score ({_short(dinov2)})"
    titles["clip_score"] = f"CLIPScore ({_short(clip_score)})"
    return titles


def _short(name: str | None) -> str | None:
    return Path(name).name if name and (os.path.isabs(name) or os.path.exists(name)) else name


def score_cell(number: dict[str, float | None]) -> str:
    """A score for a table, with its interval: three digits that count, because KID is in thousandths."""
    if number["low"] is None:
        return f"{number['value']:.3g}"
    return f"{number['value']:.3g} [{number['low']:.3g}, {number['high']:.3g}]"


@dataclass(frozen=True)
class Originals:
    """Features of original images: {kind: [N, D]}."""

    features: dict[str, Tensor]
    count: int


class PictureScores:
    """The networks that a configuration names, loaded, checked, and what they say of pictures.

    Args:
        inception_weights: see `InceptionFeatures`; for FID, KID, precision and recall.
        dino: see `ClsFeatures`; for the DINO score.
        dinov2: likewise, for the DINOv2 score.
        own_features: likewise, for FID, KID, precision and recall on its features.
        clip_score: see `TwoTowerFeatures`; for CLIPScore, of the whole caption and sentence by sentence.
        batch_size: pictures, or texts, shown to a network at once.
        device: where the networks run.

    Attributes:
        digests: of the networks' weights, None where there is none.
        depends: everything of the networks that decides a score.
        titles: of the scores, for tables (see `score_titles`).
        resize: how pictures were resized for each network, generated and original ones alike.
        notes: for whoever reads the scores; those of one encoder's pictures stand in its `PictureNumbers`.

    Raises:
        UserError: a network cannot be loaded, or none is named.
    """

    def __init__(
        self,
        *,
        inception_weights: str | None = None,
        dino: str | None = None,
        dinov2: str | None = None,
        own_features: str | None = None,
        clip_score: str | None = None,
        batch_size: int,
        device: torch.device,
    ):
        self.batch_size = batch_size
        self.inception = inception_weights and InceptionFeatures(inception_weights, device)
        named = {"own_features": own_features, "dino": dino, "dinov2": dinov2}
        self.networks = {option: ClsFeatures(name, device, option) for option, name in named.items() if name}
        self.clip = clip_score and TwoTowerFeatures(clip_score, device)
        self.titles = score_titles(dino=dino, dinov2=dinov2, own_features=own_features, clip_score=clip_score)
        self.digests = {
            "inception_weights": self.inception and path_digest(self.inception.file),
            **{option: weights_digest(self.networks[option].model) if name else None for option, name in named.items()},
            "clip_score": self.clip and weights_digest(self.clip.backbone),
        }
        configurations = {option: network.model.config.to_dict() for option, network in self.networks.items()}
        self.depends = {
            "networks": self.digests,
            "configurations": {option: its | {"_name_or_path": None} for option, its in configurations.items()},
            "clip": self.clip and how_used(self.clip.backbone),
        }
        self.resize = {option: RESIZE.format(size=network.size) for option, network in self.networks.items()}
        if self.inception:
            self.resize["inception_weights"] = RESIZE.format(size=self.inception.size)
        if self.clip:
            self.resize["clip_score"] = self.clip.resize
        self.notes = self._notes(clip_score)
        self._told: tuple[tuple[str, ...], _Told] | None = None
        if all(value is None for value in self.digests.values()):
            raise UserError(
                f"None of {', '.join(self.digests)} is given, which leaves no score. Give at least one, such as --dino "
                "facebook/dino-vits16."
            )

    def _notes(self, clip_score: str | None) -> list[str]:
        skipped = {"inception_weights": "FID with Inception", "dino": "The DINO score", "clip_score": "CLIPScore"}
        notes = [
            f"{what} was skipped, because {name} is null." for name, what in skipped.items() if not self.digests[name]
        ]
        if "own_features" in self.networks:
            notes.append("FID, KID, precision and recall of own_features compare with nothing published.")
        if "dinov2" in self.networks:
            size = self.networks["dinov2"].size
            notes.append(f"DINOv2 saw {size} x {size} pixels, its position table resized to them.")
        if self.clip:
            notes.append(f"CLIPScore is 100 * max(cosine, 0) with {_short(clip_score)}, as torchmetrics computes it.")
        return notes

    def of_originals(self, originals: Sequence[Picture]) -> Originals:
        """The originals' features, which serve every encoder."""
        return Originals(self._features(originals), len(originals))

    def _features(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        features = {}
        if self.inception:
            features |= {f"{n}": part for n, part in self.inception(pictures, self.batch_size).items()}
        return features | {option: network(pictures, self.batch_size) for option, network in self.networks.items()}

    def __call__(self, generated: Sequence[Picture], originals: Originals, captions: Sequence[str]) -> PictureNumbers:
        """All scores of the pictures, each with its own original and caption, in their order.

        Raises:
            UserError: there are too few pictures for FID.
            ValueError: there are not as many originals or captions.
        """
        if not len(generated) == originals.count == len(captions):
            raise ValueError(f"{len(generated)} pictures, {originals.count} originals and {len(captions)} captions")
        features, found = self._features(generated), PictureNumbers({}, {}, {}, len(generated))
        for kind, names in _distances_of(features).items():
            _add_distances(found, features[kind], originals.features[kind], names)
        if self.inception:
            found.notes += _notes_of_inception(found.count)
        for option, score in (("dino", "dino_score"), ("dinov2", "dinov2_score")):
            if option in features:
                _add_mean(found, score, cosines(features[option], originals.features[option]))
        if self.clip:
            self._add_clip_scores(found, generated, captions)
        return found

    def _add_clip_scores(self, found: PictureNumbers, generated: Sequence[Picture], captions: Sequence[str]) -> None:
        images, told = self.clip.of_pictures(generated, self.batch_size), self._tell(captions)
        for score, rows in told.rows.items():
            there = [place for place, row in enumerate(rows) if row is not None]
            values = clip_scores(images[there], told.features[[rows[place] for place in there]])
            by_place = dict(zip(there, values, strict=True))
            _add_mean(found, score, [by_place.get(place) for place in range(len(rows))])
        found.notes += told.notes

    def _tell(self, captions: Sequence[str]) -> "_Told":
        """The captions' features, once for all encoders."""
        if self._told is None or self._told[0] != tuple(captions):
            self._told = (tuple(captions), _Told.of(captions, self.clip, self.batch_size))
        return self._told[1]


@dataclass(frozen=True)
class _Told:
    """What captions and their sentences look like to a two-tower.

    Attributes:
        features: of all different texts, [T, D].
        rows: {score: each caption's row of `features`, None where it has no such sentence}.
        notes: what was cut.
    """

    features: Tensor
    rows: dict[str, list[int | None]]
    notes: list[str]

    @classmethod
    def of(cls, captions: Sequence[str], network: TwoTowerFeatures, batch_size: int) -> "_Told":
        sentences = [split_sentences(caption) for caption in captions]
        texts = {"clip_score": list(captions)}
        for number in range(max(map(len, sentences))):
            texts[f"clip_score_{number + 1}"] = [its[number] if number < len(its) else None for its in sentences]
        different = dict.fromkeys(text for column in texts.values() for text in column if text is not None)
        row_of = {text: row for row, text in enumerate(different)}
        rows = {score: [row_of.get(text) for text in column] for score, column in texts.items()}
        notes = []
        for what, group in (("captions", captions), ("sentences", [text for its in sentences for text in its])):
            if over := network.over_window(group):
                window = f"CLIPScore's window of {network.backbone.context_length} tokens"
                notes.append(f"{over} of {len(group)} {what} exceed {window} and were cut.")
        return cls(network.of_texts(list(different), batch_size), rows, notes)


def _distances_of(features: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """{kind of features: {score: its name}}, of the kinds that there are."""
    most = f"{max(FID_FEATURES)}"
    every = ("fid", "kid", "precision", "recall")
    kinds = {most: {score: f"{score}_{most}" for score in every}}
    kinds |= {f"{n}": {"fid": f"fid_{n}"} for n in FID_FEATURES if f"{n}" != most}
    kinds["own_features"] = {score: f"{score}_own" for score in every}
    return {kind: names for kind, names in kinds.items() if kind in features}


def _add_distances(found: PictureNumbers, generated: Tensor, originals: Tensor, names: dict[str, str]) -> None:
    values = _distances(generated, originals, names)
    drawn: dict[str, list[float]] = {score: [] for score in values}
    if found.count >= _FEWEST:
        for half in tqdm(halves(found.count), total=HALVES, desc=f"interval of {names['fid']}"):
            for score, value in _distances(generated[half], originals[half], names, fast_fid).items():
                drawn[score].append(value)
    else:
        found.notes.append(f"{', '.join(values)}: no interval, which needs at least {_FEWEST} pictures.")
    found.halves |= drawn
    for score, value in values.items():
        error = standard_error(drawn[score], found.count) if drawn[score] else None
        found.numbers[score] = _interval(value, error, score) if error is not None else _alone(value)


def _alone(value: float) -> dict[str, float | None]:
    return {"value": value, "low": None, "high": None}


def _add_mean(found: PictureNumbers, score: str, values: list[float | None]) -> None:
    there = [value for value in values if value is not None]
    low, high = mean_interval(there)
    found.pictures[score] = values
    found.numbers[score] = {"value": float(np.mean(there)), "low": low, "high": high}
    if len(there) < len(values) or score.startswith("clip_score_"):
        found.numbers[score]["pictures"] = len(there)


def _notes_of_inception(count: int) -> list[str]:
    subsets = f"{KID_SUBSETS} subsets of {KID_SUBSET_SIZE}" if count > KID_SUBSET_SIZE else f"one subset, all {count}"
    notes = [
        f"KID is over {subsets} images.",
        "Precision and recall are on Inception's features, as FID and KID are, and not on VGG-16's as in their paper.",
    ]
    if count < _ENOUGH_FOR_FID:
        notes.append(
            f"FID of 2048 features on {count} images is biased upwards; compare it only between runs of as many "
            f"images, or use at least {_ENOUGH_FOR_FID}."
        )
    return notes
