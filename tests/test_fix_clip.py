"""Fix-CLIP against its formulas written out, which base models it refuses, and what its runs leave."""

import json
import math
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from helpers.fix_clip_steps import LAYERS, PROMPTS, N, pixels, prompted
from helpers.literal import literal_info_nce, literal_rebuilt
from helpers.steps import CPU, assert_split_exactly, in_two_processes, prepared
from helpers.tiny_clip import tiny_clip
from helpers.tiny_data import make_tiny_data
from helpers.training_runs import checkpoint, config
from safetensors.torch import load_file

from debias_diffusion.app.export import export
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.clip.regional_prompts import PromptSettings
from debias_diffusion.data.sources import open_data
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import EncoderSpec, load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.methods import METHODS, find_method
from debias_diffusion.methods.fix_clip import draw_mask, mask_size
from debias_diffusion.training.feature_cache import frozen_tower
from debias_diffusion.training.optimizer import Optimizer
from debias_diffusion.training.two_tower import train
from research.ablate.command import AblateConfig, ablate

GROUPS, COMPONENTS = 2, 3
WITH_GROUPS, WITH_PROMPTS = {"groups": GROUPS, "first_group": 1}, {"prompts": PROMPTS}
# (recipe, what is changed in it): rows of the paper's Table 4, and ways that it does not name.
CASES = {
    "all off": ("long-clip", {}),
    "HF+RP": ("long-clip", WITH_GROUPS | WITH_PROMPTS | {"prompt_mask": "none"}),
    "DB+RP+UM": ("fix-clip", {"groups": 0} | WITH_PROMPTS),
    "all": ("fix-clip", WITH_GROUPS | WITH_PROMPTS),
    "discard": ("fix-clip", WITH_GROUPS | WITH_PROMPTS | {"masked_patches": "discard"}),
    "shared": ("fix-clip", WITH_GROUPS | WITH_PROMPTS | {"prompt_layers": "shared", "short_positions": "shared"}),
    "last group": ("fix-clip", {"groups": GROUPS, "first_group": 2, "mask_ratio": 0.0} | WITH_PROMPTS),
}


def setup(case, *samples):
    """See `prepared`."""
    recipe, changes = CASES[case]
    components = min(METHODS[recipe].components, COMPONENTS)
    method = replace(METHODS[recipe], **{"components": components} | changes)
    return prepared(tiny_clip(layers=LAYERS), method, *samples)


def literal_allowed(mask, prompts, patches):
    """[tokens, tokens] for CLS, prompts and these patches: whether the row attends to the column (E3 and Fig. 4)."""
    first = 1 + prompts  # patch
    allowed = torch.ones(first + len(patches), first + len(patches), dtype=torch.bool)
    if mask == "bands":
        allowed[first:, 1:first] = allowed[1:first] = False
        for prompt in range(prompts):
            allowed[1 + prompt, 1 + prompt] = True
            for column, place in enumerate(patches, start=first):
                allowed[1 + prompt, column] = place // (N // prompts) == prompt
    return allowed


def literal_block(block, x, allowed):
    """A block on one sequence [tokens, width], its attention a softmax over what is allowed."""
    attention, heads = block.attn, block.attn.num_heads
    projected = F.linear(block.ln_1(x), attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in projected.chunk(3, dim=-1))
    logits = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).masked_fill(~allowed, -torch.inf)
    x = x + attention.out_proj((logits.softmax(dim=-1) @ value).transpose(0, 1).flatten(1))
    return x + block.mlp(block.ln_2(x))


def literal_image(visual, image, mask, hidden=None, vector=None):
    """(feature, CLS after each block) of one image as a sequence of CLS, prompts and patches.

    `mask`: of the prompts. `hidden` [patches]: in their place is `vector`, or nothing.
    """
    patches, kept = visual.conv1(image[None])[0].flatten(1).T, range(N)
    if hidden is not None and vector is not None:
        patches = torch.where(hidden[:, None], vector, patches)
    elif hidden is not None:
        kept = [place for place in kept if not hidden[place]]
    table = visual.positional_embedding
    x = torch.stack([visual.class_embedding + table[0], *(patches[place] + table[1 + place] for place in kept)])
    x, states = visual.ln_pre(x), []
    prompts = visual.regional_prompts.prompts if mask else x.new_zeros(1, 0, x.shape[1])
    allowed = literal_allowed(mask, prompts.shape[1], kept)
    for number, block in enumerate(visual.transformer.resblocks):
        x = literal_block(block, torch.cat([x[:1], prompts[number % len(prompts)], x[1:]]), allowed)
        x = torch.cat([x[:1], x[1 + prompts.shape[1] :]])
        states.append(x[0])
    return visual.ln_post(x[:1])[0] @ visual.proj, states


def literal_text(model, row, short_table=None):
    """(feature, EOT after each block) of one row of ids, read with the long table or with the one for short captions"""
    table = model.positional_embedding
    if short_table is not None:  # SOT's row is in both tables, and the long one's is read
        table, row = torch.cat([table[:1], short_table[1:]]), row[: len(short_table)]
    x, states = (model.token_embedding(row) + table)[None], []
    causal, eot = torch.full((len(row), len(row)), -torch.inf, dtype=x.dtype).triu(1), int(row.argmax())
    for block in model.transformer.resblocks:
        x = block(x, attn_mask=causal)
        states.append(x[0, eot])
    return model.ln_final(states[-1]) @ model.text_projection, states


def literal_groups(heads, states, group, at):
    """E5 and E6 for the samples' states after each block; `at`: the group's place in the heads."""
    size, rows = LAYERS // GROUPS, []
    for of_blocks in states:
        weights = [math.exp(-((j - size) ** 2) / 2) / math.sqrt(2 * math.pi) for j in range(1, size + 1)]
        blocks = of_blocks[(group - 1) * size : group * size]
        aggregated = sum(weight * state for weight, state in zip(weights, blocks, strict=True))
        rows.append(heads.norms[at](heads.projections[at].weight @ aggregated))
    return F.normalize(torch.stack(rows), dim=-1)


def literal_loss(backbone, method, modules, batch):
    """E1 to E8 on literal rows, one image and one caption after the other."""
    model, visual, n = backbone.model, backbone.model.visual, len(batch)
    mask = method.prompt_mask if method.prompts else None
    image, cls_states = zip(*(literal_image(visual, image, mask) for image in batch.images), strict=True)
    masked = image
    if method.mask_ratio:
        vector = modules["mask"]["vector"] if method.masked_patches == "replace" else None
        views = zip(batch.images, batch.views["is_masked"], strict=True)
        masked = [literal_image(visual, image, mask, hidden, vector)[0] for image, hidden in views]
    tables = [None] * n + [backbone.short_positions if method.short_positions == "own" else None] * n
    rows = zip(batch.tokens.padded(), tables[: len(batch.tokens)], strict=True)
    texts, eot_states = zip(*(literal_text(model, *row) for row in rows), strict=True)
    image, masked, texts = (F.normalize(torch.stack(part), dim=-1) for part in (image, masked, texts))
    masked, scale = literal_rebuilt(masked, COMPONENTS) if method.components else masked, model.logit_scale.exp()
    total = literal_info_nce(image, texts[:n], scale, 0.1) + literal_info_nce(masked, texts[n:], scale, 0.1)
    for at, group in enumerate(method.hierarchy.numbers if method.hierarchy else ()):
        sides = (modules["image_heads"], cls_states), (modules["text_heads"], eot_states[:n])
        features = [literal_groups(heads, states, group, at) for heads, states in sides]
        total = total + 0.8 * 2 ** (group - GROUPS) * literal_info_nce(*features, scale, 0.0)
    return total / 2


@pytest.fixture(scope="module")
def of_processes():
    return in_two_processes(setup, CASES)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_papers_however_the_batch_is_split(case, of_processes):
    step = setup(case)
    assert_split_exactly(step, literal_loss(*step), case, of_processes)


@pytest.mark.parametrize("mask", ["bands", "none"])
def test_evaluations_see_images_with_the_prompts(mask):
    backbone = prompted(mask)
    expected = torch.stack([literal_image(backbone.model.visual, image, mask)[0] for image in pixels()])
    torch.testing.assert_close(backbone.encode_image(pixels()), expected, rtol=1e-9, atol=1e-9)
    assert (backbone.model.encode_image(pixels()) - expected).abs().max() > 1e-3


def test_masks_have_exact_counts_and_depend_on_their_sample_alone():
    assert (mask_size(0.75, 196), mask_size(0.75, 256), mask_size(0.29, 100)) == (147, 192, 29)
    state = torch.get_rng_state()
    drawn = torch.stack([draw_mask(0.75, N, 0, epoch, f"{index}") for epoch in range(40) for index in range(25)])
    assert (drawn.sum(1) == 12).all() and len(drawn.unique(dim=0)) > 500
    assert (drawn.double().mean(0) - 0.75).abs().max() < 5 * math.sqrt(0.75 * 0.25 / 1000)
    assert torch.equal(draw_mask(0.75, N, 0, 3, "7"), drawn[3 * 25 + 7])
    assert not torch.equal(draw_mask(0.75, N, 1, 3, "7"), drawn[3 * 25 + 7])
    assert torch.equal(torch.get_rng_state(), state)


def test_captions_are_long_clips_and_the_short_one_is_cut():
    backbone, method, _, batch = setup("all")
    text = "The first sentence is longer than the short table " + "and goes on " * 60 + "until here. Then another."
    long, short = method.captions(text, backbone.tokenizer, 0, 0, "x")
    plain_long, plain_short = METHODS["long-clip"].captions(text, backbone.tokenizer, 0, 0, "x")
    assert long == plain_long and short.ids == plain_short.ids[:75] and len(plain_short.ids) > 75
    # `prepare`, which training calls, has not said how many are read.
    assert find_method("fix-clip").captions(text, backbone.tokenizer, 0, 0, "x")[-1].ids == plain_short.ids
    assert batch.tokens.is_short.tolist() == [False] * 6 + [True] * 6


def test_new_parameters_alone_have_a_rate_of_their_own():
    backbone, method, modules, _ = setup("all")
    optimizer = Optimizer(
        backbone, 0.0, (0.9, 0.999), 1e-8, modules=modules, rates=replace(method, new_rate=10.0).rates
    )
    optimizer.step(1e-3, dict.fromkeys(("loss", "gradient_norm"), torch.ones(())))
    rates = {id(p): group["lr"] for group in optimizer.adamw.param_groups for p in group["params"]}
    new = {id(parameter) for parameter in (*modules.parameters(), backbone.model.visual.regional_prompts.prompts)}
    assert {parameter for parameter, rate in rates.items() if rate == 1e-2} == new
    assert {rate for parameter, rate in rates.items() if parameter not in new} == {1e-3}


# ---- runs

SETTINGS = dict(recipe="fix-clip", components=None, sampling="given", max_steps=4, groups=2, prompts=3)


@pytest.fixture(scope="module")
def fix_world(tmp_path_factory):
    """(base model of four blocks a tower, data with short captions, image folder)"""
    folder = tmp_path_factory.mktemp("world")
    data, images = make_tiny_data(folder)
    entries = json.loads(Path(data).read_text())
    for number, entry in enumerate(entries):
        entry["short_caption"] = f"Two  colours, number {number}."
    Path(data).write_text(json.dumps(entries))
    tiny_clip(layers=LAYERS).save(folder / "base")
    return str(folder / "base"), data, images


@pytest.fixture(scope="module")
def finished(fix_world, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    train(config(fix_world, output, **SETTINGS))
    return output


def short_table(folder):
    return load_file(folder / "last" / "short_positions.safetensors")["positional_embedding"]


def test_a_run_leaves_what_inference_needs_and_may_be_trained_on(fix_world, finished, tmp_path):
    weights = load_file(finished / "last" / "open_clip_model.safetensors")
    assert "visual.regional_prompts.prompts" in weights and not any("vector" in name for name in weights)
    assert {"mask.vector", "image_heads.norms.0.weight"} < checkpoint(finished, 4)["modules"].keys()
    assert torch.equal(short_table(finished), load_backbone(fix_world[0]).model.positional_embedding)
    train(config((str(finished / "last"), *fix_world[1:]), tmp_path / "on", **SETTINGS))
    assert torch.equal(short_table(tmp_path / "on"), short_table(finished))


def test_caches_know_the_prompts_and_other_programs_refuse_them(finished, tmp_path):
    backbone = load_two_tower(finished)
    assert backbone.prompt_settings == PromptSettings(3)
    with pytest.raises(RuntimeError, match="regional_prompts"):
        open_clip.create_model(f"local-dir:{finished / 'last'}")
    with pytest.raises(UserError, match="has regional prompts, whose attention cannot be replaced"):
        ablate(AblateConfig(str(finished), str(tmp_path / "ablated"), data="toy/test", search="naive"))
    key, digest = frozen_tower(backbone, CPU, "fp32").key, backbone.digest()
    backbone.config["debias_diffusion"]["regional_prompts"]["mask"] = "none"
    assert frozen_tower(backbone, CPU, "fp32").key != key and backbone.digest() != digest


def test_evaluations_read_short_captions_with_their_own_positions(finished, fix_world, tmp_path):
    """The paper's Table 13: the same weights, captions cut at the short table's length and read with it."""
    names = [str(finished), f"short:{finished}"]
    long, short = map(load_two_tower, names)
    assert torch.equal(short.model.positional_embedding, short_table(finished)) and short.digest() != long.digest()
    assert len({EncoderSpec.parse(name).digest[-64:] for name in names}) == 2  # which the PNG of an image holds
    [table] = (part for name, part in load_text_encoder(names[1])[0].state_dict().items() if "position_emb" in name)
    assert torch.equal(table, short_table(finished))
    export(ExportConfig(str(tmp_path / "export"), str(finished), positions="short"))
    exported = load_text_encoder(tmp_path / "export")[0].state_dict().values()
    assert all(map(torch.equal, exported, load_text_encoder(names[1])[0].state_dict().values()))
    data, images = fix_world[1:]
    encoders = evaluate_retrieval(RetrievalConfig(names, str(tmp_path), data, images=images))["encoders"]
    assert [numbers["window"] for numbers in encoders.values()] == [248, 77] and list(encoders)[1] == names[1]
    with pytest.raises(UserError, match="no short_positions.safetensors"):
        load_two_tower("short:toy/clip")


def test_short_captions_of_the_data_are_read_everywhere(fix_world, tmp_path):
    model, data, images = fix_world
    records = open_data(data, images)[0].records
    assert records[3].short == "Two colours, number 3."
    write_shards(ShardsConfig(data, str(tmp_path / "shards"), images, workers=0))
    assert [read.short for read in open_data(tmp_path / "shards")[0].records] == [read.short for read in records]
    entries = json.loads(Path(data).read_text())
    for entry, short in zip(entries, ("", 5, None), strict=False):
        entry["short_caption"] = short
    (tmp_path / "data.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match="Of 24 records looked up, 3 cannot be used.*short_caption is missing"):
        train(config((model, str(tmp_path / "data.json"), images), tmp_path / "run", **SETTINGS, validation=0))
