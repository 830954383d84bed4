"""Drawing with several encoders: like stock SDXL where prompts are cut, resumable, and shared by processes."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.drawing import aligned, load
from helpers.ranks import forked
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.encoders import ORIGINAL, EncoderSpec, load_text_encoder
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.eval.images import drawing
from debias_diffusion.eval.images.drawing import Drawing, DrawingSettings, Subject, folder_names, how_drawn
from debias_diffusion.eval.images.generation import GenerationConfig
from debias_diffusion.eval.processes import Processes
from debias_diffusion.files import MACHINE
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

# Of 77, 152 and 227 positions, in mixed order.
PROMPTS = [
    " ".join([f"Number {index}.", *["A cat, a dog and a bird sit on the wide red sofa."] * sentences])
    for index, sentences in enumerate([1, 12, 1, 8, 2, 12, 9])
]
SUBJECTS = [Subject(f"{index:06}", prompt, index) for index, prompt in enumerate(PROMPTS)]
SHORT = (0, 2, 4)  # that fit 77 tokens
STEPS = 2


@pytest.fixture(scope="module")
def base(sdxl_folder) -> str:
    return str(sdxl_folder)


@pytest.fixture(scope="module")
def long_encoder(long_clip_folder) -> str:
    return str(long_clip_folder)


_LOADED = {}


def started(base, **settings) -> Drawing:
    """With the base's models that an earlier one has loaded."""
    own = Drawing(DrawingSettings(base, **({"steps": STEPS} | settings)), Processes("cpu"))
    if base not in _LOADED:
        own._load(EncoderSpec.parse(ORIGINAL))
        _LOADED[base] = own._pipe
    own._pipe = _LOADED[base]
    return own


def drawn(folder, base, encoder="cut:original", subjects=SUBJECTS, **settings) -> list[Path]:
    return started(base, **settings).draw(EncoderSpec.parse(encoder), folder, subjects, encoder)


def pixels(files) -> list[np.ndarray]:
    return [np.asarray(Image.open(file)).astype(int) for file in files]


def alike(a, b) -> list[int]:
    """The places where two pictures differ by roundings at most."""
    return [place for place, (x, y) in enumerate(zip(pixels(a), pixels(b), strict=True)) if abs(x - y).max() <= 1]


def stock(base) -> StableDiffusionXLPipeline:
    return aligned(load(StableDiffusionXLPipeline, base))


@pytest.fixture(scope="module")
def cut(base, tmp_path_factory) -> list[Path]:
    return drawn(tmp_path_factory.mktemp("cut"), base)


@pytest.fixture(scope="module")
def whole(base, long_encoder, tmp_path_factory) -> list[Path]:
    return drawn(tmp_path_factory.mktemp("whole"), base, long_encoder)


@pytest.fixture(scope="module")
def together(base, long_encoder, tmp_path_factory) -> list[Path]:
    return drawn(tmp_path_factory.mktemp("together"), base, long_encoder, images_at_once=2)


def test_encoders_of_77_positions_read_what_stock_sdxl_reads(cut, base, tmp_path):
    pipe = stock(base)
    remarks, handler = [], logging.Handler()
    handler.emit = remarks.append
    logging.getLogger("diffusers").addHandler(handler)
    drawn(tmp_path / "again", base, subjects=SUBJECTS[1:2])
    assert not remarks  # of prompts cut, only where nobody asked for it are they worth reading
    for index, (prompt, file) in enumerate(zip(PROMPTS, cut, strict=True)):
        noise = torch.Generator().manual_seed(index)
        expected = pipe(prompt, num_inference_steps=STEPS, guidance_scale=7.0, generator=noise).images[0]
        assert np.array_equal(np.asarray(expected), np.asarray(Image.open(file)))
    assert remarks
    logging.getLogger("diffusers").removeHandler(handler)
    chunks = drawn(tmp_path / "chunks", base, "separate:original")
    assert alike(cut, chunks) == list(SHORT)
    assert (how_drawn(cut[0].parent)["cut_at"], how_drawn(cut[0].parent)["prompts_cut"]) == (77, 4)
    assert how_drawn(chunks[0].parent)["cut_at"] is None


def test_the_last_layer_is_read_after_the_final_norm_and_pooled_embeddings_stay(cut, base, tmp_path):
    (file,) = drawn(tmp_path / "last", base, subjects=SUBJECTS[:1], layer="last")
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
    assert alike([file], cut[:1]) == []
    again = drawn(tmp_path / "penultimate", base, subjects=SUBJECTS[:1])  # with the models of before, and no hook left
    assert np.array_equal(*pixels([again[0], cut[0]]))
    with pytest.raises(UserError, match="other settings: layer was 'last', now 'penultimate'"):
        drawn(tmp_path / "last", base, subjects=SUBJECTS[:1])


def test_scheduler_and_size_are_those_asked_for(base, tmp_path):
    settings = {"scheduler": "DDIMScheduler", "height": 48, "width": 80}
    (file,) = drawn(tmp_path / "ddim", base, subjects=SUBJECTS[:1], **settings)
    pipe, noise = stock(base), torch.Generator().manual_seed(0)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    options = {"num_inference_steps": STEPS, "guidance_scale": 7.0, "height": 48, "width": 80}
    image = pipe(PROMPTS[0], generator=noise, **options).images[0]
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(file))) and image.size == (80, 48)
    assert json.loads((file.parent / "settings.json").read_text()).items() >= settings.items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduler": "DDIM"}, "Unknown scheduler 'DDIM'. .*Choose from: EulerDiscreteScheduler"),
        ({"width": 2**40}, "at most 89,478,485 can be drawn"),
    ],
)
def test_settings_of_no_image_are_refused(base, settings, message):
    values = {"encoders": [ORIGINAL], "base": base, "output": "results", "data": ""} | settings
    with pytest.raises(UserError, match=message):
        GenerationConfig(**values)


def test_overlapping_chunks_are_those_of_the_pipeline_and_a_setting_of_their_own(base, tmp_path):
    subjects = SUBJECTS[:2]  # of one chunk, and of several
    readings = ("separate", "overlap")
    chunks, overlap = (drawn(tmp_path / reading, base, f"{reading}:original", subjects) for reading in readings)
    assert alike(chunks, overlap) == [0] and how_drawn(tmp_path / "overlap")["cut_at"] is None
    pipe = StableDiffusionXLLongPromptPipeline.from_pretrained(base, add_watermarker=False)
    noise = torch.Generator().manual_seed(1)
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(PROMPTS[1], num_inference_steps=STEPS, guidance_scale=7.0, generator=noise).images[0]
    assert np.array_equal(np.asarray(expected), np.asarray(Image.open(overlap[1])))
    with pytest.raises(UserError, match="other settings: reading was 'separate', now 'overlap'"):
        drawn(tmp_path / "separate", base, "overlap:original", subjects)


def test_the_second_encoder_overlaps_beside_a_longer_one_unless_its_name_says_otherwise(base, long_encoder, tmp_path):
    subjects = SUBJECTS[:2]
    alone, overlap, chunks = (
        drawn(tmp_path / str(number), base, prefix + long_encoder, subjects)
        for number, prefix in enumerate(("", "overlap:", "separate:"))
    )
    assert alike(alone, overlap) == [0, 1] and alike(alone, chunks) == [0]


def test_encoders_of_248_positions_read_all(whole, base, long_encoder, tmp_path):
    # Only what differs after the 77th token differs.
    subjects = [
        Subject(name, prompt + " It is red.", 1) for name, prompt in (("a", PROMPTS[1]), ("b", PROMPTS[1][:-9]))
    ]
    long = [file.read_bytes() for file in drawn(tmp_path / "long", base, long_encoder, subjects)]
    assert long[0] != long[1] and how_drawn(tmp_path / "long")["cut_at"] is None
    cut = [file.read_bytes() for file in drawn(tmp_path / "cut", base, "cut:original", subjects)]
    assert cut[0] == cut[1]
    assert how_drawn(whole[0].parent)["seconds"] > 0
    told = json.loads((whole[0].parent / "settings.json").read_text())
    assert told["device"] == "cpu" and told["dtype"] == "float32"
    assert len(told["base"]) == len(told["encoder"]) == 64


def test_pictures_drawn_at_once_are_those_drawn_one_by_one(whole, together, cut, base, tmp_path):
    assert alike(together, whole) == list(range(7))
    assert alike(drawn(tmp_path, base, images_at_once=3), cut) == list(range(7))
    values = pixels(whole)
    assert all(abs(a - b).max() > 1 for i, a in enumerate(values) for b in values[:i])


@pytest.mark.parametrize("ends", [{5: None}, dict.fromkeys((0, 3, 6)), dict.fromkeys(range(7)), {1: -20, 4: 300, 6: 0}])
def test_what_is_missing_or_damaged_is_drawn_bit_for_bit_and_the_rest_stays(
    ends, together, base, long_encoder, tmp_path
):
    """`ends`: of the files that are cut off, by place; None of those that are missing."""
    for file in (*together, together[0].parent / "settings.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for place, end in ends.items():
        (tmp_path / f"{place:06}.png").write_bytes(together[place].read_bytes()[:end])
        if end is None:
            (tmp_path / f"{place:06}.png").unlink()
    (tmp_path / f".000003.png.{MACHINE}-999999999.tmp").write_bytes(b"half an image")
    (tmp_path / ".folder.tmp").mkdir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.png") if int(path.stem) not in ends}
    files = drawn(tmp_path, base, long_encoder, images_at_once=2)
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in together]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    names = {"settings.json", "drawn.json", ".folder.tmp", *(file.name for file in together)}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_images_of_values_that_are_no_numbers_are_named_and_the_rest_is_drawn(
    together, base, long_encoder, tmp_path, monkeypatch
):
    text_encoder, tokenizer = load_text_encoder(long_encoder)
    ids = [set(tokenizer(prompt.lower(), add_special_tokens=False).input_ids) for prompt in PROMPTS]
    [only_in_the_third] = ids[2] - set.union(*ids[:2], *ids[3:])
    with torch.no_grad():
        text_encoder.get_input_embeddings().weight[only_in_the_third] = float("nan")
    with monkeypatch.context() as broken:
        broken.setattr(EncoderSpec, "load_text_encoder", lambda spec: (text_encoder, tokenizer))
        with pytest.raises(FailedError, match=r"^1 of 7 images by .* the first: 000002 \(its .* not finite.*float32"):
            drawn(tmp_path, base, long_encoder, images_at_once=2)
    assert {path.name for path in tmp_path.glob("*.png")} == {file.name for file in together} - {"000002.png"}
    files = drawn(tmp_path, base, long_encoder, images_at_once=2)
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in together]


def test_too_little_memory_is_explained(base, tmp_path, monkeypatch):
    def fail(*args, **arguments):
        raise MemoryError

    monkeypatch.setattr(StableDiffusionXLPipeline, "__call__", fail)
    with pytest.raises(UserError, match="The memory of cpu does not suffice .* Lower --images-at-once"):
        drawn(tmp_path, base)
    assert not list(tmp_path.glob("*.png"))


def test_encoders_share_the_rest_of_the_base(cut, whole, base, long_encoder, tmp_path):
    own = Drawing(DrawingSettings(base, STEPS), Processes("cpu"))
    first = own.draw(EncoderSpec.parse(long_encoder), tmp_path / "long", SUBJECTS, "long")
    second = own.draw(EncoderSpec.parse("cut:original"), tmp_path / "original", SUBJECTS, "original")
    for files, alone in ((first, whole), (second, cut)):
        assert [file.read_bytes() for file in files] == [file.read_bytes() for file in alone]
    pipes = [own._load(EncoderSpec.parse(name)) for name in (long_encoder, "cut:original")]
    for part in ("unet", "vae", "text_encoder_2"):
        assert getattr(pipes[0], part) is getattr(pipes[1], part)
    assert pipes[0].text_encoder is not pipes[1].text_encoder


def test_the_prefix_stands_before_each_prompt(whole, base, long_encoder, tmp_path):
    prefixed = drawn(tmp_path / "prefix", base, long_encoder, SUBJECTS[:1], prefix="photo, detailed, 8k. ")
    subjects = [Subject("a", f"photo, detailed, 8k. {PROMPTS[0]}", 0)]
    assert alike(prefixed, drawn(tmp_path / "written", base, long_encoder, subjects)) == [0]
    assert alike(prefixed, whole[:1]) == []


def test_what_is_finished_loads_nothing(whole, base, long_encoder, monkeypatch):
    def load(*_):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(EncoderSpec, "load_text_encoder", load)
    monkeypatch.setattr(drawing, "load_pipeline", load)
    own, folder = Drawing(DrawingSettings(base, STEPS), Processes("cpu")), whole[0].parent
    own.check([EncoderSpec.parse(long_encoder)], [folder], SUBJECTS)
    assert own.draw(EncoderSpec.parse(long_encoder), folder, SUBJECTS, "long") == whole
    with pytest.raises(AssertionError, match="a model is loaded"):
        own.draw(EncoderSpec.parse(long_encoder), folder, [*SUBJECTS, Subject("more", "A cat.", 0)], "long")


@pytest.mark.parametrize(
    ("name", "value"),
    dict(steps=3, guidance_scale=5.0, prefix="A. ", seed=1, encoder=ORIGINAL, data="x").items(),
)
def test_pictures_made_with_other_settings_are_refused(name, value, whole, base, long_encoder):
    settings = {"steps": STEPS, name: value}
    encoder, data = EncoderSpec.parse(settings.pop("encoder", long_encoder)), settings.pop("data", None)
    own = Drawing(DrawingSettings(base, **settings), Processes("cpu"), data)
    for work in (
        lambda: own.check([encoder], [whole[0].parent], SUBJECTS),
        lambda: own.draw(encoder, whole[0].parent, SUBJECTS, ""),
    ):
        with pytest.raises(UserError, match=f"other settings: .*{name} was"):
            work()


def test_pictures_of_unknown_settings_are_refused(base, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "000000.png")
    with pytest.raises(UserError, match=r"no settings\.json"):
        drawn(tmp_path, base)


def test_an_encoder_of_another_width_is_refused(long_encoder, tmp_path):
    wide = str(tiny_sdxl.build_tiny_sdxl(tmp_path / "wide", text_width=64))
    own = Drawing(DrawingSettings(wide), Processes("cpu"))
    with pytest.raises(UserError, match=r"width 32; the UNet of .* reads 64"):
        own.check(list(map(EncoderSpec.parse, (ORIGINAL, long_encoder))), [tmp_path / "a", tmp_path / "b"], SUBJECTS)
    assert not (tmp_path / "a").exists()


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
        values = {"encoders": [ORIGINAL], "base": base, "output": "results", "data": ""} | changes
        return DrawingSettings.of(GenerationConfig(**values))

    assert settings() == DrawingSettings(base, 30, 7.0, 1)
    assert settings(base="toy/sdxl") == DrawingSettings("toy/sdxl", 20, 3.0, 20)
    assert settings(base="toy/sdxl", steps=3, guidance_scale=1.0) == DrawingSettings("toy/sdxl", 3, 1.0, 20)
    with pytest.raises(UserError, match="'nowhere' is not there"):
        settings(base="nowhere")


# ---- several processes


def test_two_processes_draw_the_same_pictures(together, base, long_encoder, tmp_path, capfd):
    output = tmp_path / "out"

    def work(_) -> None:
        own = Processes()
        with own.only_main_prints(), own.alone_in(output):
            drawing = Drawing(DrawingSettings(base, STEPS, images_at_once=2), own)
            drawing.draw(EncoderSpec.parse(long_encoder), output / "pictures", SUBJECTS, "shared")
            assert own.from_main(lambda: [own.index, "x"]) == [0, "x"]
            assert own.gathered([own.index]) == [0, 1]
            print(f"done by {own.count}")

    forked(2, work)
    printed = capfd.readouterr()
    assert printed.out == "done by 2\n"
    assert "7/7" in printed.err and "2 processes, shared" in printed.err
    files = sorted((output / "pictures").glob("*.png"))
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in together]


def test_the_seed_decides_the_noise(whole, base, long_encoder, tmp_path):
    subjects = [Subject("a", PROMPTS[0], 3), Subject("b", PROMPTS[0], 0)]
    first, second = drawn(tmp_path / "0", base, long_encoder, subjects)
    _, later = drawn(tmp_path / "3", base, long_encoder, subjects, seed=3)
    assert later.read_bytes() == first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize("seed", [2**64 - 6, -(2**63) - 1])
def test_seeds_out_of_range_are_refused(base, tmp_path, seed):
    own = started(base, seed=seed)
    for work in (
        lambda: own.check([EncoderSpec.parse(ORIGINAL)], [tmp_path], SUBJECTS),
        lambda: own.draw(EncoderSpec.parse("cut:original"), tmp_path, SUBJECTS, ""),
    ):
        with pytest.raises(UserError, match=r"Seeds from .* a generator takes those from -2\^63 to 2\^64 - 1"):
            work()
    own.check([EncoderSpec.parse(ORIGINAL)], [tmp_path], SUBJECTS[1:6])
