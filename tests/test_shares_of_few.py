"""A share of R@1 that rests on a few hits is not told as a number."""

import pytest
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_data import make_tiny_data

from debias_diffusion.eval import robustness
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness

WAYS = ("text_to_image", "image_to_text")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("few")
    data, images = make_tiny_data(folder, 40)
    clips = [save_tiny_clip(folder / f"clip-{seed}", seed=seed) for seed in range(2)]
    return evaluate_robustness(RobustnessConfig(clips, str(folder / "scores"), data, images))


def test_wide_shares_are_too_low_to_say(report):
    kept = {label: of["kept_without_summary_percent"] for label, of in report["encoders"].items()}
    wide = [
        part["high"] - part["low"] > 100 for of in kept.values() for part in of.values() if part["share"] is not None
    ]
    assert any(wide)  # of so few images with models that know nothing
    table = robustness.tables(report)[0]
    for (label, *cells), of in zip(table.rows, kept.values(), strict=True):
        for cell, way in zip(cells, WAYS, strict=True):
            low, high = of[way]["low"], of[way]["high"]
            assert (cell == "too low to say") == (low is not None and high - low > 100)
        if cells[0] == "too low to say":
            assert "finds too few images first to say" in report["encoders"][label]["in_words"]


def test_bars_of_a_figure_share_one_scale(report):
    axes = robustness.figures(report)["robustness.png"].axes
    recalls, shares = [axes[at] for at in (0, 1, 2, 4, 5, 6)], [axes[3], axes[7]]
    for panels in (recalls, shares):
        assert len({panel.get_ylim() for panel in panels}) == 1
