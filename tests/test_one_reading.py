"""A prompt is read once, and every door reads it alike: `encode_texts`, options, and what wraps a pipeline."""

import inspect
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields

import numpy as np
import pytest
import torch
from diffusers import (
    AutoPipelineForImage2Image,
    AutoPipelineForInpainting,
    ModularPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLAutoBlocks,
    StableDiffusionXLPipeline,
)
from helpers import tiny_sdxl
from helpers.draw import LONG, SHORT, draw
from helpers.tiny_sdxl import assemble, assemble_copy

from debias_diffusion import encode_texts, last_states
from debias_diffusion.app.demo.request import Request
from debias_diffusion.app.prompt_options import GenerateConfig
from debias_diffusion.eval.options import FollowingConfig, GenerationConfig
from debias_diffusion.pipelines import (
    LongPromptOptions,
    StableDiffusionXLLongPromptPipeline,
    with_long_prompts,
    write_custom_pipeline,
)
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.text import encoding
from debias_diffusion.text.prompt import read
from debias_diffusion.text.sentences import sentence_ends
from debias_diffusion.text.tokens import clip_tokenizer

pytestmark = pytest.mark.usefixtures("no_grad")
READINGS = ("overlap", "separate", "cut", "a1111", "kohya", "comfyui")
# Three unlike kinds: long prose, parts, and what ends with the last token that fits.
TEXTS = (LONG * 2, "a (red:1.4) star BREAK a blue ring BREAK a green cross BREAK a <x>", "red " * 224 + "star")


@pytest.fixture(scope="module")
def parts():
    """Whose tokenizers know a textual inversion of three vectors."""
    pipe = assemble(StableDiffusionXLPipeline, tiny_sdxl.sdxl_parts(vocabulary=clip_tokenizer))
    tiny_sdxl.add_inversions(pipe, {"<x>": 3})
    return pipe.components


@pytest.fixture(scope="module")
def stock(parts):
    return assemble(StableDiffusionXLPipeline, parts)


@pytest.fixture
def pipe(stock):
    return with_long_prompts(stock)


def encoded(pipe, texts, length=None, **options):
    """`prompt_embeds` and pooled ones of SDXL by `encode_texts`."""
    pairs = ((pipe.text_encoder, pipe.tokenizer), (pipe.text_encoder_2, pipe.tokenizer_2))
    states, pooled = zip(*(encode_texts(*pair, texts, length, **options) for pair in pairs), strict=True)
    return torch.cat(states, dim=-1), pooled[1]


# ---- `encode_texts` is `encode_prompt`


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("emphasis", [None, "comfyui"])
def test_encode_texts_gives_what_encode_prompt_gives(pipe, reading, emphasis):
    for length in (None, 77 if reading == "cut" else 227 if reading == "kohya" else 462):
        pipe.set_long_prompt(reading=reading, emphasis=emphasis, positions=length)
        for texts in (*([text] for text in TEXTS), list(TEXTS), SHORT):
            expected, _, pooled, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False)
            got = encoded(pipe, texts, length, reading=reading, emphasis=emphasis)
            assert torch.equal(got[0], expected) and torch.equal(got[1], pooled)


def test_encode_texts_of_sd15_and_options_that_change_the_text():
    pipe = with_long_prompts(assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts()))
    how = {"reading": "separate", "emphasis": "comfyui", "breaks": "average"}
    pipe.set_long_prompt(**how)
    text = f"a (red:1.3) cat BREAK:2 {LONG}"
    expected, _ = pipe.encode_prompt(text, None, 1, False)
    got, pooled = encode_texts(pipe.text_encoder, pipe.tokenizer, text, states=last_states, **how)
    assert torch.equal(got, expected) and pooled is None


def test_an_empty_negative_prompt_is_zeros_under_a1111_in_sdxl_alone(pipe):
    sd15 = with_long_prompts(assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts()), reading="a1111")
    assert sd15.encode_prompt("a cat", None, 1, True, "")[1].any()
    assert not pipe.set_long_prompt(reading="a1111").encode_prompt("a cat", negative_prompt="")[1].any()


def test_the_end_of_a_text_is_never_lost(pipe):
    for reading in ("a1111", "comfyui"):
        for text, other in ((TEXTS[1], TEXTS[1].replace("<x>", "dog")), (TEXTS[2], TEXTS[2].replace("star", "ring"))):
            assert not torch.equal(encoded(pipe, text, reading=reading)[0], encoded(pipe, other, reading=reading)[0])
            with pytest.raises(ValueError, match="must be 77 or a multiple of 77 more"):
                encoded(pipe, text, 227, reading=reading)
    with pytest.raises(ValueError, match="takes 308 positions, .* does not fit the 231 positions"):
        encoded(pipe, TEXTS[1], 231, reading="a1111")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("a [red:blue:0.5] star", {"reading": "a1111"}, r"\[red:blue:0.5\] changes from step to step"),
        ("a", {"reading": "nonsense"}, "reading is 'nonsense', but must be overlap or separate or cut or a1111"),
        ("a", {"emphasis": "comfy"}, "emphasis is 'comfy', but must be None or none or ignore or original"),
        ("a", {"length": 50}, "positions is 50, but must be a whole number of at least 77"),
        (LONG, {"length": 77}, "does not fit the 77 positions"),
    ],
)
def test_what_encode_prompt_refuses_encode_texts_refuses(pipe, texts, options, message):
    with pytest.raises(ValueError, match=message):
        encode_texts(pipe.text_encoder, pipe.tokenizer, texts, **options)


def test_many_texts_are_encoded_in_batches(pipe, monkeypatch):
    texts, rows = [*TEXTS, SHORT] * 3, []
    at_once = encoded(pipe, texts)
    hook = pipe.text_encoder.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    monkeypatch.setattr(encoding, "ROWS_AT_ONCE", 7)
    for got, expected in zip(encoded(pipe, texts), at_once, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    hook.remove()
    assert max(rows) == 7 and len(rows) > 3


@pytest.mark.parametrize("reading", READINGS)
def test_special_tokens_that_are_typed_are_text(pipe, reading):
    encoders = [(pipe.tokenizer, 77), (pipe.tokenizer_2, 77)]
    options = LongPromptOptions(reading=reading)
    for text in ("a red star <|endoftext|> a blue ring", "<|startoftext|>", "a<|ENDOFTEXT|>b"):
        for plan in read([text], None, encoders, options).prompts.encoders:
            ids = plan.parts[0].tokens.ids
            assert len(ids) > 5 and not {49406, 49407} & {*ids}
            assert ids == plan.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    long = "a red star <|endoftext|> a blue ring. " + "A green cross. " * 40
    pooled = [
        pipe.set_long_prompt(reading=reading).encode_prompt(each, do_classifier_free_guidance=False)[2]
        for each in (long, long.replace("blue ring", "pink square"))
    ]
    assert not torch.equal(*pooled)


# ---- the plan


ROWS = [*range(1, 76), *range(78, 103)]  # of 77, each with a BOS and an EOS
WORDS = {"overlap": range(1, 101), "separate": range(1, 101), "cut": range(1, 76), "kohya": range(1, 101)}
WORDS |= {"a1111": ROWS, "comfyui": ROWS}


@pytest.mark.parametrize("reading", READINGS)
def test_words_are_the_positions_of_a_word_of_either_encoder(reading):
    encoders, options = [(clip_tokenizer(77), 77), (clip_tokenizer(77, "!"), 77)], LongPromptOptions(reading=reading)
    for first, second in (("a", "cat " * 100), ("cat " * 100, "a")):
        plan = read([[first, ""], [second, ""]], ["", None], encoders, options, batch_size=2)
        assert plan.prompts.words.nonzero().tolist() == [[0, at] for at in WORDS[reading]]
        assert not plan.negatives.words.any()


# ---- options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sharpen": "2"}, ValueError, "sharpen is '2', but must be a number above 0 and at most 4"),
        ({"positions": 227.0}, ValueError, "positions is 227.0, but must be a whole number of at least 77, or None"),
        ({"positions": True}, ValueError, "positions is True, but must be a whole number"),
        ({"strict": "no"}, ValueError, "strict is 'no', but must be False or True"),
        ({"zero_empty_negative": "yes"}, ValueError, "zero_empty_negative is 'yes', but must be None or False or True"),
        ({"redaing": "a1111"}, TypeError, "'redaing' is no option of long prompts, which are reading, emphasis"),
    ],
)
def test_a_wrong_option_is_told_at_every_door(stock, pipe, options, error, message):
    doors = (
        lambda: with_long_prompts(stock, **options),
        lambda: pipe.set_long_prompt(**options),
        lambda: pipe("a cat", long_prompt=options),
        lambda: LongPromptOptions.of(options),
    )
    for door in doors:
        with pytest.raises(error, match=message):
            door()
    with pytest.raises(ValueError, match="the options are 'a1111', but must be named, such as {'reading': 'a1111'}"):
        pipe("a cat", long_prompt="a1111")


def test_options_stand_in_signatures_and_the_wrapper_takes_them(stock, pipe):
    names = [field.name for field in fields(LongPromptOptions)]
    assert list(inspect.signature(with_long_prompts).parameters) == ["pipe", *names]
    assert list(inspect.signature(pipe.set_long_prompt).parameters) == names
    assert {"long_prompt", "words"} <= inspect.signature(pipe.__call__).parameters.keys()
    ours = with_long_prompts(stock, reading="a1111", emphasis="a1111")
    assert ours._long_prompt == LongPromptOptions(reading="a1111", emphasis="original")
    assert with_long_prompts(ours)._long_prompt is ours._long_prompt
    assert with_long_prompts(ours, strict=True)._long_prompt == LongPromptOptions(strict=True)
    assert pipe.set_long_prompt(strict=True).set_long_prompt(sharpen=1.5)._long_prompt == LongPromptOptions(sharpen=1.5)


def test_options_of_a_call_are_that_calls_and_that_threads(pipe):
    """Another thread reads with the pipeline's own, during the call."""
    own, seen = pipe._long_prompt, []

    def look(*_):
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(pipe.encode_prompt, LONG).result()[0].shape[1])
        seen.append(pipe.encode_prompt(LONG)[0].shape[1])
        return {}

    pipe(LONG, num_inference_steps=1, long_prompt={"reading": "a1111"}, callback_on_step_end=look, output_type="latent")
    assert seen == [152, 154] and pipe._long_prompt is own and pipe.prompt_layout(LONG).positions == 152


def test_threads_that_share_models_draw_with_options_of_their_own(stock):
    """Eight images by four pipelines of one UNet, each with the options of its call."""
    prompt, options = f"a (red:1.4) cat. {LONG}", [{}, {"reading": "a1111"}, {"sharpen": 2.0}, {"emphasis": "comfyui"}]
    pipes = [assemble(StableDiffusionXLLongPromptPipeline, stock.components) for _ in options]
    for each in pipes:
        each.scheduler = type(each.scheduler).from_config(each.scheduler.config)
    alone = [draw(each, prompt, long_prompt=own) for each, own in zip(pipes, options, strict=True)]
    assert len({image.tobytes() for image in alone}) == 4
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            drawn = pool.map(lambda each, own: draw(each, prompt, long_prompt=own), pipes, options)
            assert all(map(np.array_equal, drawn, alone))


# Each option of an image, and a value that must change it.
CHANGES = {
    "steps": 3,
    "guidance_scale": 4.5,
    "height": 80,
    "width": 80,
    "sharpen": 1.7,
    "layer": "last",
    "scheduler": "DDIMScheduler",
    "karras": True,
    "clip_skip": 3,
    "emphasis": "ignore",
    "breaks": "average",
    "zero_empty_negative": True,
}
BASE = {"base": "toy/sdxl", "device": "cpu"}
EVALUATED = BASE | {"encoders": ["original"], "output": "runs/none"}
DOORS = {
    "generate": lambda **given: GenerateConfig("a cat", **BASE, **given),
    "evaluate generation": lambda **given: GenerationConfig(data="toy/test", **EVALUATED, **given),
    "evaluate following": lambda **given: FollowingConfig(
        prompts="toy/test", judge="toy/checker", **EVALUATED, **given
    ),
    "demo": lambda **given: Request("a cat", ["original"], **given),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_option_of_an_image_arrives(door):
    """In what the renderer draws by: whatever the command takes changes it."""

    def settings(**given) -> dict:
        config = vars(DOORS[door](**given))
        sampling = asdict(Sampling.of(config | {"scheduler": None} if door == "demo" else config))
        return sampling | sampling.pop("long_prompt")

    # The toy has one size, and the demo names schedulers in its own way.
    own = {"demo": {"scheduler"}, "generate": set()}.get(door, {"height", "width"})
    plain, taken = settings(), {field.name for field in fields(DOORS[door]())} & CHANGES.keys() - own
    assert len(taken) >= 6
    for name in taken:
        changed = settings(**{name: CHANGES[name]})
        assert changed[name] == CHANGES[name] != plain[name], name


def test_options_change_what_a_pipeline_draws(pipe):
    """Each option of `LongPromptOptions`, at every door of a pipeline: set, wrapped, and of one call."""
    prompt = f"a (red:1.4) cat! BREAK {LONG}"
    changes = {"reading": "separate", "emphasis": "comfyui", "positions": 302, "split_special_tokens": True}
    changes |= {"zero_empty_negative": False, "sharpen": 2.0}
    pipe.register_to_config(force_zeros_for_empty_prompt=True)
    plain = draw(pipe, prompt)
    for name, value in changes.items():
        expected = draw(with_long_prompts(pipe, **{name: value}), prompt)
        assert not np.array_equal(expected, plain), name
        assert np.array_equal(draw(pipe, prompt, long_prompt={name: value}), expected)
    averaged = {"emphasis": "comfyui", "breaks": "average"}
    assert not np.array_equal(
        draw(pipe, prompt, long_prompt=averaged),
        draw(pipe, prompt, long_prompt={"emphasis": "comfyui"}),
    )
    with pytest.raises(ValueError, match="`strict` allows one"):
        draw(pipe, prompt, long_prompt={"strict": True})
    skip, negative = {"clip_skip": 1, "negative_prompt": "grey"}, {"negative_clip_skip": True}
    assert not np.array_equal(draw(pipe, prompt, **skip), draw(pipe, prompt, **skip, long_prompt=negative))


# ---- what A1111 takes out


@pytest.mark.parametrize(
    ("prompt", "read_as", "taken_out"),
    [
        ("aspect ratio 16:9", "aspect ratio 16", (":9",)),
        ("smile, :3", "smile, ", (":3",)),
        ("a castle :  -.5 \n", "a castle", (":  -.5",)),
        ("a cat:1.2 AND a dog:0.8 AND a bird", "a cat AND a dog AND a bird", (":1.2", ":0.8")),
        ("a [cat:dog:2]:1.5", "a [cat:dog:2]", (":1.5",)),
        ("a cat:1.2 <lora:x:1>", "a cat", ("<lora:x:1>", ":1.2")),
        ("a :5 b", "a :5 b", ()),
        ("a cat:1e1", "a cat:1e1", ()),
        ("a BAND:2AND", "a BAND:2AND", ()),
    ],
)
def test_a1111_takes_a_number_at_the_end_out(pipe, prompt, read_as, taken_out):
    """Of positive prompts. Forge's and A1111's own code gave the same conditioning for 25 such prompts."""
    pipe.set_long_prompt(reading="a1111")
    layout, expected = pipe.prompt_layout(prompt), pipe.prompt_layout(read_as)
    assert layout.taken_out == taken_out and layout.texts == expected.texts
    numbers = [each for each in taken_out if each[0] == ":"]
    assert [f"{each!r} is taken out, as in A1111" in " ".join(layout.warnings) for each in numbers[-1:]] == [
        True
    ] * bool(numbers)
    _, negative, _, _ = pipe.encode_prompt("a", negative_prompt="masterpiece:1.2")
    assert not torch.equal(negative, pipe.encode_prompt("a", negative_prompt="masterpiece")[1])


# ---- wrappers


def test_autopipeline_says_that_it_cuts(pipe):
    for auto in (AutoPipelineForImage2Image, AutoPipelineForInpainting):
        with pytest.warns(UserWarning, match="cuts prompts: wrap it by with_long_prompts") as warned:
            auto.from_pipe(pipe)
        assert {warning.filename for warning in warned} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert StableDiffusionXLLongPromptPipeline(**pipe.components).components.keys() == pipe.components.keys()


def test_an_ip_adapter_that_is_loaded_into_the_wrapped_pipeline_is_used():
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes, image_size=32, patch_size=16, projection_dim=24))
    stock = assemble_copy(StableDiffusionXLPipeline, tiny_sdxl.sdxl_parts())
    ours = with_long_prompts(stock)
    adapter = tiny_sdxl.ip_adapter(stock.unet)
    stock.register_modules(image_encoder=vision.eval(), feature_extractor=CLIPImageProcessor(size=32, crop_size=32))
    stock.load_ip_adapter(adapter, subfolder=None, weight_name=None, image_encoder_folder=None)
    first, second = (
        draw(ours, LONG, ip_adapter_image=image) for image in (tiny_sdxl.picture(), None or tiny_sdxl.picture(1))
    )
    assert ours.image_encoder is stock.image_encoder and not np.array_equal(first, second)


def test_a_modular_pipeline_says_when_it_is_saved_that_it_will_cut(parts, tmp_path):
    pipe = StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.update_components(**{name: part for name, part in parts.items() if part is not None})
    ours = with_long_prompts(pipe, reading="a1111")
    inputs = {param.name: param.default for param in ours.blocks.inputs}
    assert inputs["reading"] == "a1111" and inputs["positions"] is None
    with pytest.raises(ValueError, match=r"`with sharpened\(pipe.unet, 2\)"):
        with_long_prompts(pipe, sharpen=1.5)
    with pytest.warns(UserWarning, match="wrap it again by with_long_prompts"):
        ours.save_pretrained(str(tmp_path))
    again = ModularPipeline.from_pretrained(str(tmp_path))
    assert type(again.blocks) is StableDiffusionXLAutoBlocks  # which is why


def test_an_exported_pipeline_has_no_name_twice_and_reads_numbers(tmp_path):
    """Its modules stand in one file: a name of two of them would be the later one's in both."""
    source = write_custom_pipeline(tmp_path / "pipeline.py").read_text()
    names = re.findall(r"^(?:(?:def|class) )?(\w+)(?:[(:]| = )", source, re.MULTILINE)
    assert len(names) > 50 and sorted({name for name in names if names.count(name) > 1}) == []
    space: dict = {"__name__": "exported"}
    exec(compile(source, "pipeline.py", "exec"), space)
    text = "A book lies open at fig. 3 on the wall. A cat."
    assert space["sentence_ends"](text) == sentence_ends(text) == [40, 46]
