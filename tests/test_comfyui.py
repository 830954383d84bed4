"""The ComfyUI node against our pipelines on the same weights.

With a checkout of ComfyUI, named by the environment variable COMFYUI, whose requirements are installed beside ours, its
own text encoders run; slow/test_comfyui.py loads files of true size, in its server too. Everywhere, the same tests run
with a stand-in for its CLIP: real transformers encoders behind the two calls that the node makes, and as much of its
syntax of weights as the prompts need. The vocabulary is CLIP's own, the only one that ComfyUI has.
"""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import tiny_sdxl
from helpers.comfyui import COMFYUI, LONG, SENTENCE, difference, importable_comfyui, sdxl_pipeline
from safetensors.torch import save_file
from transformers import CLIPTextModelWithProjection

from debias_diffusion.app.comfyui import NODE_CLASS_MAPPINGS, long_prompt_node
from debias_diffusion.app.comfyui.long_prompt_node import encode_long_prompt, read_text
from debias_diffusion.app.comfyui.write import WORKFLOW
from debias_diffusion.chunks import TRAINED_POSITIONS
from debias_diffusion.interchange.text_encoders import prefixed_state
from debias_diffusion.pipelines import StableDiffusionLongPromptPipeline
from debias_diffusion.reading import tokenize_text
from debias_diffusion.tokens import clip_tokenizer

pytestmark = pytest.mark.usefixtures("no_grad")

SHORT = "A red cat sleeps on a blue sofa."
LONGER = LONG.replace("(and birds)", "and birds") * 2  # 280 tokens: more than 248 positions
WEIGHTED = SENTENCE * 5 + "A (green (small:1) tree:1.3), and (a dog:0.6)."
BOS, EOS = 49406, 49407


def encoders(width, width_2, positions):
    """CLIP-L and bigG with three blocks: the activations, pads and projection of SDXL's."""
    first = tiny_sdxl.text_encoder(width, positions, vocabulary=clip_tokenizer)
    config = tiny_sdxl.text_encoder_2(vocabulary=clip_tokenizer).config
    sizes = {"hidden_size": width_2, "intermediate_size": 2 * width_2, "projection_dim": width_2}
    config.update(sizes | {"num_attention_heads": 4})
    models = first, CLIPTextModelWithProjection(config).eval()
    for model in models:  # of CLIP's size, or positions would hardly count
        for name, weight in model.named_parameters():
            if "position_embedding" in name or "token_embedding" in name:
                weight.data.normal_(std=0.5)
    return models


class StandIn:
    """What the node calls of ComfyUI's CLIP, with transformers' encoders."""

    def __init__(self, models):
        self.models = dict(zip("lg", models, strict=False))
        self.cond_stage_model = SimpleNamespace(**{f"clip_{name}": model for name, model in self.models.items()})
        self.tokenizer = clip_tokenizer(TRAINED_POSITIONS)

    def tokenize(self, text, return_word_ids=False):
        parts = [(unescape(part), weight) for part, weight in token_weights(escape(text), 1.0)]
        words = [
            (token, weight, 1)
            for part, weight in parts
            for token in self.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        ]
        rows = {}
        for name, model in self.models.items():
            slots, pad = model.config.max_position_embeddings - 2, {"l": EOS, "g": 0}[name]
            chunks = [words[start : start + slots] for start in range(0, max(1, len(words)), slots)]
            padded = [[(BOS, 1.0, 0), *c, (EOS, 1.0, 0), *[(pad, 1.0, 0)] * (slots - len(c))] for c in chunks]
            rows[name] = padded if return_word_ids else [[pair[:2] for pair in row] for row in padded]
        return rows

    def encode_from_tokens_scheduled(self, rows):
        outputs = {name: self.encode(model, rows[name]) for name, model in self.models.items()}
        shortest = min(states.shape[1] for states, _ in outputs.values())
        states = torch.cat([states[:, :shortest] for states, _ in outputs.values()], dim=-1)
        return [[states, {"pooled_output": list(outputs.values())[-1][1]}]]

    def encode(self, model, rows):
        empty = [[(BOS, 1.0), (EOS, 1.0), *[rows[0][-1]] * (len(rows[0]) - 2)]]
        ids = torch.tensor([[token for token, _ in row] for row in rows + empty])
        weights = torch.tensor([[weight for _, weight in row] for row in rows])[..., None]
        output = model(ids, output_hidden_states=True)
        states = output.hidden_states[-2] if len(self.models) == 2 else output.last_hidden_state
        states, empty = states[:-1], states[-1]
        states = torch.where(weights == 1, states, empty + weights * (states - empty))
        pooled = output.text_embeds if "text_embeds" in output else output.pooler_output
        return states.reshape(1, -1, states.shape[-1]), pooled[:1]


def escape(text):
    return text.replace("\\(", "\0").replace("\\)", "\1")


def unescape(text):
    return text.replace("\0", "(").replace("\1", ")")


def token_weights(text, weight):
    """As in ComfyUI, for brackets that are closed and, if they stand in each other, have numbers."""
    parts = []
    for inner, number, plain in re.findall(r"\(((?:[^()]|\([^()]*\))*?)(?::([\d.]+))?\)|([^()]+)", text):
        parts += [(plain, weight)] if plain else token_weights(inner, float(number or 1.1 * weight))
    return parts


def comfyui_clip(models, embeddings=None):
    """ComfyUI's own CLIP with the weights of `models`: both of SDXL, or that of SD 1.5."""
    from comfy import sd, sd1_clip, sdxl_clip

    classes = (sdxl_clip.SDXLClipModel, sdxl_clip.SDXLTokenizer)
    classes = (sd1_clip.SD1ClipModel, sd1_clip.SD1Tokenizer) if len(models) == 1 else classes
    target = SimpleNamespace(params={}, clip=classes[0], tokenizer=classes[1])
    options, tokenizer = {"dtype": torch.float32}, {}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    for name, model in zip(("clip_l", "clip_g"), models, strict=False):
        options[f"{name}_model_config"] = {key: getattr(model.config, key) for key in names}
        tokenizer[f"{name}_max_length"] = model.config.max_position_embeddings
    clip = sd.CLIP(target, embedding_directory=embeddings, tokenizer_data=tokenizer, model_options=options)
    for name, model in zip(("clip_l", "clip_g"), models, strict=False):
        state = prefixed_state(model)
        state.setdefault("text_projection.weight", torch.eye(model.config.hidden_size))
        missing, unexpected = getattr(clip.cond_stage_model, name).load_sd(state)
        assert not missing and not unexpected
    return clip


@pytest.fixture(scope="module")
def comfyui():
    with importable_comfyui():
        yield


@pytest.fixture(scope="module", params=["stand-in", "ComfyUI"])
def load(request):
    """(a function from models to a CLIP, widths of the models)"""
    if COMFYUI or request.param == "ComfyUI":
        request.getfixturevalue("comfyui")
        yield (comfyui_clip, (768, 1280)) if request.param == "ComfyUI" else (StandIn, (32, 64))
        return
    module = ModuleType("comfy.sd1_clip")
    module.escape_important, module.unescape_important, module.token_weights = escape, unescape, token_weights
    with pytest.MonkeyPatch.context() as patch:
        for name, part in (("comfy", ModuleType("comfy")), ("comfy.sd1_clip", module)):
            patch.setitem(sys.modules, name, part)
        yield StandIn, (32, 64)


@pytest.fixture(scope="module", params=[77, 248])
def sdxl(load, request):
    """(CLIP, pipeline) of the same weights, with CLIP-L of 77 or 248 positions."""
    make, widths = load
    models = encoders(*widths, positions=request.param)
    return make(models), sdxl_pipeline(models)


@pytest.fixture(scope="module")
def tokenizing(load):
    """A CLIP of SDXL for tests that encode nothing."""
    make, widths = load
    return make(encoders(*widths, positions=77))


@pytest.mark.parametrize("reading", ["overlap", "separate"])
@pytest.mark.parametrize("prompt", [SHORT, LONG, LONGER, WEIGHTED, ""], ids=["short", "long", "longer", "weighted", ""])
def test_conditioning_is_that_of_our_pipeline(sdxl, prompt, reading):
    clip, pipe = sdxl
    pipe.set_long_prompt(emphasis="comfyui", reading=reading)
    plain = prompt.replace("(and birds)", "\\(and birds\\)")
    # ComfyUI's inner weight replaces the outer one, and ours multiply
    embeds, _, pooled, _ = pipe.encode_prompt(plain.replace("(small:1)", f"(small:{1 / 1.3})"), negative_prompt="")
    node = NODE_CLASS_MAPPINGS["DebiasLongPromptEncode"]()
    (conditioning,) = getattr(node, node.FUNCTION)(clip, plain, reading == "overlap")
    assert embeds.std() > 0.1
    assert difference(conditioning, embeds, pooled) < 1e-4
    if prompt == WEIGHTED:
        pipe.set_long_prompt(reading=reading)
        unweighted = pipe.encode_prompt(re.sub(r"[()]|:[\d.]+", "", plain), negative_prompt="")[0]
        assert difference(conditioning, unweighted) > 0.01


def test_a_negative_prompt_matches_the_positive_one(sdxl):
    clip, pipe = sdxl
    pipe.set_long_prompt()
    node, long = NODE_CLASS_MAPPINGS["DebiasLongPromptEncode"](), LONG.replace("(", "").replace(")", "")
    (positive,) = node.encode(clip, long)
    (negative,) = node.encode(clip, SHORT, match=positive)
    _, embeds, _, pooled = pipe.encode_prompt(long, negative_prompt=SHORT)
    assert difference(negative, embeds, pooled) < 1e-4
    assert node.encode(clip, SHORT)[0][0][0].shape[1] == TRAINED_POSITIONS


def test_a_short_prompt_is_read_as_by_comfyui(sdxl):
    clip, _ = sdxl
    ((theirs, extras),) = clip.encode_from_tokens_scheduled(clip.tokenize("a (red:1.2) cat"))
    assert difference(encode_long_prompt(clip, "a (red:1.2) cat"), theirs, extras["pooled_output"]) == 0


def test_sd15(load):
    make, (width, _) = load
    model, prompt = encoders(width, 64, 77)[0], WEIGHTED.replace("(small:1)", "small")
    parts = tiny_sdxl.sd15_parts() | {"text_encoder": model, "tokenizer": clip_tokenizer(77)}
    pipe = tiny_sdxl.assemble(StableDiffusionLongPromptPipeline, parts).set_long_prompt(emphasis="comfyui")
    embeds, _ = pipe.encode_prompt(prompt, "cpu", 1, True)
    assert difference(encode_long_prompt(make([model]), prompt), embeds) < 1e-4


TEXTS = [
    SHORT,
    LONG,
    "",
    " \n",
    "Mr. Lee's cat, at 3.5 m: (\"Hello!\" he said.) état—naïve Straße\n\n- 5,000 it's; #1 \\o/ 😀😀",
    "一只红猫。它睡在沙发上，旁边有窗户。你好 three，four five",
    "x" * 300 + "antidisestablishmentarianism " * 3,
]


def test_tokens_and_cuts_are_those_of_our_pipeline(tokenizing):
    for text in TEXTS:
        tokens, _ = tokenize_text(text, clip_tokenizer(TRAINED_POSITIONS))
        escaped = text.replace("(", "\\(").replace(")", "\\)")
        assert list(read_text(tokenizing, escaped, ("l", "g")).values()) == [tokens] * 2


def test_tokens_are_those_of_comfyui(tokenizing):
    for text in (LONG, WEIGHTED, "(a) b(c:1.2)d, ((e:1.3)) \\(f\\)"):
        for name, read in read_text(tokenizing, text, ("l", "g")).items():
            rows = tokenizing.tokenize(text, return_word_ids=True)[name]
            theirs = [pair[:2] for row in rows for pair in row if pair[2]]
            assert list(zip(read.ids, read.weights, strict=True)) == theirs


def test_other_encoders_are_refused(tokenizing):
    flux = SimpleNamespace(tokenize=lambda text: tokenizing.tokenize(text) | {"t5xxl": [[(1, 1.0)]]})
    with pytest.raises(ValueError, match="g, l, t5xxl, and the long-prompt node reads"):
        encode_long_prompt(flux, SHORT)
    with pytest.raises(RuntimeError, match="the clip input is None"):
        long_prompt_node.LongPromptEncode().encode(None, SHORT)


def test_patches_and_clip_skip_of_comfyui_count(comfyui):
    models, prompt = encoders(768, 1280, 77), WEIGHTED.replace("(small:1)", "small")
    name = "encoder.layers.0.mlp.fc1.weight"
    change = 0.05 * torch.randn_like(models[0].state_dict()[name])
    clip = comfyui_clip(models).clone()
    clip.add_patches({f"clip_l.transformer.text_model.{name}": ("diff", (change,))})  # as a LoRA does
    clip.clip_layer(-3)
    plain = encode_long_prompt(comfyui_clip(models), prompt)[0][0]
    models[0].state_dict()[name] += change
    embeds, _, pooled, _ = sdxl_pipeline(models).encode_prompt(prompt, negative_prompt="", clip_skip=1)
    ours = encode_long_prompt(clip, prompt)
    assert difference(ours, embeds, pooled) < 1e-4 and (ours[0][0] - plain).abs().mean() > 0.01


def test_textual_inversions_stay_whole(comfyui, tmp_path):
    models, prompt = encoders(768, 1280, 77), "A red cat on a blue sofa, " * 8 + "in the style of {}, with a tree. "
    vectors = {"clip_l": torch.randn(30, 768), "clip_g": torch.randn(30, 1280)}
    save_file(vectors, tmp_path / "style.safetensors")
    clip = comfyui_clip(models, embeddings=str(tmp_path))
    tokens = read_text(clip, prompt.format("embedding:style"), ("l", "g"))
    assert tokens["l"].cuts == tokens["g"].cuts and tokens["l"].cuts.count(0) == 29
    pipe = sdxl_pipeline(models).set_long_prompt()
    for tokenizer, encoder, weights in zip((pipe.tokenizer, pipe.tokenizer_2), models, vectors.values(), strict=True):
        pipe.load_textual_inversion(weights, token="<style>", tokenizer=tokenizer, text_encoder=encoder)
    embeds, _, pooled, _ = pipe.encode_prompt(prompt.format("<style>"), negative_prompt="")
    assert difference(encode_long_prompt(clip, prompt.format("embedding:style")), embeds, pooled) < 1e-4


def test_the_workflow_names_the_node_and_its_inputs():
    workflow = json.loads(Path(long_prompt_node.__file__).with_name(WORKFLOW).read_text())
    nodes = [node for node in workflow.values() if node["class_type"] in NODE_CLASS_MAPPINGS]
    inputs = long_prompt_node.LongPromptEncode.INPUT_TYPES()
    assert [set(node["inputs"]) - set(inputs["required"]) for node in nodes] == [set(), {"match"}]
    assert all(set(inputs["required"]) <= set(node["inputs"]) for node in nodes)
