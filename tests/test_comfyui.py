"""The ComfyUI node: against the vectors of conformance/ everywhere, and in ComfyUI's own text encoders against our
pipelines on the same weights with a checkout, named by the environment variable COMFYUI, whose requirements are
installed beside ours. slow/test_comfyui.py has its server.
"""

import inspect
import json
import re
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_sdxl
from helpers.comfyui import LONG, SENTENCE, difference, importable_comfyui, sdxl_pipeline
from safetensors.torch import save_file
from transformers import CLIPTextModelWithProjection

from conformance import check
from debias_diffusion.app.comfyui import long_prompt_node as node
from debias_diffusion.app.comfyui.long_prompt_node import READINGS, encode_prompt
from debias_diffusion.app.comfyui.schema import LongPromptEncode
from debias_diffusion.encoders.text_encoders import prefixed_state
from debias_diffusion.pipelines import StableDiffusionLongPromptPipeline
from debias_diffusion.text.chunks import TRAINED_POSITIONS, Cut, Tokens
from debias_diffusion.text.tokens import clip_tokenizer

pytestmark = pytest.mark.usefixtures("no_grad")

SHORT = "A red cat sleeps on a blue sofa."
LONGER = LONG.replace("(and birds)", "and birds") * 2  # 280 tokens: more than 248 positions
WEIGHTED = SENTENCE * 5 + "A (green (small:1) tree:1.3)(a dog:0.6)1 red(star:1.3)."
BOS, EOS, COMMA = 49406, 49407, 267
EMPTY = [(BOS, 1.0), *[(EOS, 1.0)] * 76]  # CLIP-L's row of an empty text


def encoders(positions):
    """CLIP-L and bigG with three blocks, of SDXL's widths: its activations, pads and projection."""
    first = tiny_sdxl.text_encoder(768, positions, vocabulary=clip_tokenizer)
    config = tiny_sdxl.text_encoder_2(vocabulary=clip_tokenizer).config
    sizes = {"hidden_size": 1280, "intermediate_size": 2560, "projection_dim": 1280}
    config.update(sizes | {"num_attention_heads": 4})
    models = first, CLIPTextModelWithProjection(config).eval()
    for model in models:  # of CLIP's size, or positions would hardly count
        for name, weight in model.named_parameters():
            if "position_embedding" in name or "token_embedding" in name:
                weight.data.normal_(std=0.5)
    return models


def encode(clip, text, **options):
    """The conditioning alone, of the length of our pipelines unless told otherwise."""
    return encode_prompt(clip, text, **{"multiple_of_77": False} | options)[0]


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


@pytest.fixture(scope="module", params=[77, 248])
def sdxl(comfyui, request):
    """(CLIP, pipeline) of the same weights, with CLIP-L of 77 or 248 positions."""
    models = encoders(request.param)
    return comfyui_clip(models), sdxl_pipeline(models)


@pytest.fixture(scope="module")
def of_77(comfyui):
    """A CLIP of SDXL, both of whose encoders have 77 positions."""
    return comfyui_clip(encoders(77))


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


def test_reading_comfyui_is_that_of_comfyui_and_so_are_short_prompts(of_77):
    cut_words = "a " * 72 + "antidisestablishmentarianism " * 30
    kept_words = SENTENCE * 4 + "(pale white:1.2) (" + "curtains, " * 3 + ":1.1) end"
    calls = [(text, {"reading": "comfyui"}) for text in (LONG, cut_words, kept_words, "", "A 🐈‍⬛ cat. " * 60)]
    calls += [("a (red:1.2) cat", {"reading": name}) for name in READINGS if name != "kohya"]
    for text, call in calls:
        ((theirs, extras),) = of_77.encode_from_tokens_scheduled(of_77.tokenize(text))
        for multiple in (False, True):
            ours = encode(of_77, text, multiple_of_77=multiple, **call)
            assert difference(ours, theirs, extras["pooled_output"]) == 0, call


def test_a_negative_prompt_matches_the_positive_one(sdxl):
    clip, pipe = sdxl
    pipe.set_long_prompt()
    long = LONG.replace("(", "").replace(")", "")
    _, embeds, _, pooled = pipe.encode_prompt(long, negative_prompt=SHORT)
    assert difference(encode(clip, SHORT, match=encode(clip, long)), embeds, pooled) < 1e-4
    assert encode(clip, SHORT)[0][0].shape[1] == TRAINED_POSITIONS


def test_sd15(comfyui):
    model, prompt = encoders(77)[0], WEIGHTED.replace("(small:1)", "small")
    parts = tiny_sdxl.sd15_parts() | {"text_encoder": model, "tokenizer": clip_tokenizer(77)}
    pipe = tiny_sdxl.assemble(StableDiffusionLongPromptPipeline, parts).set_long_prompt(emphasis="comfyui")
    embeds, _ = pipe.encode_prompt(prompt, "cpu", 1, True)
    assert difference(encode(comfyui_clip([model]), prompt), embeds) < 1e-4


@pytest.fixture(scope="module")
def embedded(comfyui, tmp_path_factory):
    """(a CLIP with an SD 1.5 embedding of 4 vectors named sd15, the same without, the vectors)"""
    models, vectors = encoders(77), torch.randn(4, 768)
    folder = tmp_path_factory.mktemp("embeddings")
    save_file({"emb_params": vectors}, folder / "sd15.safetensors")
    return comfyui_clip(models, str(folder)), comfyui_clip(models), vectors


def test_embedding_without_a_name_is_text(embedded):
    clip, plain, _ = embedded
    for text in ("A diagram of an embedding: a list.", "embedding:\n(embedding:) x", "x\x1cembedding: y"):
        assert difference(encode(clip, text), encode(plain, text.replace("embedding:", "embedding :"))[0][0]) == 0


def test_embedding_that_does_not_fit_is_left_out_for_that_encoder(embedded):
    clip, plain, vectors = embedded
    width, text = vectors.shape[1], SENTENCE * 9 + "a red embedding:sd15 " + SENTENCE
    both, one = encode(clip, text)[0][0], encode(plain, text.replace("embedding:sd15 ", ""))[0][0]
    assert torch.equal(both[..., width:], one[..., width:]) and not torch.equal(both[..., :width], one[..., :width])


def test_embeddings_are_found_where_comfyui_finds_them(embedded):
    from comfyui_version import __version__

    if __version__.startswith("0.3."):
        pytest.skip("before 0.33, ComfyUI finds them behind a space or a line's end alone")
    clip, *_ = embedded
    for text, times in (
        ("a\xa0embedding:sd15\u3000b", 1),
        ("一只猫。embedding:sd15", 0),
        ("embedding:sd15\nembedding:sd15 (\tembedding:sd15:1.1)", 3),
        ("x embedding:sd15<lora:y:0.8> z. Embedding:sd15", 1),
        ("a (red embedding:sd15<embedding:sd15:1.3) \\(embedding:sd15\\)", 1),
    ):
        (row,) = clip.tokenize(text, return_word_ids=True)["l"]
        tokens = node.read_text(clip, text, "l").tokens
        assert tokens.weights == [weight for _, weight, word in row if word]
        assert sum(map(torch.is_tensor, tokens.ids)) == 4 * times and tokens.cuts.count(Cut.NEVER) == 3 * times


def test_lengths_compose_with_those_of_comfyui(sdxl):
    clip, _ = sdxl
    for text in (SHORT, LONG, LONGER):
        rounded, plain = encode(clip, text, multiple_of_77=True)[0][0], encode(clip, text)[0][0]
        assert rounded.shape[1] % TRAINED_POSITIONS == 0 and 0 <= rounded.shape[1] - plain.shape[1] < TRAINED_POSITIONS
        assert torch.allclose(rounded[:, : plain.shape[1]], plain, atol=1e-5)


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


def test_other_encoders_and_texts_without_one_are_refused(of_77):
    flux = SimpleNamespace(tokenize=lambda text: of_77.tokenize(text) | {"t5xxl": [[(1, 1.0)]]})
    with pytest.raises(ValueError, match="g, l, t5xxl, and the long-prompt node reads"):
        encode(flux, SHORT)
    with pytest.raises(ValueError, match="has no bigG, which reads `text_g`"):
        encode(comfyui_clip(encoders(77)[:1]), SHORT, text_g=SHORT)


# ---- without ComfyUI


# Signs that programs read in ways of their own, and a text whose chunks here end between pieces alone.
SIGNS = re.compile(r"[()\[\]\\#<]|\w[+-]|:\s*\d|BREAK|図書館")


tokenizer = cache(clip_tokenizer)


def read(prompt, reading):
    """As `read_text` in ComfyUI, of a prompt without signs."""
    words = [node.Word(*at.span(), 1.0, 0) for at in node._PIECE.finditer(prompt)]
    pieces = [prompt[word.start : word.end] for word in words] or [""]
    ids = tokenizer(TRAINED_POSITIONS)(pieces, add_special_tokens=False).input_ids
    found = [(token, word) for word, piece in zip(words, ids, strict=False) for token in piece]
    cuts = node.rate_cuts(prompt, found, reading, COMMA)
    tokens = Tokens([token for token, _ in found], cuts, [1.0] * len(found), ())
    return node.EncoderText(tokens, [(word.start, word.end) for _, word in found], prompt)


@pytest.mark.parametrize("reading", READINGS)
def test_chunks_and_positions_are_those_of_the_vectors(reading):
    prompts, seen = json.loads((check.HERE / "prompts.json").read_text(encoding="utf-8")), Counter()
    for name, vector in check.read(reading)[1].items():
        if SIGNS.search(prompts[name]):
            continue
        tokens = read(prompts[name], reading).tokens
        positions = node.count_positions([tokens], [TRAINED_POSITIONS] * 2, reading)
        given = node.split_rows(tokens, EMPTY, positions, reading)
        expected = [[BOS, *ids, *[EOS] * (76 - len(ids))] for ids in vector["chunks"]]
        assert [[token for token, _ in row] for row in given.rows] == expected, name
        rows = [*given.rows, EMPTY, EMPTY, EMPTY]
        joined = [rows[row][at] for row, start, count in vector["joined"] for at in range(start, start + count)]
        flat = [token for row in rows for token in row]
        assert [flat[at] for at in given.kept] == joined and positions == vector["positions"], name
        seen[len(given.split) > 1] += 1
    assert min(seen[True], seen[False]) > 20


def test_chunks_are_shown():
    def shown(prompt, reading):
        text = read(prompt, reading)
        return node.show_chunks("CLIP-L", node.split_rows(text.tokens, EMPTY, 152, reading).split, text.spans, prompt)

    last = f"{SENTENCE}It dreams of fish."
    expected = f"CLIP-L: 95 tokens, chunks: 2\n1. 72 tokens: {SENTENCE * 4}\n2. 23 tokens: {last}"
    assert shown(SENTENCE * 4 + last, "separate") == expected.replace(" \n", "\n")
    assert f"[{SENTENCE * 2}".strip() in shown(SENTENCE * 4 + last, "overlap")


def test_positions_of_each_encoder_are_joined():
    embeds = torch.arange(32.0).reshape(1, 4, 8)
    kept = node.join_encoders(embeds, [[0, 2, 3], [3, 1, 0]], pooled=torch.zeros(1, 5))  # of widths 3 and 5
    assert torch.equal(kept, torch.cat([embeds[:, [0, 2, 3], :3], embeds[:, [3, 1, 0], 3:]], dim=-1))


def test_a_text_that_no_encoder_reads_and_an_encoder_without_text_are_refused():
    with pytest.raises(RuntimeError, match="the clip input is None"):
        encode_prompt(None, SHORT)
    assert node.choose_texts(SHORT, {"g": LONG, "l": ""}, ["l", "g"]) == {"l": SHORT, "g": LONG}
    with pytest.raises(ValueError, match="no text for bigG"):
        node.choose_texts(None, {"g": None, "l": SHORT}, ["l", "g"])
    with pytest.raises(ValueError, match="has no bigG, which reads `text_g`"):
        node.choose_texts(SHORT, {"g": SHORT, "l": None}, ["l"])


def test_the_declaration_has_the_arguments_of_the_function():
    declared, arguments = LongPromptEncode.INPUT_TYPES(), inspect.signature(encode_prompt).parameters
    names = [*declared["required"], *declared["optional"]]
    assert set(names) == arguments.keys() - {"sizes"} | SIZES.keys()
    for name, (_, looks) in declared["optional"].items():
        default = getattr(arguments.get(name), "default", 0)
        assert looks.get("default") == default, name
