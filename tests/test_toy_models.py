"""The toy world's picture side: checker, prompts, and what the UNet and the captioner learn from."""

import json
import random
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.untrained_toys import untrained_models
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from debias_diffusion.errors import UserError
from debias_diffusion.models import shipped
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.tokens import load_tokenizer
from debias_diffusion.toymodels import prepared_unet, unet
from debias_diffusion.toymodels.vae import SIZE, as_input, picture_tensor
from debias_diffusion.toyworld.checker import UNCLEAR, compare, read_image
from debias_diffusion.toyworld.grammar import STYLES, short_prompt
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES, Scene, Thing, draw_scene, generator

LABELLED = Path(__file__).parent / "labelled"
scenes = st.integers(0, 2**40).map(lambda seed: draw_scene(random.Random(seed), 1, 9))

# ---- checker


@given(scenes, st.sampled_from([48, 64, 96]), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60)
def test_the_checker_reads_rendered_and_blurred_pictures(its, size, blur):
    seen = read_image(render(its, size).filter(ImageFilter.GaussianBlur(blur * size / 48))).objects
    there = {thing.place: thing for thing in its.things}
    assert seen == {place: there.get(place) for place in PLACES}


def test_an_object_counts_by_kind_colour_and_place_and_not_by_size():
    asked = Scene("grey", (Thing("star", "red", "small", "top"), Thing("ring", "blue", "large", "left")))
    for things, correct in (
        (asked.things, [True, True]),
        ([Thing("star", "red", "large", "top"), Thing("ring", "green", "large", "left")], [True, False]),
        ([Thing("cross", "red", "small", "top"), Thing("ring", "blue", "large", "centre")], [False, False]),
        ([], [False, False]),
    ):
        assert list(compare(render(Scene("grey", tuple(things)), SIZE), asked).correct.values()) == correct
    drawn = (Thing("star", "red", "large", "top"), Thing("cross", "pink", "small", "bottom"))
    comparison = compare(render(Scene("black", drawn), SIZE), asked)
    assert comparison.sizes == {"top": False, "left": False} and comparison.filled == ("top", "bottom")
    assert comparison.invented == ("bottom",) and not comparison.background
    noise = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    assert set(read_image(Image.fromarray(noise)).objects.values()) == {UNCLEAR}


def test_the_checker_agrees_with_labels_given_by_looking():
    """104 drawings of two toy SDXLs, labelled without sight of their prompts; what could not be told is "unsure"."""
    objects, empty = [], []
    for name, labels in json.loads((LABELLED / "labels.json").read_text()).items():
        with Image.open(LABELLED / name) as picture:
            seen = read_image(picture).objects
        for place, thing in seen.items():
            if place not in labels:
                empty.append(thing is None)
            elif labels[place] != "unsure":
                objects.append(isinstance(thing, Thing) and f"{thing.colour} {thing.kind}" == labels[place])
    assert (len(objects), len(empty)) == (372, 505)
    assert np.mean(objects) > 0.95 and np.mean(empty) > 0.99


def test_short_prompts_name_all_their_objects_within_77_tokens():
    tokenizer = load_tokenizer(shipped.WEIGHTS / "clip" / "tokenizer")
    for index, style in product(range(60), STYLES):
        its, prompt = short_prompt("development", index, style)
        assert {thing.place for thing in its.things} == set(prompt.first_mentions()) and 1 <= len(its.things) <= 3
        assert len(tokenizer(prompt.text).input_ids) <= 77


@pytest.fixture(scope="module")
def pipe():
    """The toy SDXL in full precision, untrained."""
    return untrained_models()[1]


def test_weights_that_are_not_complete_are_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "WEIGHTS", tmp_path)
    (tmp_path / "clip").mkdir()
    with pytest.raises(UserError, match=r"'toy/clip' is not in this installation.*toymodels\.build"):
        load_backbone("toy/clip")


def test_what_the_unet_learns_from_is_what_the_pipeline_makes(pipe):
    pairs = unet.encode_pairs(pipe, 3)
    _, caption = unet.draw_pair(2)
    hidden_states, _, pooled, _ = pipe.encode_prompt([caption.text.lower()], do_classifier_free_guidance=False)
    for name, expected in (("hidden_states", hidden_states), ("pooled", pooled)):
        torch.testing.assert_close(pairs[name][2].float(), expected[0], atol=0.05, rtol=0.05)
    with torch.inference_mode():
        pictures = as_input(picture_tensor([render(unet.draw_pair(2)[0], SIZE)]))
        latents = pipe.vae.encode(pictures).latent_dist.mean * pipe.vae.config.scaling_factor
    torch.testing.assert_close(pairs["latents"][2].float(), latents[0], atol=0.1, rtol=0.05)


def test_two_chunks_are_joined_as_the_pipeline_joins_them(pipe):
    """Of both encoders, or of the second one beside a first that reads all at once."""
    joined = prepared_unet.encode_pairs_in_chunks(pipe, 12, start=7)
    width, at_once, close = pipe.text_encoder.config.hidden_size, [], dict(atol=0.05, rtol=0.05)
    for i in range(12):
        rng = generator("train", 7 + i, "windows")
        chunks = list(prepared_unet.chunks_of(unet.draw_pair(7 + i)[1], pipe.tokenizer, rng))
        whole = " ".join(chunks).strip()
        assert whole.endswith(".") and len(pipe.tokenizer(whole).input_ids) <= 77
        states, _, pooled, _ = pipe.encode_prompt([*chunks, "", whole], do_classifier_free_guidance=False)
        one = len(pipe.tokenizer(chunks[0]).input_ids) - 2
        first, second, empty, both = states  # BOS of the first, both texts, EOS and pads of the second, an empty one's
        expected = torch.cat([first[: 1 + one], second[1:], *[empty[1:]] * 2])[:152]
        read_at_once = torch.cat([both, *[empty[1:]] * 2])[:152, :width]
        hidden_states = joined["hidden_states"][i].float()
        torch.testing.assert_close(hidden_states[:, width:], expected[:, width:], **close)
        torch.testing.assert_close(joined["pooled"][i].float(), pooled[0], **close)
        at_once.append(not torch.allclose(hidden_states[:, :width], expected[:, :width], **close))
        assert not at_once[-1] or torch.allclose(hidden_states[:, :width], read_at_once, **close)
    assert 0 < sum(at_once) < 12


def test_the_unets_loss_is_the_error_of_v_and_is_zero_for_the_right_answer(pipe):
    one = {name: tensor[:1] for name, tensor in unet.encode_pairs(pipe, 1).items()}
    scheduler, asked, latents = unet.DDPMScheduler.from_config(pipe.scheduler.config), {}, one["latents"].float()

    class Oracle(torch.nn.Module):  # knows the one picture there is, and so v
        def forward(self, noisy, times, encoder_hidden_states, added_cond_kwargs):
            asked.update(text=encoder_hidden_states, pooled=added_cond_kwargs["text_embeds"])
            signal = scheduler.alphas_cumprod[times].view(-1, 1, 1, 1)
            noise = (noisy - signal.sqrt() * latents) / (1 - signal).sqrt()
            return SimpleNamespace(sample=signal.sqrt() * noise - (1 - signal).sqrt() * latents)

    loss = unet.denoising_loss(SimpleNamespace(unet=Oracle(), scheduler=pipe.scheduler), 400, 0, compiled=False)
    assert loss(one, 0) < 1e-3
    left_out = asked["text"].abs().amax((1, 2)) == 0
    assert 0.05 < left_out.float().mean() < 0.15
    assert torch.equal(left_out, asked["pooled"].abs().amax(1) == 0)
    loss(one, 0, lambda states, rng: states + 1)
    assert (asked["text"][~left_out] - 1).allclose(one["hidden_states"].float())


def test_the_package_is_small_and_its_models_are_good():
    assert sum(file.stat().st_size for file in shipped.WEIGHTS.rglob("*.safetensors")) < 24_000_000
    scores = json.loads((shipped.WEIGHTS / "scores.json").read_text())
    assert scores["checker"]["rendered"]["objects"] >= 0.98
    drawn = scores["toy/sdxl"]["plain"]
    assert all(shipped.shipped(name) != name for name in shipped.NAMES)
    assert drawn["objects"] >= 0.95 and drawn["filled"] <= 0.03 and drawn["background"] >= 0.97
