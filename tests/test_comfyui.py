"""The ComfyUI node against our pipelines on the same weights.

With a checkout of ComfyUI, named by the environment variable COMFYUI, whose requirements are installed beside ours, its
own text encoders run; slow/test_comfyui.py has its server. Everywhere, tests that compare with our pipelines run with
a stand-in for its CLIP: real transformers encoders behind the two calls that the node makes, and as much of its syntax
of weights as the prompts need. The vocabulary is CLIP's own, the only one that ComfyUI has.
"""

import inspect
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import tiny_sdxl
from helpers.comfyui import COMFYUI, LONG, SENTENCE, difference, importable_comfyui, sdxl_pipeline
from safetensors.torch import save_file
from transformers import CLIPTextModelWithProjection

from debias_diffusion.app.comfyui.long_prompt_node import READINGS, encode_prompt, read_text
from debias_diffusion.app.comfyui.schema import LongPromptEncode
from debias_diffusion.encoders.text_encoders import prefixed_state
from debias_diffusion.pipelines import StableDiffusionLongPromptPipeline
from debias_diffusion.text.chunks import TRAINED_POSITIONS, Cut
from debias_diffusion.text.tokens import clip_tokenizer

pytestmark = pytest.mark.usefixtures("no_grad")

SHORT = "A red cat sleeps on a blue sofa."
LONGER = LONG.replace("(and birds)", "and birds") * 2  # 280 tokens: more than 248 positions
WEIGHTED = SENTENCE * 5 + "A (green (small:1) tree:1.3)(a dog:0.6)1 red(star:1.3)."
BOS, EOS = 49406, 49407
PADS = {"l": EOS, "g": 0}
EMBEDDING = "embedding:sd15"


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
    """What the node calls of ComfyUI's CLIP, with transformers' encoders, for pieces of text that fit a row."""

    def __init__(self, models, vectors=None):
        self.models = dict(zip("lg", models, strict=False))
        wrapped = {f"clip_{name}": SimpleNamespace(transformer=model) for name, model in self.models.items()}
        self.cond_stage_model = SimpleNamespace(**wrapped)
        self.tokenizer, self.vectors = clip_tokenizer(TRAINED_POSITIONS), vectors

    def tokenize(self, text, return_word_ids=False):
        rows, text = {}, text.replace("\\", "")
        for name, model in self.models.items():
            words = self.vectors if text == EMBEDDING else self.tokenizer(text, add_special_tokens=False).input_ids
            pads = [(PADS[name], 1.0, 0)] * (model.config.max_position_embeddings - 2 - len(words))
            row = [(BOS, 1.0, 0), *((word, 1.0, 1) for word in words), (EOS, 1.0, 0), *pads]
            rows[name] = [row if return_word_ids else [pair[:2] for pair in row]]
        return rows

    def encode_from_tokens_scheduled(self, rows, add_dict=None):
        states, pooled = zip(*(self.encode(model, rows[name]) for name, model in self.models.items()), strict=True)
        shortest = min(part.shape[1] for part in states)
        states = torch.cat([part[:, :shortest] for part in states], dim=-1)
        return [[states, {"pooled_output": pooled[-1]} | (add_dict or {})]]

    def encode(self, model, rows):
        rows, weights = torch.tensor(rows).unbind(-1)
        (empty,) = (row for name, row in self.tokenize("").items() if self.models[name] is model)
        ids = torch.cat([rows, torch.tensor(empty)[..., 0]]).long()
        output = model(ids, output_hidden_states=True)
        states = output.hidden_states[-2] if len(self.models) == 2 else output.last_hidden_state
        states, empty, weights = states[:-1], states[-1], weights[..., None]
        states = torch.where(weights == 1, states, empty + weights * (states - empty))
        pooled = output.text_embeds if "text_embeds" in output else output.pooler_output
        return states.reshape(1, -1, states.shape[-1]), pooled[:1]


def encode(clip, text, **options):
    """The conditioning alone, of the length of our pipelines unless told otherwise."""
    return encode_prompt(clip, text, **{"multiple_of_77": False} | options)[0]


def read_tokens(clip, text, names=("l", "g"), reading="overlap"):
    return {name: read_text(clip, text, name, reading).tokens for name in names}


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


@pytest.fixture(scope="module", params=["stand-in", pytest.param("ComfyUI", marks=pytest.mark.needs("comfyui"))])
def load(request):
    """(a function from models to a CLIP, widths of the models)"""
    if COMFYUI or request.param == "ComfyUI":
        request.getfixturevalue("comfyui")
        yield (comfyui_clip, (768, 1280)) if request.param == "ComfyUI" else (StandIn, (32, 64))
        return
    module = ModuleType("comfy.sd1_clip")
    module.escape_important = lambda text: text.replace("\\(", "\0").replace("\\)", "\1")
    module.unescape_important = lambda text: text.replace("\0", "(").replace("\1", ")")
    module.token_weights = token_weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "comfy", ModuleType("comfy"))
        patch.setitem(sys.modules, "comfy.sd1_clip", module)
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


PROMPTS = {"longer": LONGER, "weighted": WEIGHTED, "empty": ""}


@pytest.mark.parametrize("reading", ["overlap", "separate", "a1111", "kohya"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_conditioning_is_that_of_our_pipeline(sdxl, prompt, reading):
    clip, pipe = sdxl
    pipe.set_long_prompt(emphasis="comfyui", reading=reading)
    plain = prompt.replace("(and birds)", "\\(and birds\\)")
    # ComfyUI's inner weight replaces the outer one, and ours multiply
    embeds, _, pooled, _ = pipe.encode_prompt(plain.replace("(small:1)", f"(small:{1 / 1.3})"), negative_prompt="")
    assert difference(encode(clip, plain, reading=reading), embeds, pooled) < 1e-4 < embeds.std()


BROKEN = SENTENCE * 4 + "BREAK (a BREAK green tree:1.2), " + SENTENCE * 2 + "BREAK"


@pytest.mark.parametrize("reading", ["overlap", "separate"])
def test_break_begins_a_chunk_if_it_counts(sdxl, reading):
    clip, pipe = sdxl
    pipe.set_long_prompt(emphasis="comfyui", reading=reading)
    embeds, _, pooled, _ = pipe.encode_prompt(BROKEN, negative_prompt="")
    assert difference(encode(clip, BROKEN, reading=reading, breaks=True), embeds, pooled) < 1e-4
    embeds, *_ = pipe.encode_prompt(BROKEN.replace("BREAK", "break"), negative_prompt="")
    assert difference(encode(clip, BROKEN, reading=reading), embeds) < 1e-4
    for program in ("a1111", "comfyui"):
        ((states, _),) = encode(clip, SENTENCE * 6 + "BREAK b", reading=program, breaks=True)
        assert states.shape[1] == 3 * TRAINED_POSITIONS


def test_reading_comfyui_is_that_of_comfyui_and_so_are_short_prompts(comfyui):
    tokenizing = comfyui_clip(encoders(768, 1280, positions=77))
    cut_words = "a " * 72 + "antidisestablishmentarianism " * 30
    kept_words = SENTENCE * 4 + "(pale white:1.2) (" + "curtains, " * 3 + ":1.1) end"
    calls = [(text, {"reading": "comfyui"}) for text in (LONG, cut_words, kept_words, "", "A 🐈‍⬛ cat. " * 60)]
    calls += [("a (red:1.2) cat", {"reading": name}) for name in READINGS if name != "kohya"]
    for text, call in calls:
        ((theirs, extras),) = tokenizing.encode_from_tokens_scheduled(tokenizing.tokenize(text))
        for multiple in (False, True):
            ours = encode(tokenizing, text, multiple_of_77=multiple, **call)
            assert difference(ours, theirs, extras["pooled_output"]) == 0, call


def test_a_negative_prompt_matches_the_positive_one(sdxl):
    clip, pipe = sdxl
    pipe.set_long_prompt()
    long = LONG.replace("(", "").replace(")", "")
    _, embeds, _, pooled = pipe.encode_prompt(long, negative_prompt=SHORT)
    assert difference(encode(clip, SHORT, match=encode(clip, long)), embeds, pooled) < 1e-4
    assert encode(clip, SHORT)[0][0].shape[1] == TRAINED_POSITIONS


def test_sd15(load):
    make, (width, _) = load
    model, prompt = encoders(width, 64, 77)[0], WEIGHTED.replace("(small:1)", "small")
    parts = tiny_sdxl.sd15_parts() | {"text_encoder": model, "tokenizer": clip_tokenizer(77)}
    pipe = tiny_sdxl.assemble(StableDiffusionLongPromptPipeline, parts).set_long_prompt(emphasis="comfyui")
    embeds, _ = pipe.encode_prompt(prompt, "cpu", 1, True)
    assert difference(encode(make([model]), prompt), embeds) < 1e-4


@pytest.fixture(scope="module")
def embedded(comfyui, tmp_path_factory):
    """(a CLIP with an SD 1.5 embedding of 4 vectors named sd15, the same without, the vectors)"""
    models, vectors = encoders(768, 1280, positions=77), torch.randn(4, 768)
    folder = tmp_path_factory.mktemp("embeddings")
    save_file({"emb_params": vectors}, folder / "sd15.safetensors")
    return comfyui_clip(models, str(folder)), comfyui_clip(models), vectors


def test_embedding_without_a_name_is_text(embedded):
    clip, plain, _ = embedded
    for text in ("A diagram of an embedding: a list.", "embedding:\n(embedding:) x", "x\x1cembedding: y"):
        assert difference(encode(clip, text), encode(plain, text.replace("embedding:", "embedding :"))[0][0]) == 0


def test_vectors_of_another_width_are_left_out_for_that_encoder(load):
    make, widths = load
    if make is comfyui_clip:
        pytest.skip("in which an embedding is a file")
    clip = StandIn(encoders(*widths, positions=77), list(torch.randn(4, widths[0])))
    text = f"{SENTENCE * 9}a (red {EMBEDDING} star:1.2) {SENTENCE}"
    tokens, without = (read_tokens(clip, part) for part in (text, text.replace(f"{EMBEDDING} ", "")))
    assert tokens["g"] == without["g"] and len(tokens["l"].ids) == len(without["l"].ids) + 4
    assert tokens["l"].cuts.count(Cut.NEVER) == 3


def test_embedding_that_does_not_fit_is_left_out_for_that_encoder(embedded):
    clip, plain, vectors = embedded
    width, text = vectors.shape[1], SENTENCE * 9 + "a red embedding:sd15 " + SENTENCE
    both, one = encode(clip, text)[0][0], encode(plain, text.replace("embedding:sd15 ", ""))[0][0]
    assert torch.equal(both[..., width:], one[..., width:]) and not torch.equal(both[..., :width], one[..., :width])


def test_embeddings_are_found_where_comfyui_finds_them(embedded):
    clip, *_ = embedded
    for text, times in (
        ("a\xa0embedding:sd15\u3000b", 1),
        ("一只猫。embedding:sd15", 0),
        ("embedding:sd15\nembedding:sd15 (\tembedding:sd15:1.1)", 3),
        ("x embedding:sd15<lora:y:0.8> z. Embedding:sd15", 1),
        ("a (red embedding:sd15<embedding:sd15:1.3) \\(embedding:sd15\\)", 1),
    ):
        (row,) = clip.tokenize(text, return_word_ids=True)["l"]
        read = read_tokens(clip, text, ["l"])["l"]
        assert read.weights == [weight for _, weight, word in row if word]
        assert sum(map(torch.is_tensor, read.ids)) == 4 * times and read.cuts.count(Cut.NEVER) == 3 * times


def test_lengths_compose_with_those_of_comfyui(sdxl):
    clip, _ = sdxl
    for text in (SHORT, LONG, LONGER):
        rounded, plain = encode(clip, text, multiple_of_77=True)[0][0], encode(clip, text)[0][0]
        assert rounded.shape[1] % TRAINED_POSITIONS == 0 and 0 <= rounded.shape[1] - plain.shape[1] < TRAINED_POSITIONS
        assert torch.allclose(rounded[:, : plain.shape[1]], plain, atol=1e-5)


def test_chunks_are_shown(tokenizing):
    long = SENTENCE * 5 + "It (dreams:1.2) of fish."
    _, shown = encode_prompt(tokenizing, long, reading="separate")
    text = f"CLIP-L: 95 tokens, chunks: 2\n1. 72 tokens: {SENTENCE * 4}\n2. 23 tokens: {SENTENCE}It dreams of fish."
    assert shown == "\n\n".join(text.replace("CLIP-L", name).replace(" \n", "\n") for name in ("CLIP-L", "bigG"))
    assert f"[{SENTENCE * 2}".strip() in encode_prompt(tokenizing, long)[1]
    assert encode_prompt(tokenizing, "a " * 300, reading="kohya")[1].startswith("CLIP-L: 225 tokens, chunks: 3")


SIZES = {"width": 1216, "height": 832, "crop_w": 0, "crop_h": 64, "target_width": 1024, "target_height": 768}


def test_each_encoder_reads_its_own_text(sdxl):
    clip, pipe = sdxl
    pipe.set_long_prompt(emphasis="comfyui")
    weighted, long = WEIGHTED.replace("(small:1)", "small"), LONG.replace("(and birds)", "and birds")
    for text_l, text_g in ((weighted, long), (long, SHORT), ("", SHORT)):
        embeds, _, pooled, _ = pipe.encode_prompt(text_l, text_g, negative_prompt="")
        # With `text`, an empty one of the two is no text of its own.
        for call in ({"text": None, "text_l": text_l}, {"text_l": "", "text": text_l}):
            ours = encode(clip, **call, text_g=text_g, **SIZES)
            assert difference(ours, embeds, pooled) < 1e-4
            given = {name: ours[0][1][name] for name in SIZES if name in ours[0][1]}
            assert given == {name: size for name, size in SIZES.items() if size}


def test_other_encoders_and_texts_without_one_are_refused(load, tokenizing):
    flux = SimpleNamespace(tokenize=lambda text: tokenizing.tokenize(text) | {"t5xxl": [[(1, 1.0)]]})
    with pytest.raises(ValueError, match="g, l, t5xxl, and the long-prompt node reads"):
        encode(flux, SHORT)
    with pytest.raises(RuntimeError, match="the clip input is None"):
        encode(None, SHORT)
    with pytest.raises(ValueError, match="no text for bigG"):
        encode(tokenizing, None, text_l=SHORT)
    make, (width, width_2) = load
    with pytest.raises(ValueError, match="has no bigG, which reads `text_g`"):
        encode(make(encoders(width, width_2, 77)[:1]), SHORT, text_g=SHORT)


def test_the_declaration_has_the_arguments_of_the_function():
    declared, arguments = LongPromptEncode.INPUT_TYPES(), inspect.signature(encode_prompt).parameters
    names = [*declared["required"], *declared["optional"]]
    assert set(names) == arguments.keys() - {"sizes"} | SIZES.keys()
    for name, (_, looks) in declared["optional"].items():
        default = getattr(arguments.get(name), "default", 0)
        assert looks.get("default") == default, name
