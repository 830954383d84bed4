"""`with_long_prompts` on classes and uses of diffusers' pipelines that are off the beaten track."""

import copy
import json
import logging
import pickle
import threading
from types import ModuleType

import pytest
import torch
from diffusers import (
    AutoPipelineForImage2Image,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.pipelines.deprecated.alt_diffusion import modeling_roberta_series
from helpers import tiny_sdxl
from helpers.draw import LONG, SHORT, add_lora
from helpers.tiny_sdxl import assemble, assemble_copy

from debias_diffusion.pipelines import SDXLLongPromptMixin, StableDiffusionXLLongPromptPipeline, with_long_prompts
from debias_diffusion.pipelines.custom_pipeline import write_custom_pipeline
from debias_diffusion.text.reading import encode_texts, last_states

pytestmark = pytest.mark.usefixtures("no_grad")
GREEN = LONG.replace("yellow bicycle", "green tractor")


@pytest.fixture(scope="module")
def sdxl():
    return tiny_sdxl.sdxl_parts()


@pytest.fixture(scope="module")
def sd15():
    return tiny_sdxl.sd15_parts()


def encode(pipe, prompt, **call):
    return pipe.encode_prompt(prompt, device=None, num_images_per_prompt=1, do_classifier_free_guidance=True, **call)


def same(first, second):
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("zeros", [True, False])
def test_an_empty_negative_prompt_is_zeros_if_asked(sdxl, sd15, zeros):
    stable_diffusion = assemble(StableDiffusionPipeline, sd15, requires_safety_checker=False)
    for stock in (assemble(StableDiffusionXLPipeline, sdxl), stable_diffusion):
        pipe = with_long_prompts(stock).set_long_prompt(zero_empty_negative=zeros)
        negatives = [tensor for tensor in encode(pipe, SHORT, negative_prompt="")[1::2] if tensor is not None]
        assert all((tensor == 0).all() == zeros for tensor in negatives)
        assert not any((tensor == 0).all() for tensor in encode(pipe, SHORT, negative_prompt="blurry")[1:2])


# ---- encoders that several threads share


def in_two_threads(first, second, count=20):
    """The results of `count` calls of `first` while another thread calls `second`."""
    done = threading.Event()

    def work():
        while not done.is_set():
            second()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return [first() for _ in range(count)]
    finally:
        done.set()
        thread.join()


def test_clip_skip_in_one_thread_leaves_another_as_it_is(sd15):
    pipe = with_long_prompts(assemble(StableDiffusionPipeline, sd15))
    expected = encode(pipe, SHORT)
    assert not same(expected, encode(pipe, SHORT, clip_skip=1))
    results = in_two_threads(lambda: encode(pipe, SHORT), lambda: encode(pipe, SHORT, clip_skip=1))
    assert all(same(result, expected) for result in results)


def test_scales_of_a_lora_in_two_threads(sd15):
    pipe = with_long_prompts(assemble_copy(StableDiffusionPipeline, sd15))
    add_lora(pipe.text_encoder)
    expected, plain = encode(pipe, SHORT, lora_scale=0.5), encode(pipe, SHORT)
    assert not same(expected, plain)
    calls = [lambda: encode(pipe, SHORT, lora_scale=0.5), lambda: encode(pipe, SHORT, lora_scale=0.8)]
    assert all(same(result, expected) for result in in_two_threads(*calls))
    assert same(encode(pipe, SHORT), plain)


def test_an_attention_mask_that_an_encoder_asks_for(sd15):
    stock = assemble_copy(StableDiffusionPipeline, sd15)
    plain = encode(with_long_prompts(stock), SHORT)
    stock.text_encoder.config.use_attention_mask = True
    masked = encode(with_long_prompts(stock), SHORT)
    assert same(masked, encode(stock, SHORT)) and not same(masked, plain)


# ---- one length for all calls


def test_every_call_has_the_positions_that_were_set(sdxl):
    pipe = with_long_prompts(assemble(StableDiffusionXLPipeline, sdxl)).set_long_prompt(positions=227)
    for prompt, call in ((SHORT, {}), (LONG, {"negative_prompt": "grey"})):
        assert pipe.encode_prompt(prompt, **call)[0].shape[1] == 227
        assert pipe.prompt_layout(prompt, **call).positions == 227
    # what fits in fewer is the same in more
    shorter = pipe.encode_prompt(LONG)[0]
    assert torch.equal(shorter[:, :152], pipe.set_long_prompt().encode_prompt(LONG)[0])
    with pytest.raises(ValueError, match="does not fit the 77 positions.* set_long_prompt with other positions"):
        pipe.set_long_prompt(positions=77).encode_prompt(LONG)
    with pytest.raises(ValueError, match="positions is 50, but must be at least 77, or None"):
        pipe.set_long_prompt(positions=50)


# ---- classes that name their arguments otherwise


class Styled(StableDiffusionXLPipeline):
    """A user's class, which changes what is encoded."""

    def encode_prompt(self, prompt, *args, **kwargs):
        return super().encode_prompt(f"oil painting, {prompt}", *args, **kwargs)


class StyledLong(Styled, StableDiffusionXLLongPromptPipeline):
    """The same with long prompts, as the message recommends."""


def test_an_override_of_encode_prompt_is_refused_not_dropped(sdxl):
    with pytest.raises(ValueError, match="Styled overrides `encode_prompt`, which would be ignored: derive it from"):
        with_long_prompts(assemble(Styled, sdxl))
    styled = assemble(StyledLong, sdxl)
    assert isinstance(styled, SDXLLongPromptMixin) and styled.encode_prompt(LONG)[0].shape[1] == 152
    assert same(styled.encode_prompt(SHORT)[::2], assemble(Styled, sdxl).encode_prompt(SHORT)[::2])


class Weighted(StableDiffusionXLPipeline):
    """As community pipelines that have an `encode_prompt` and encode otherwise."""

    def __call__(self, prompt):
        return [self._embed(text) for text in prompt]

    def _embed(self, text):
        return self.text_encoder(self.tokenizer(text, return_tensors="pt").input_ids)


class Indirect(StableDiffusionXLPipeline):
    """As pipelines that call it in a method, or in a function within one."""

    def __call__(self, prompt):
        return [self._embed(text) for text in prompt]

    def _embed(self, text):
        return (lambda: self.encode_prompt(text))()


def test_a_class_that_never_calls_encode_prompt_is_refused(sdxl):
    with pytest.raises(ValueError, match="Weighted never calls its `encode_prompt`"):
        with_long_prompts(assemble(Weighted, sdxl))
    assert with_long_prompts(assemble(Indirect, sdxl))([LONG])[0][0].shape[1] == 152


def test_an_exported_class_is_taken_as_it_is(sdxl, tmp_path):
    code = write_custom_pipeline(tmp_path / "long" / "pipeline.py").read_text(encoding="utf-8")
    exported = ModuleType("exported")
    exec(compile(code, "pipeline.py", "exec"), vars(exported))  # it is this package's own
    pipe = assemble(exported.StableDiffusionXLLongPromptPipeline, sdxl)
    wrapped = with_long_prompts(pipe)
    assert type(wrapped) is type(pipe) and wrapped.set_long_prompt(reading="a1111") is not pipe
    assert wrapped.encode_prompt(LONG)[0].shape[1] == 154 and pipe.encode_prompt(LONG)[0].shape[1] == 152


class Own(StableDiffusionXLLongPromptPipeline):
    """A user's class of ours."""


@pytest.mark.parametrize("cls", [StableDiffusionXLLongPromptPipeline, Own])
def test_auto_pipelines_find_a_class_by_the_name_of_diffusers(sdxl, cls, caplog):
    pipe = assemble(cls, sdxl)
    image_to_image = AutoPipelineForImage2Image.from_pipe(pipe)
    assert type(image_to_image) is StableDiffusionXLImg2ImgPipeline
    assert with_long_prompts(image_to_image).encode_prompt(LONG)[0].shape[1] == 152
    # diffusers' own object cuts, and says so
    logger = logging.getLogger("diffusers")
    caplog.set_level(logging.WARNING, logger.name)
    logger.addHandler(caplog.handler)
    try:
        assert image_to_image.encode_prompt(LONG)[0].shape[1] == 77 and "truncated" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
    copied = pickle.loads(pickle.dumps(assemble(cls, tiny_sdxl.sdxl_parts())))
    assert type(copied) is cls


def test_an_encoder_that_is_no_clip_is_refused(sd15):
    sizes = {"hidden_size": 32, "project_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = modeling_roberta_series.RobertaSeriesConfig(**sizes, intermediate_size=32, vocab_size=700)
    encoder = modeling_roberta_series.RobertaSeriesModelWithTransformation(config)
    pipe = assemble(StableDiffusionPipeline, sd15, text_encoder=encoder)
    with pytest.raises(ValueError, match="The `text_encoder` of .* is a RobertaSeries.*, which is no CLIP"):
        with_long_prompts(pipe)


# ---- pickled and saved


class Mine(StableDiffusionXLPipeline):
    """A user's class that leaves the encoding alone."""


@pytest.mark.parametrize("cls", [StableDiffusionXLPipeline, Mine])
def test_pickled_and_saved_as_the_class_that_was_wrapped(cls, tmp_path):
    stock = assemble(cls, tiny_sdxl.sdxl_parts())
    pipe = with_long_prompts(stock).set_long_prompt(emphasis="comfyui")
    prompt = f"(a red cat:1.3) {LONG}"
    pickled = pickle.dumps(pipe)  # before its first use, in which transformers adds hooks that cannot be pickled
    for again in (pickle.loads(pickled), copy.deepcopy(pipe)):
        assert type(again) is type(pipe) and again.text_encoder is not pipe.text_encoder
        assert same(again.encode_prompt(prompt)[::2], pipe.encode_prompt(prompt)[::2])
    stock.save_pretrained(tmp_path / "stock")
    pipe.save_pretrained(tmp_path / "ours")
    index = [json.loads((tmp_path / name / "model_index.json").read_text()) for name in ("stock", "ours")]
    assert index[0] == index[1] and index[0]["_class_name"] == cls.__name__


def test_a_folder_saved_by_a_class_of_ours_loads_in_diffusers(sdxl, tmp_path):
    assemble(StableDiffusionXLLongPromptPipeline, sdxl).save_pretrained(tmp_path)
    assert type(DiffusionPipeline.from_pretrained(tmp_path)) is StableDiffusionXLPipeline


# ---- the same reading for those who train


def test_a_training_loop_reads_as_the_pipelines_do(sdxl, sd15):
    captions = [LONG, SHORT, f"(red:1.4) ((cat)) BREAK:0.7 [a] dog++, {SHORT}"]
    pairs = [(sdxl["text_encoder"], sdxl["tokenizer"]), (sdxl["text_encoder_2"], sdxl["tokenizer_2"])]
    wrapped = with_long_prompts(assemble(StableDiffusionXLPipeline, sdxl))
    for positions, settings in ((227, {}), (227, {"emphasis": "comfyui"}), (231, {"reading": "a1111"})):
        pipe = wrapped.set_long_prompt(positions=positions, **settings)
        expected, _, expected_pooled, _ = pipe.encode_prompt(captions)
        states, pooled = zip(*(encode_texts(*pair, captions, positions, **settings) for pair in pairs), strict=True)
        assert torch.equal(torch.cat(states, dim=-1), expected) and torch.equal(pooled[1], expected_pooled), settings
    pipe = with_long_prompts(assemble(StableDiffusionPipeline, sd15)).set_long_prompt(positions=227)
    states, _ = encode_texts(sd15["text_encoder"], sd15["tokenizer"], captions, 227, states=last_states)
    assert torch.equal(states, encode(pipe, captions)[0])
    with pytest.raises(ValueError, match="tokens, BOS and EOS do not fit 77 positions"):
        encode_texts(*pairs[0], captions, 77)


def test_gradients_reach_every_chunk(sdxl):
    encoder, tokenizer = sdxl["text_encoder"], sdxl["tokenizer"]
    with torch.enable_grad():
        states, _ = encode_texts(encoder, tokenizer, [LONG], 152)
        states[0, 100:140].sum().backward()
    assert encoder.get_input_embeddings().weight.grad[tokenizer("bicycle").input_ids[1]].abs().sum() > 0
    encoder.zero_grad(set_to_none=True)
