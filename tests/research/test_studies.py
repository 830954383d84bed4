"""The arithmetic of the studies, and the studies that are settings of `reproduce`."""

import pytest
import torch
from helpers.small_papers import STUDIES

from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.eval.images.drift import Moments, StatesReader
from debias_diffusion.pipelines.rendering.checkpoints import load_pipeline
from debias_diffusion.pipelines.rendering.renderer import ImagePrompt, Sampling, encode
from debias_diffusion.toyworld.grammar import caption
from research.options import ReproduceConfig
from research.reproduce.listing import reproduce
from research.reproduce.papers import read_tables
from research.studies import fix_clip, states

CPU = torch.device("cpu")
TRAININGS = {"toy": 6, "toy-test": 4, "toy-test-twice": 2, "fix-clip": 15}  # of each world's studies


@pytest.mark.parametrize("world", TRAININGS)
def test_every_study_has_settings_that_can_be_used(world, tmp_path, capsys):
    worlds = {name: "fix-clip" for name in read_tables(STUDIES) if name.startswith("fix-clip")}
    worlds |= {name: "toy" for name in read_tables(STUDIES) if name.startswith(("trade-off", "ablation"))}
    assert "fix-clip" in fix_clip.KINDS
    tables = [name for name in read_tables(STUDIES) if worlds.get(name, "toy-test") == world]
    for made in ("model", *(f"heads-{name}" for name in ("clip", "long-clip", "debias-clip"))):  # by scripts, in --root
        (tmp_path / made).mkdir()
        (tmp_path / made / "open_clip_config.json").write_text("{}")
    given = {"papers": str(STUDIES), "output": str(tmp_path / "new"), "root": str(tmp_path), "plan": True}
    reproduce(ReproduceConfig(tables or ["longer-training"], world=world, **given))
    assert f"to do: {TRAININGS[world]} trainings" in capsys.readouterr().out


# ---- states


def test_states_are_exchanged_shifted_and_mapped_back():
    """SOT, words, EOT and pads; the encoder's are the original's, rotated and shifted."""
    random = torch.Generator().manual_seed(0)
    original, shift = torch.randn(200, 8, generator=random), torch.randn(8, generator=random)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=random)).Q

    def of(drifted):
        moments = Moments(8)
        moments.add(drifted[1:], original[1:], 1.0)
        return states.States(torch.cat([original[:1], drifted[1:]]), original, eot=190, moments=moments)

    shifted = of(original + shift)
    words, pads = shifted.original_words(), shifted.original_pads()
    assert torch.equal(words, torch.cat([shifted.drifted[:1], original[1:190], shifted.drifted[190:]]))
    assert torch.equal(pads, torch.cat([shifted.drifted[:190], original[190:]]))
    torch.testing.assert_close(shifted.less_shift(), original, rtol=0, atol=1e-5)
    torch.testing.assert_close(shifted.shifted_original(), shifted.drifted, rtol=0, atol=1e-5)
    mapped = of(original @ rotation + 3).less_linear_map()
    torch.testing.assert_close(mapped, original, rtol=0, atol=0.02)


def test_unchanged_states_are_those_that_the_pipeline_reads():
    texts, sampling = [caption("development", index).text for index in range(2)], Sampling(steps=1, guidance_scale=3.0)
    prompts, name = [ImagePrompt(text) for text in texts], "toy/debias-clip"
    base, drifted = (
        encode(load_pipeline(states.BASE, encoder, CPU), prompts, sampling)[0][1] for encoder in (None, name)
    )
    reader = StatesReader.load(EncoderSpec.parse(name), CPU)
    changed = states.changed(base["prompt_embeds"], texts, reader, Moments(128), states.States.unchanged)
    torch.testing.assert_close(changed, drifted["prompt_embeds"], rtol=0, atol=1e-5)
    assert not torch.allclose(changed, base["prompt_embeds"], atol=0.1)
