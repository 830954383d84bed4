"""`with_long_prompts` on classes and uses of diffusers' pipelines that are off the beaten track."""

import copy
import json
import pickle
import re
import sys

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.utils import dynamic_modules_utils
from helpers import tiny_sdxl
from helpers.draw import LONG, OTHER, SHORT, draw
from helpers.tiny_sdxl import assemble
from helpers.vocabulary import BOS, EOS, tiny_tokenizer
from transformers import T5Config, T5EncoderModel

from debias_diffusion.pipelines import (
    SDXLLongPromptMixin,
    StableDiffusionLongPromptImg2ImgPipeline,
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptPipeline,
    with_long_prompts,
    write_custom_pipeline,
)
from debias_diffusion.text.encoding import encode_texts

pytestmark = pytest.mark.usefixtures("no_grad")
T5_SIZES = T5Config(vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def sd15():
    return tiny_sdxl.sd15_parts()


def encode(pipe, prompt, **call):
    return pipe.encode_prompt(prompt, device=None, num_images_per_prompt=1, do_classifier_free_guidance=True, **call)


def same(first, second):
    return all(map(torch.equal, first, second))


def test_models_are_shared_and_the_pipeline_given_stays_as_it_is(parts):
    pipe = assemble(StableDiffusionXLPipeline, parts)
    short = draw(pipe, SHORT)
    long = with_long_prompts(pipe)
    assert type(pipe) is StableDiffusionXLPipeline and isinstance(long, StableDiffusionXLPipeline)
    assert all(long.components[name] is component for name, component in pipe.components.items())
    assert np.array_equal(draw(long, SHORT), short)
    assert np.array_equal(draw(long, LONG), draw(assemble(StableDiffusionXLLongPromptPipeline, parts), LONG))
    assert pipe.encode_prompt(LONG)[0].shape[1] == 77
    # Options and new components belong to one of the two only.
    long.set_long_prompt(strict=True)
    with_long_prompts(long).set_long_prompt()
    with pytest.raises(ValueError, match="`strict` allows one"):
        long.encode_prompt(LONG)
    long.text_encoder = None
    assert pipe.text_encoder is not None and pipe.config["text_encoder"] == ("transformers", "CLIPTextModel")


@pytest.mark.parametrize("zeros", [True, False])
def test_an_empty_negative_prompt_is_zeros_if_asked(parts, sd15, zeros):
    for stock in (assemble(StableDiffusionXLPipeline, parts), assemble(StableDiffusionPipeline, sd15)):
        pipe = with_long_prompts(stock).set_long_prompt(zero_empty_negative=zeros)
        negatives = [tensor for tensor in encode(pipe, SHORT, negative_prompt="")[1::2] if tensor is not None]
        assert all((tensor == 0).all() == zeros for tensor in negatives)
        assert encode(pipe, SHORT, negative_prompt="blurry")[1].any()


def test_every_call_has_the_positions_that_were_set(parts):
    pipe = with_long_prompts(assemble(StableDiffusionXLPipeline, parts)).set_long_prompt(positions=227)
    for prompt, call in ((SHORT, {}), (LONG, {"negative_prompt": "grey"})):
        assert pipe.encode_prompt(prompt, **call)[0].shape[1] == 227
        assert pipe.prompt_layout(prompt, **call).positions == 227
    # what fits in fewer is the same in more
    shorter = pipe.encode_prompt(LONG)[0]
    assert torch.equal(shorter[:, :152], pipe.set_long_prompt().encode_prompt(LONG)[0])
    with pytest.raises(ValueError, match="does not fit the 77 positions.* set_long_prompt with other positions"):
        pipe.set_long_prompt(positions=77).encode_prompt(LONG)
    with pytest.raises(ValueError, match="positions is 50"):
        pipe.set_long_prompt(positions=50)


# ---- users' classes


class Styled(StableDiffusionXLPipeline):
    """A user's class, which changes what is encoded."""

    def encode_prompt(self, prompt, *args, **kwargs):
        return super().encode_prompt(f"oil painting, {prompt}", *args, **kwargs)


class StyledLong(Styled, StableDiffusionXLLongPromptPipeline):
    """The same with long prompts, as the message recommends."""


def test_an_override_of_encode_prompt_is_refused_not_dropped(parts):
    with pytest.raises(ValueError, match="Styled overrides `encode_prompt`, which would be ignored: derive it from"):
        with_long_prompts(assemble(Styled, parts))
    styled = assemble(StyledLong, parts)
    assert isinstance(styled, SDXLLongPromptMixin) and styled.encode_prompt(LONG)[0].shape[1] == 152
    assert same(styled.encode_prompt(SHORT)[::2], assemble(Styled, parts).encode_prompt(SHORT)[::2])


class Weighted(StableDiffusionXLPipeline):
    """As community pipelines that have an `encode_prompt` and encode otherwise."""

    def __call__(self, prompt):
        return [self._embed(text) for text in prompt]

    def _embed(self, text):
        return self.text_encoder(self.tokenizer(text, return_tensors="pt").input_ids)


def test_a_class_that_never_calls_encode_prompt_is_refused(parts):
    with pytest.raises(ValueError, match="Weighted never calls its `encode_prompt`"):
        with_long_prompts(assemble(Weighted, parts))
    with pytest.raises(ValueError, match="The `text_encoder` of .* is a T5EncoderModel, which is no CLIP"):
        with_long_prompts(assemble(StableDiffusionXLPipeline, parts, text_encoder=T5EncoderModel(T5_SIZES)))


def test_an_exported_class_needs_nothing_of_ours_and_draws_what_the_class_draws(parts, tmp_path, monkeypatch):
    file = write_custom_pipeline(tmp_path / "made" / "pipeline.py")
    imported = set(re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.MULTILINE))
    assert imported - {"torch", "transformers", "diffusers"} <= set(sys.stdlib_module_names)
    # diffusers copies custom code there, by default below the home folder
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "sdxl"
    assemble(StableDiffusionXLPipeline, parts).save_pretrained(folder)
    long_encoder = {"text_encoder": tiny_sdxl.text_encoder(positions=248, seed=5), "tokenizer": tiny_tokenizer(248)}
    how = {"custom_pipeline": str(file.parent), "trust_remote_code": True, "add_watermarker": False}
    custom = DiffusionPipeline.from_pretrained(folder, **how, **long_encoder)
    assert type(custom).__module__.startswith("diffusers_modules.")
    ours = StableDiffusionXLLongPromptPipeline(**custom.components)
    assert np.array_equal(draw(custom, LONG), draw(ours, LONG))
    wrapped = with_long_prompts(custom)  # is taken as it is
    assert type(wrapped) is type(custom) and wrapped.set_long_prompt(reading="a1111") is not custom
    assert wrapped.encode_prompt(LONG)[0].shape[1] == 154 and custom.encode_prompt(LONG)[0].shape[1] == 152


def test_from_pipe_takes_the_options_over(sd15):
    strict = StableDiffusionLongPromptPipeline(**sd15).set_long_prompt(strict=True)
    other = StableDiffusionLongPromptImg2ImgPipeline.from_pipe(strict, requires_safety_checker=False)
    with pytest.raises(ValueError, match="`strict` allows one"):
        encode(other, LONG)


# ---- pickled and saved


def test_pickled_and_saved_as_the_class_that_was_wrapped(tmp_path):
    stock = assemble(StableDiffusionXLPipeline, tiny_sdxl.sdxl_parts())
    pipe = with_long_prompts(stock).set_long_prompt(emphasis="comfyui")
    prompt = f"(a red cat:1.3) {LONG}"
    pickled = pickle.dumps(pipe)  # before its first use, in which transformers adds hooks that cannot be pickled
    for again in (pickle.loads(pickled), copy.deepcopy(pipe)):
        assert type(again) is type(pipe) and again.text_encoder is not pipe.text_encoder
        assert same(again.encode_prompt(prompt)[::2], pipe.encode_prompt(prompt)[::2])
    stock.save_pretrained(tmp_path / "stock")
    pipe.save_pretrained(tmp_path / "ours")
    index = [json.loads((tmp_path / name / "model_index.json").read_text()) for name in ("stock", "ours")]
    assert index[0] == index[1] and index[0]["_class_name"] == "StableDiffusionXLPipeline"


# ---- the same reading for those who train


def test_gradients_reach_every_chunk(parts):
    encoder, tokenizer = parts["text_encoder"], parts["tokenizer"]
    with torch.enable_grad():
        states, _ = encode_texts(encoder, tokenizer, [LONG], 152)
        states[0, 100:140].sum().backward()
    assert encoder.get_input_embeddings().weight.grad[tokenizer("bicycle").input_ids[1]].abs().sum() > 0
    encoder.zero_grad(set_to_none=True)


# ---- Stable Diffusion 1.5: one encoder, its last layer

TOKENS = "a red cat on a blue sofa, " * 15 + "in a tree"  # 123, the first chunk cut after 72


@pytest.mark.parametrize(("skip", "prompt", "same"), [(0, TOKENS, 73), (1, SHORT, 76), (2, TOKENS, 73)])
def test_clip_skip_stops_early_and_keeps_the_final_norm(sd15, skip, prompt, same):
    """By hand: with transformers 5 diffusers' own `clip_skip` of Stable Diffusion 1.5 raises."""
    ours = StableDiffusionLongPromptPipeline(**sd15)
    tokens, encoder = ours._read((prompt,), None, False).prompts.encoders[0].parts[0].tokens, ours.text_encoder
    embeds, negatives = encode(ours, prompt, negative_prompt=OTHER, clip_skip=skip)
    ids = torch.tensor([[BOS, *tokens.ids[:75], EOS, *[EOS] * max(0, 75 - len(tokens.ids))]])
    states = encoder(ids, output_hidden_states=True).hidden_states[-1 - skip]
    expected = getattr(encoder, "text_model", encoder).final_layer_norm(states)
    torch.testing.assert_close(embeds[:, :same], expected[:, :same], rtol=1e-5, atol=1e-5)
    assert torch.equal(negatives, encode(ours, prompt, negative_prompt=OTHER)[1])
