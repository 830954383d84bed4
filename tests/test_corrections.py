"""The arithmetic of benchmarks/corrections.py, and that its hook moves what a pipeline reads."""

import importlib
from pathlib import Path

import pytest
import tiny_sdxl
import torch

from debias_diffusion.eval.pictures.drift import Moments
from debias_diffusion.toyworld.checker import compare
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES, scene

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def corrections():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module("corrections")


def test_a_fitted_shift_brings_shifted_states_back(corrections):
    encoder, ids = tiny_sdxl.text_encoder().eval(), torch.arange(1, 13)[None]
    with torch.no_grad():
        before = encoder(ids, output_hidden_states=True)
        shift, moments = torch.randn(32, generator=torch.Generator().manual_seed(0)), Moments(32)
        states = before.hidden_states[-2][0]
        moments.add(states[1:] + shift, states[1:], 1.0)
        hook = encoder.register_forward_hook(corrections.corrected(*moments.shift()))
        after = encoder(ids, output_hidden_states=True)
        hook.remove()
    expected = before.hidden_states[-2].clone()
    expected[:, 1:] -= shift
    torch.testing.assert_close(after.hidden_states[-2], expected, rtol=0, atol=1e-5)
    for place in (0, 1, -1):
        assert torch.equal(after.hidden_states[place], before.hidden_states[place])
    assert len(after.hidden_states) == len(before.hidden_states)


def test_scores_are_shares_of_objects_and_of_empty_places(corrections):
    good = [compare(render(scene("test", index)), scene("test", index)) for index in range(3)]
    bad = [compare(render(scene("test", index + 4)), scene("test", index)) for index in range(3)]
    rows = {("x", corrections.AS_IT_IS): bad, ("x", "less one shift"): good}
    before, after = corrections.score(rows)
    objects = sum(len(scene("test", index).things) for index in range(3))
    assert after["objects_right"] == 100 and after["empty_filled"] == 0
    correct = sum(sum(seen.correct.values()) for seen in bad)
    assert before["objects_right"] == pytest.approx(100 * correct / objects)
    invented = sum(len(seen.invented) for seen in bad)
    assert before["empty_filled"] == pytest.approx(100 * invented / (3 * len(PLACES) - objects)) and invented
    assert after["gain"]["difference"] == pytest.approx(100 - before["objects_right"])
    shown = corrections.as_markdown([before, after])
    assert "| x | as it is |" in shown and "| x | less one shift | 100.0 | 0.0 | +" in shown
