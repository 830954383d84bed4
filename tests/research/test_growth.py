"""How similarity to the image grows with the caption: nested beginnings, the measures, and the evaluation."""

import numpy as np
import pytest
from helpers.reports import check_report

from debias_diffusion.data.toy_scenes import read_toy_scenes
from debias_diffusion.text.sentences import split_sentences
from research.evaluations.growth import beginning, correlations, evaluate_growth, in_order
from research.evaluations.options import GrowthConfig


def test_beginnings_are_nested_and_end_with_sentences():
    ends = [[len(beginning(part, 3, list("123456"[:n]))) for part in (1, 2, 3)] for n in range(1, 7)]
    assert ends == [[1, 1, 1], [1, 2, 2], [1, 2, 3], [2, 3, 4], [2, 4, 5], [2, 4, 6]]
    assert beginning(1, 2, list("12345")) == list("123")


def test_growth_in_closed_form():
    rising, falling, equal, noise = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.2, 0.2, 0.2], [0.2, 0.2 + 5e-7, 0.2 + 9e-7]
    bent, steep = [0.1, 0.3, 0.2], [0.0, 0.1, 0.9]  # sqrt(1/4) and sqrt(243/292)
    similarities = np.array([rising, falling, equal, noise, bent, steep]).T
    assert correlations(similarities) == pytest.approx([1, -1, 0, 0, 0.5, np.sqrt(243 / 292)])
    assert in_order(similarities).tolist() == [100, 0, 0, 0, 0, 100]
    assert in_order(similarities[:2]).tolist() == [100, 0, 0, 0, 100, 100]


@pytest.mark.usefixtures("blank_figures", "with_research")
def test_it_is_of_captions_with_enough_sentences(tmp_path):
    report = evaluate_growth(GrowthConfig(["toy/clip"], str(tmp_path), "toy/test", limit=4))
    check_report(report)
    lengths = [len(split_sentences(record.caption)) for record in read_toy_scenes("toy/test")[0].records[:4]]
    [numbers] = report["encoders"].values()
    for name, least in (("correlation of 4", 4), ("% in order, of 2", 2)):
        assert numbers[name]["captions"] == sum(length >= least for length in lengths) > 1
