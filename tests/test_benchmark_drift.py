"""benchmarks/studies/states.py: what it changes in the states that a UNet reads, and how it scores the images."""

import importlib
from pathlib import Path

import pytest
import torch

from debias_diffusion.encoders import EncoderSpec
from debias_diffusion.eval.images.drift import Moments, Reader
from debias_diffusion.pipelines.checkpoints import load_pipeline
from debias_diffusion.pipelines.rendering import ImagePrompt, Sampling, encode
from debias_diffusion.toyworld.grammar import caption

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def drift():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module("studies.states")


def random_states(drift, seed: int = 0):
    """Six positions: SOT, three words, EOT, a pad; the encoder's are the original's, moved by one shift."""
    random = torch.Generator().manual_seed(seed)
    original, shift = torch.randn(6, 8, generator=random), torch.randn(8, generator=random)
    drifted, moments = original.clone(), Moments(8)
    drifted[1:] += shift
    moments.add(drifted[1:], original[1:], 1.0)
    return drift.States(drifted, original, eot=4, maps=drift.Maps(lambda: moments))


def test_words_and_pads_are_exchanged_and_nothing_else(drift):
    states = random_states(drift)
    words, pads = states.original_words(), states.original_pads()
    for position in range(6):
        of_words = states.original if 1 <= position < 4 else states.drifted
        of_pads = states.original if position >= 4 else states.drifted
        assert torch.equal(words[position], of_words[position])
        assert torch.equal(pads[position], of_pads[position])


def test_a_fitted_shift_brings_shifted_states_back_and_the_original_s_away(drift):
    states = random_states(drift)
    torch.testing.assert_close(states.less_shift(), states.original, rtol=0, atol=1e-5)
    torch.testing.assert_close(states.shifted_original(), states.drifted, rtol=0, atol=1e-5)
    assert torch.equal(states.less_linear_map()[0], states.drifted[0])


def test_a_fitted_linear_map_brings_mapped_states_back(drift):
    random = torch.Generator().manual_seed(1)
    original, rotation = torch.randn(200, 8, generator=random), torch.linalg.qr(torch.randn(8, 8, generator=random)).Q
    drifted, moments = original @ rotation + 3, Moments(8)
    moments.add(drifted[1:], original[1:], 1.0)
    states = drift.States(drifted, original, eot=190, maps=drift.Maps(lambda: moments))
    torch.testing.assert_close(states.less_linear_map()[1:], original[1:], rtol=0, atol=0.02)


def test_unchanged_states_are_those_that_the_pipeline_reads(drift):
    texts, sampling = [caption("development", index).text for index in range(2)], Sampling(1, 3.0)
    prompts, name = [ImagePrompt(text) for text in texts], "toy/debias-clip"
    base, drifted = (encode(load_pipeline(drift.BASE, encoder, CPU), prompts, sampling) for encoder in (None, name))
    maps = drift.Maps(lambda: Moments(128))
    changed = drift.changed(
        base["prompt_embeds"], texts, Reader.load(EncoderSpec.parse(name), CPU), maps, drift.States.unchanged
    )
    torch.testing.assert_close(changed, drifted["prompt_embeds"], rtol=0, atol=1e-5)
    assert not torch.allclose(changed, base["prompt_embeds"], atol=0.1)
