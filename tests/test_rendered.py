"""Images of several encoders for an evaluation: like stock SDXL where prompts are cut, and shared by processes."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import aligned, load
from helpers.ranks import forked
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.generation import GenerationConfig
from debias_diffusion.eval.images.rendered import folder_names, image_task, render_all, rendering_settings
from debias_diffusion.eval.session import Processes
from debias_diffusion.pipelines import rendering
from debias_diffusion.pipelines.png import read_settings

# Of 77, 152 and 227 positions, in mixed order.
PROMPTS = [
    " ".join([f"Number {index}.", *["A cat, a dog and a bird sit on the wide red sofa."] * sentences])
    for index, sentences in enumerate([1, 12, 1, 8, 2])
]
STEPS = 2


@pytest.fixture(scope="module")
def base(sdxl_folder) -> str:
    return str(sdxl_folder)


@pytest.fixture(scope="module")
def long_encoder(long_clip_folder) -> str:
    return str(long_clip_folder)


def config_of(folder, base, *encoders, **settings) -> GenerationConfig:
    values = {"base": base, "output": str(folder), "data": "", "steps": STEPS, "device": "cpu"} | settings
    return GenerationConfig(encoders=list(encoders) or ["cut:original"], **values)


def rendered(folder, base, *encoders, prompts=PROMPTS, processes=None, **settings) -> list[list[Path]]:
    """The files of each encoder."""
    config = config_of(folder, base, *encoders, **settings)
    tasks = [image_task(config, f"{index:06}", prompt, index) for index, prompt in enumerate(prompts)]
    images, _ = render_all(config, processes or Processes("cpu"), tasks)
    return [own.files for own in images.values()]


def pixels(files) -> list[np.ndarray]:
    return [np.asarray(Image.open(file)).astype(int) for file in files]


def stock(base) -> StableDiffusionXLPipeline:
    return aligned(load(StableDiffusionXLPipeline, base))


@pytest.fixture(scope="module")
def both(base, long_encoder, tmp_path_factory) -> list[list[Path]]:
    return rendered(tmp_path_factory.mktemp("both"), base, "cut:original", long_encoder)


def test_encoders_of_77_positions_read_what_stock_sdxl_reads(both, base, tmp_path):
    remarks, handler = [], logging.Handler()
    handler.emit = remarks.append
    logging.getLogger("diffusers").addHandler(handler)
    (again,) = rendered(tmp_path / "again", base, prompts=PROMPTS[:2])
    assert not remarks  # of prompts cut, only where nobody asked for it are they worth reading
    pipe = stock(base)
    for index, (prompt, file) in enumerate(zip(PROMPTS, both[0], strict=True)):
        noise = torch.Generator().manual_seed(index)
        expected = pipe(prompt, num_inference_steps=STEPS, guidance_scale=7.0, generator=noise).images[0]
        assert np.array_equal(np.asarray(expected), np.asarray(Image.open(file)))
    assert remarks and [file.read_bytes() for file in again] == [file.read_bytes() for file in both[0][:2]]
    logging.getLogger("diffusers").removeHandler(handler)


def test_the_last_layer_is_read_after_the_final_norm_and_pooled_embeddings_stay(both, base, tmp_path):
    ((file,),) = rendered(tmp_path / "last", base, prompts=PROMPTS[:1], layer="last")
    pipe, states = stock(base), []
    for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
        ids = tokenizer(PROMPTS[0], padding="max_length", max_length=77, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = encoder(ids, output_hidden_states=True)
        assert not torch.equal(output.last_hidden_state, output.hidden_states[-1])  # which has no norm
        states.append(output.last_hidden_state)
    embeddings = {"prompt_embeds": torch.cat(states, dim=-1), "pooled_prompt_embeds": output.text_embeds}
    assert pipe.config.force_zeros_for_empty_prompt
    zeros = {f"negative_{name}": torch.zeros_like(embedding) for name, embedding in embeddings.items()}
    noise = torch.Generator().manual_seed(0)
    image = pipe(**embeddings, **zeros, num_inference_steps=STEPS, guidance_scale=7.0, generator=noise).images[0]
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(file)))
    assert not np.array_equal(*pixels([file, both[0][0]]))
    assert [read_settings(path).get("layer") for path in (file, both[0][0])] == ["last", None]


def test_scheduler_and_size_are_those_asked_for(base, tmp_path):
    settings = {"scheduler": "DDIMScheduler", "height": 48, "width": 80}
    ((file,),) = rendered(tmp_path / "ddim", base, prompts=PROMPTS[:1], **settings)
    pipe, noise = stock(base), torch.Generator().manual_seed(0)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    options = {"num_inference_steps": STEPS, "guidance_scale": 7.0, "height": 48, "width": 80}
    image = pipe(PROMPTS[0], generator=noise, **options).images[0]
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(file))) and image.size == (80, 48)
    assert read_settings(file).items() >= (settings | {"scheduler": "DDIM"}).items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduler": "DDIM"}, "Unknown scheduler 'DDIM'. .*Choose from: EulerDiscreteScheduler"),
        ({"width": 2**40}, "at most 89,478,485 can be drawn"),
    ],
)
def test_settings_of_no_image_are_refused(base, settings, message):
    values = {"encoders": ["cut:original"], "base": base, "output": "results", "data": ""} | settings
    with pytest.raises(UserError, match=message):
        GenerationConfig(**values)


def test_prefix_and_seed_are_those_of_the_settings(both, base, tmp_path):
    (moved,) = rendered(tmp_path / "seed", base, prompts=PROMPTS[:1], seed=2)
    (written,) = rendered(tmp_path / "written", base, prompts=["", "", f"photo, 8k. {PROMPTS[0]}"])
    (prefixed,) = rendered(tmp_path / "prefix", base, prompts=PROMPTS[:1], prefix="photo, 8k. ", seed=2)
    assert np.array_equal(*pixels([prefixed[0], written[2]]))
    assert not np.array_equal(*pixels([moved[0], both[0][0]]))
    assert not np.array_equal(*pixels([moved[0], prefixed[0]]))


def test_the_second_encoder_overlaps_beside_a_longer_one_unless_its_name_says_otherwise(base, long_encoder, tmp_path):
    names = [prefix + long_encoder for prefix in ("", "overlap:", "separate:")]
    settings = {"prompts": PROMPTS[:2]}
    alone, overlap, chunks = (
        pixels(rendered(tmp_path / str(number), base, name, **settings)[0]) for number, name in enumerate(names)
    )
    assert all(map(np.array_equal, alone, overlap))
    assert [np.array_equal(*pair) for pair in zip(alone, chunks, strict=True)] == [True, False]


def test_images_rendered_at_once_are_those_rendered_one_by_one(both, base, long_encoder, tmp_path):
    together = rendered(tmp_path, base, "cut:original", long_encoder, images_at_once=2)
    for files, alone in zip(together, both, strict=True):
        assert all(abs(a - b).max() <= 1 for a, b in zip(pixels(files), pixels(alone), strict=True))


def test_too_little_memory_is_explained(base, tmp_path, monkeypatch):
    def fail(*args, **arguments):
        raise MemoryError

    monkeypatch.setattr(StableDiffusionXLPipeline, "__call__", fail)
    with pytest.raises(UserError, match="The memory of cpu does not suffice .* Lower --images-at-once"):
        rendered(tmp_path, base)
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 3}, "steps: 2 there, 3 here"),
        ({"prefix": "A. "}, "prompt was 'Number 0"),
        ({"seed": 1}, "seed was 0"),
    ],
)
def test_images_of_other_settings_are_refused_before_a_model_is_loaded(
    changes, message, both, base, long_encoder, monkeypatch
):
    monkeypatch.setattr(rendering, "load_pipeline", None)
    output = both[0][0].parents[2]
    assert rendered(output, base, "cut:original", long_encoder) == both
    with pytest.raises(UserError, match=message):
        rendered(output, base, "cut:original", long_encoder, **changes)


def test_an_encoder_of_another_width_is_refused_before_anything_is_rendered(long_encoder, tmp_path):
    wide = str(tiny_sdxl.build_tiny_sdxl(tmp_path / "wide", text_width=64))
    with pytest.raises(UserError, match=r"width 32; the UNet of .* reads 64"):
        rendered(tmp_path / "out", wide, "cut:original", long_encoder)
    assert not (tmp_path / "out").exists()


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True))
def test_folders_have_safe_and_different_names(labels):
    names = folder_names(labels)
    assert list(names) == labels and len({name.lower() for name in names.values()}) == len(labels)
    for name in names.values():
        assert Path("x", name).parent == Path("x") and not name.startswith(".") and not set(name) & set('/\\:*?"<>|\0 ')


def test_long_names_leave_room_for_what_is_put_behind_them():
    names = folder_names(["x" * 255, "x" * 254, "猫" * 85, "猫" * 60])
    assert all(len(os.fsencode(name)) <= 200 for name in names.values()) and names["猫" * 60] == "猫" * 60
    assert len(set(names.values())) == 4


def test_names_that_are_safe_stay():
    assert folder_names(["toy/clip", "a b", "a.b", "A.b"]) == {
        "toy/clip": "toy-clip", "a b": "a-b", "a.b": "a.b-3", "A.b": "A.b-4",
    }  # fmt: skip


def test_auto_settings_are_those_of_the_base(base):
    def settings(**changes):
        values = {"encoders": ["cut:original"], "base": base, "output": "results", "data": ""} | changes
        return rendering_settings(GenerationConfig(**values))

    def resolved(**changes):
        return [settings(**changes)[name] for name in ("steps", "guidance_scale", "images_at_once")]

    assert resolved() == [30, 7.0, 1] and resolved(base="toy/sdxl") == [20, 3.0, 20]
    assert resolved(base="toy/sdxl", steps=3, guidance_scale=1.0) == [3, 1.0, 20]
    with pytest.raises(UserError, match="'nowhere' is not there"):
        settings(base="nowhere")


def test_two_processes_render_the_same_images(base, long_encoder, tmp_path, capfd):
    (alone,) = rendered(tmp_path / "alone", base, long_encoder, images_at_once=2)

    def work(_) -> None:
        own = Processes()
        with own.only_main_prints():
            (files,) = rendered(tmp_path / "out", base, long_encoder, images_at_once=2, processes=own)
            assert len(files) == len(PROMPTS)
            assert own.from_main(lambda: [own.index, "x"]) == [0, "x"]
            assert own.gathered([own.index]) == [0, 1]
            print(f"done by {own.count}")

    forked(2, work)
    printed = capfd.readouterr()
    assert printed.out.endswith("done by 2\n") and printed.out.count("Images: ") == 2  # the one alone has its own
    assert "2 processes, " in printed.err
    files = sorted((tmp_path / "out").rglob("*.png"))
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in alone]
