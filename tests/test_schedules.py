"""Prompts that change from step to step: A1111's grammar, and what the UNet is given at each of its calls.

data/schedules.json holds, for prompts and numbers of steps, what A1111's own parser gave: last steps and texts. It was
run as its `made_by` says; prompts on which its parser differs from run to run are left out.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from diffusers import HeunDiscreteScheduler, StableDiffusionXLControlNetPAGPipeline
from helpers import tiny_sdxl
from helpers.draw import draw, generators
from helpers.matrix import Pipelines
from helpers.tiny_sdxl import assemble

from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.text.schedules import find_schedules, last_steps, text_at

pytestmark = pytest.mark.usefixtures("no_grad")
DATA = json.loads((Path(__file__).parent / "data" / "schedules.json").read_text(encoding="utf-8"))
LONG = ", ".join(["red cat", "blue sofa", "old house"] * 12)  # two chunks


def test_the_texts_of_all_steps_are_those_of_a1111():
    assert len(DATA["schedules"]) > 60
    for prompt, steps, expected in DATA["schedules"]:
        texts = [[step, text_at(prompt, step, steps)] for step in last_steps(steps, prompt)]
        assert texts == expected, prompt
        assert find_schedules(prompt) or texts == [[steps, prompt]], prompt


def test_schedules_are_named_as_they_are_written():
    assert find_schedules("a ([b:[c|d]:2]:1.3) [e]", r"\[a|b\]", "[b:.5]") == ["[c|d]", "[b:[c|d]:2]", "[b:.5]"]
    assert text_at("[a:b:-1e999] [c:d:1e999]", 1, 4) == "b c"
    deep = "[" * 3000 + "a" + "|b]" * 3000
    assert find_schedules(deep) == [] and text_at(deep, 1, 4) == deep


# ---- what the UNet is given


@functools.cache
def of_class(name):
    both = Pipelines(f"{name}Pipeline")
    half = {"strength": 0.5, "num_inference_steps": 8} if "strength" in both.call else {}  # four calls; shares are of 8
    return both.ours.set_long_prompt(reading="a1111"), both.call | half


@pytest.fixture(scope="module")
def pipe():
    return of_class("StableDiffusionXL")[0]


def given(pipe, prompt, **call):
    """At each call, what the UNet and the ControlNet are given of the text."""
    seen = []

    def see(_, args, kwargs):
        pooled = (kwargs.get("added_cond_kwargs") or {}).get("text_embeds", torch.zeros(1))
        seen.append((kwargs["encoder_hidden_states"].clone(), pooled.clone()))

    models = [pipe.components[name] for name in ("unet", "controlnet") if name in pipe.components]
    hooks = [model.register_forward_pre_hook(see, with_kwargs=True) for model in models]
    try:
        draw(pipe, prompt, **{"num_inference_steps": 4, "output_type": "latent", **call})
    finally:
        for hook in hooks:
            hook.remove()
    count = len(models)
    return [seen[at : at + count] for at in range(0, len(seen), count)]


def same(first, second):
    """To roundings: all texts of a schedule are encoded in one batch."""
    pairs = [pair for both in zip(first, second, strict=True) for pair in zip(*both, strict=True)]
    return all(one.shape == other.shape and torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def check_each_call(pipe, prompt, texts, **call):
    """At call i the UNet is given what it is given in a plain call with texts[i]."""
    expected = {str(text): given(pipe, text, **call) for text in texts}
    for index, (at_call, text) in enumerate(zip(given(pipe, prompt, **call), texts, strict=True)):
        assert same(at_call, expected[str(text)][index]), (index, text)
        assert not any(same(at_call, other[index]) for name, other in expected.items() if name != str(text))


CLASSES = [f"StableDiffusionXL{task}" for task in ("", "Img2Img", "Inpaint", "ControlNet", "PAG")]
CLASSES += ["StableDiffusion", "StableDiffusionControlNet"]


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_is_given_the_text_of_each_call(name):
    # A1111 counts calls from 0, and a text ends with the call of its number.
    pipe, call = of_class(name)
    check_each_call(pipe, "a [red cat:blue sofa:2]", ["a red cat"] * 3 + ["a blue sofa"], **call)


TWO = ["a [red|blue] cat", "a [house::2] tree"]
TEXTS_OF_TWO = [["a red cat", "a house tree"]] * 2 + [["a blue cat", "a house tree"], ["a red cat", "a  tree"]]
HEUN = HeunDiscreteScheduler(**tiny_sdxl.BETAS)
CASES = {
    "alternating": ("a [red|blue|old] cat", [f"a {word} cat" for word in ("red", "red", "blue", "old")], {}),
    "images": ("a [cat:dog:1]", ["a cat"] * 2 + ["a dog"] * 2, {"num_images_per_prompt": 3, "guidance_scale": 1.0}),
    "batch": (TWO, TEXTS_OF_TWO, {"negative_prompt": ["grey", "old"], "generator": generators(2)}),
    "steps listed": ("a [cat:dog:0.5]", ["a cat"] * 2 + ["a dog"], {"timesteps": [900, 500, 1]}),
    # of three steps, two calls each, but for the last
    "heun": ("a [cat:dog:0.5]", ["a cat"] * 4 + ["a dog"], {"num_inference_steps": 3, "scheduler": HEUN}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_call_is_given_the_text_of_its_step(pipe, case):
    prompt, texts, call = CASES[case]
    call = dict(call)
    pipe = assemble(type(pipe), pipe.components, scheduler=call.pop("scheduler", pipe.scheduler))
    check_each_call(pipe.set_long_prompt(reading="a1111"), prompt, texts, **call)


def test_texts_of_one_prompt_have_equally_many_chunks(pipe):
    """As A1111 encodes them: an empty chunk follows the shorter."""
    plain = type(pipe)(**pipe.components).set_long_prompt(reading="a1111")
    short, empty = (plain.encode_prompt(text, do_classifier_free_guidance=False)[0] for text in ("a cat", ""))
    long = plain.encode_prompt(f"a {LONG}", do_classifier_free_guidance=False)[0]
    seen = given(pipe, f"a [cat:{LONG}:1]", guidance_scale=1.0)
    for step, expected in enumerate([torch.cat([short, empty], 1)] * 2 + [long] * 2):
        torch.testing.assert_close(seen[step][0][0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("steps", "entries"), [(4, (2, 2)), (5, (3, 2))])
def test_original_restores_the_mean_over_all_texts_of_a_prompt(pipe, steps, entries):
    """A1111 counts a text as often as its prompt changes to it."""
    plain = type(pipe)(**pipe.components)
    width = pipe.text_encoder.config.hidden_size
    states = {}
    for text, emphasis in (("(red:1.4) cat", "ignore"), ("(red:1.4) cat", "no_norm"), ("blue cat", "no_norm")):
        plain.set_long_prompt(reading="a1111", emphasis=emphasis)
        embeds = plain.encode_prompt(text, do_classifier_free_guidance=False)[0]
        states[text, emphasis] = embeds.split([width, embeds.shape[-1] - width], dim=-1)
    before, after, other = (torch.tensor([part.mean() for part in parts]) for parts in states.values())
    ratio = (entries[0] * before + entries[1] * other) / (entries[0] * after + entries[1] * other)
    seen = given(pipe, "[(red:1.4)|blue] cat", guidance_scale=1.0, num_inference_steps=steps)
    for step, text in ((1, "(red:1.4) cat"), (2, "blue cat")):
        parts = zip(states[text, "no_norm"], ratio, strict=True)
        expected = torch.cat([part * factor for part, factor in parts], dim=-1)
        torch.testing.assert_close(seen[step][0][0], expected, atol=1e-5, rtol=1e-5)


def test_a_scheduled_negative_prompt(pipe):
    plain, ugly = (given(pipe, "cat", negative_prompt=text) for text in ("grey", "old"))
    seen = given(pipe, "cat", negative_prompt="[grey:old:1]")
    assert same(seen[1], plain[1]) and same(seen[2], ugly[2]) and not same(seen[1], seen[2])
    # As in A1111, one that is empty at first is encoded, not zeros.
    first, last = (given(pipe, "cat", negative_prompt="[:old:2]")[at][0][0] for at in (0, 3))
    assert first[0].abs().sum() > 0
    torch.testing.assert_close(last, ugly[3][0][0], atol=1e-5, rtol=1e-5)
    seen = given(pipe, "cat", negative_prompt="[grey:old:1]", guidance_scale=1.0)
    assert same(seen[0], seen[3])


# ---- with the user's callback


def test_the_users_callback_reads_what_comes_next_and_may_overwrite_it(pipe):
    cat, dog = (given(pipe, text) for text in ("a cat", "a dog"))
    read = {}

    def overwrite(_, index, __, tensors):
        read[index] = tensors
        return {"prompt_embeds": torch.zeros_like(tensors["prompt_embeds"])} if index == 2 else {}

    names = ["latents", "prompt_embeds"]
    seen = given(pipe, "a [cat:dog:1]", callback_on_step_end=overwrite, callback_on_step_end_tensor_inputs=names)
    assert all(tensors.keys() == {*names} for tensors in read.values())
    for got, expected in ((read[0]["prompt_embeds"], cat[1][0][0]), (read[1]["prompt_embeds"], dog[2][0][0])):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (seen[3][0][0] == 0).all() and same(seen[3][0][1:], dog[3][0][1:])


# ---- what has no steps


@pytest.mark.parametrize("name", ["StableDiffusionXLAdapter", "StableDiffusionInstructPix2Pix", "AnimateDiff"])
def test_classes_that_cannot_change_embeddings_say_what_is_scheduled(name):
    pipe, call = of_class(name)
    with pytest.raises(ValueError, match=r"\[cat:dog:1\] changes from step to step"):
        draw(pipe, "a [cat:dog:1]", **call)


def test_a_class_whose_controlnet_would_go_on_with_the_first_text_says_so():
    parts = of_class("StableDiffusionXLControlNet")[0].components
    pipe = with_long_prompts(assemble(StableDiffusionXLControlNetPAGPipeline, parts)).set_long_prompt(reading="a1111")
    with pytest.raises(ValueError, match="changes from step to step"):
        draw(pipe, "a [cat:dog:1]", image=tiny_sdxl.picture())


def test_encoding_alone_and_other_readings(pipe):
    with pytest.raises(ValueError, match=r"\[cat\|dog\] changes from step to step"):
        pipe.encode_prompt("a [cat|dog]")
    layout = pipe.prompt_layout(f"a [cat:{LONG}:0.5]")
    assert layout.schedules == (f"[cat:{LONG}:0.5]",) and layout[:3] == (108, 154, (2, 2))
    assert layout.texts[0][0] == ("a cat", 2)  # at the first step
    with pytest.warns(UserWarning, match=r"'\[cat\|dog\]' does not change from step to step"):
        type(pipe)(**pipe.components).encode_prompt("a [cat|dog]")
