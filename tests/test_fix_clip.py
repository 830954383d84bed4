"""Fix-CLIP against its formulas written out: prompts, masks, hierarchy, both tables of positions, and whole steps."""

import json
import math
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from helpers.fix_clip_steps import (
    CASES,
    COMPONENTS,
    GROUPS,
    LAYERS,
    PROMPTS,
    N,
    gradients,
    make_batch,
    method_of,
    pixels,
    prompted,
    setup,
)
from helpers.literal import literal_info_nce
from helpers.ranks import ranks
from helpers.tiny_clip import everyday, tiny_clip, tiny_siglip
from helpers.tiny_data import caption, make_tiny_data
from helpers.training_runs import checkpoint, config, is_the_same_run, killed_copy
from open_clip.transformer import PatchDropout
from safetensors.torch import load_file

from debias_diffusion.app.ablate import AblateConfig, ablate
from debias_diffusion.app.cli import main
from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.data.sources import open_data
from debias_diffusion.encoders import load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.methods import METHODS, find_method
from debias_diffusion.methods.fix_clip import Hierarchy, MaskedView
from debias_diffusion.methods.keep_states import KeepStates
from debias_diffusion.models.image_tower import ImageTower, MaskedPatches
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.models.regional_prompts import LAYERS as SHARINGS
from debias_diffusion.models.regional_prompts import MASKS, PromptSettings
from debias_diffusion.training.config import RECIPE_OPTIONS, TrainConfig
from debias_diffusion.training.feature_cache import FrozenTower
from debias_diffusion.training.loop import train
from debias_diffusion.training.optimizer import Optimizer
from debias_diffusion.training.step import backward

CPU = Accelerator(cpu=True)


# ---- the image tower, as the paper writes it


def literal_allowed(mask, patches, count=PROMPTS):
    """[1 + count + len(patches)] squared, 1 where the row may attend: E3 and Fig. 4, `patches` by their numbers."""
    size, length = 1 + count + len(patches), N // count
    allowed = torch.zeros(size, size, dtype=torch.float64)
    kinds = ["cls", *range(count), *(("patch", patch) for patch in patches)]
    for row, query in enumerate(kinds):
        for column, key in enumerate(kinds):
            key_is_prompt = isinstance(key, int)
            if query == "cls" or mask == "none":
                seen = True
            elif isinstance(query, int):
                in_band = isinstance(key, tuple) and query * length <= key[1] < (query + 1) * length
                seen = key == query if key_is_prompt else key != "cls" and (mask == "r2p" or in_band)
            else:
                seen = not key_is_prompt or mask == "p2r"
            allowed[row, column] = seen
    return allowed


def literal_attention(block, x, allowed):
    """Softmax attention of one sequence [tokens, width], where `allowed` is 1."""
    attention, heads = block.attn, block.attn.num_heads
    query, key, value = (
        part.unflatten(-1, (heads, -1)).transpose(0, 1)
        for part in F.linear(block.ln_1(x), attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    )
    logits = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    logits = logits.masked_fill(allowed == 0, -torch.inf)
    attended = (logits.softmax(dim=-1) @ value).transpose(0, 1).flatten(1)
    x = x + attention.out_proj(attended)
    return x + block.mlp(block.ln_2(x))


def literal_image(visual, image, mask=None, is_masked=None, vector=None):
    """(feature, CLS after each block) of one image: a sequence of CLS, prompts and patches, softmax over all of it."""
    patches = visual.conv1(image[None])[0].flatten(1).T
    kept = list(range(N))
    if is_masked is not None and vector is not None:
        patches = torch.stack([vector if hidden else patch for hidden, patch in zip(is_masked, patches, strict=True)])
    elif is_masked is not None:
        kept = [place for place in kept if not is_masked[place]]
    table = visual.positional_embedding
    x = torch.stack([visual.class_embedding + table[0], *(patches[place] + table[1 + place] for place in kept)])
    x = visual.ln_pre(x)
    prompts = visual.regional_prompts.prompts if mask else None
    allowed = literal_allowed(mask, kept) if mask else torch.ones(len(x), len(x), dtype=torch.float64)
    states = []
    for number, block in enumerate(visual.transformer.resblocks):
        if mask:
            x = torch.cat([x[:1], prompts[number % len(prompts)], x[1:]])
        x = literal_attention(block, x, allowed)
        if mask:
            x = torch.cat([x[:1], x[1 + PROMPTS :]])
        states.append(x[0])
    return visual.ln_post(x[:1])[0] @ visual.proj, states


@pytest.mark.parametrize(("mask", "layers"), product(MASKS, SHARINGS))
def test_prompts_equal_explicit_softmax_over_all_tokens(mask, layers):
    backbone = prompted(mask, layers)
    visual, images = backbone.model.visual, pixels()
    weights = torch.randn(3, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = torch.stack([literal_image(visual, image, mask)[0] for image in images])
    (expected * weights).sum().backward()
    expected_gradients = gradients(visual)
    assert expected_gradients["regional_prompts.prompts"].abs().amax(dim=(1, 2)).min() > 0
    tower = ImageTower(visual)
    for encode in (backbone.encode_image, lambda x: tower.encode_with_masked(x)[0]):
        visual.zero_grad()
        features = encode(images)
        torch.testing.assert_close(features, expected, rtol=1e-9, atol=1e-9)
        (features * weights).sum().backward()
        for name, gradient in gradients(visual).items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-9, atol=1e-9, msg=name)
        assert gradients(visual).keys() == expected_gradients.keys()


def test_what_prompts_attend_to_changes_nothing():
    features = {mask: prompted(mask).encode_image(pixels()) for mask in MASKS}
    assert torch.equal(features["r2p"], features["bands"]) and torch.equal(features["p2r"], features["none"])
    assert (features["bands"] - features["none"]).abs().max() > 1e-3


def test_the_plain_tower_equals_open_clips_and_other_recipes_use_that():
    backbone = tiny_clip(layers=LAYERS).double()
    tower, images = ImageTower(backbone.model.visual), pixels()
    features, masked, states = tower.encode_with_masked(images, [0, -1])
    expected = backbone.model.encode_image(images)
    torch.testing.assert_close(features, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(states, tower.encode(images, [0, -1])[1], rtol=1e-9, atol=1e-9)
    assert masked is None and torch.equal(backbone.encode_image(images), expected)
    is_masked = torch.zeros(3, N, dtype=torch.bool)
    is_masked[:, :4] = True
    with torch.no_grad():  # masked patches are as those of the image, if the vector is
        images[:, :, :8] = 0
    both = tower.encode_with_masked(images, masked=MaskedPatches(is_masked, torch.zeros(32, dtype=torch.float64)))
    torch.testing.assert_close(both[0], both[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("discard", [False, True])
def test_both_views_equal_the_formulas_with_and_without_checkpointing(discard, checkpointing):
    backbone = prompted("bands")
    visual, images = backbone.model.visual, pixels().requires_grad_()
    is_masked = torch.stack([MaskedView(0.75).draw(N, 0, 0, str(index)) for index in range(3)])
    vector = None if discard else torch.randn(32, dtype=torch.float64).requires_grad_()
    expected = [literal_image(visual, image, "bands") for image in images]
    hidden = [
        literal_image(visual, image, "bands", row, vector)[0] for image, row in zip(images, is_masked, strict=True)
    ]
    backbone.model.visual.set_grad_checkpointing(checkpointing)
    features, masked, states = ImageTower(visual).encode_with_masked(images, [1, 3], MaskedPatches(is_masked, vector))
    torch.testing.assert_close(features, torch.stack([feature for feature, _ in expected]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(masked, torch.stack(hidden), rtol=1e-9, atol=1e-9)
    for place, block in enumerate((1, 3)):
        torch.testing.assert_close(
            states[:, place], torch.stack([of[block] for _, of in expected]), rtol=1e-9, atol=1e-9
        )
    # Masked pixels are not seen in the masked view, and all others are.
    (gradient,) = torch.autograd.grad(masked.square().sum(), images)
    per_patch = gradient.abs().unfold(2, 8, 8).unfold(3, 8, 8).sum(dim=(1, 4, 5)).flatten(1)
    assert torch.equal(per_patch == 0, is_masked)


def test_finite_differences_of_prompts_and_mask_vector():
    backbone, method, modules, batch = setup("7 all")
    backward(backbone, method, batch, CPU, modules=modules)
    for parameter in (backbone.model.visual.regional_prompts.prompts, modules.mask_vector):
        direction, epsilon, ends = torch.randn_like(parameter), 1e-6, []
        slope = (parameter.grad * direction).sum().item()
        for sign in (1, -2):
            with torch.no_grad():
                parameter.add_(sign * epsilon * direction)
                losses, _ = method.losses(method.encode(backbone, batch, modules), backbone.logit_scale.exp())
            ends.append(sum(losses.values()).item())
        with torch.no_grad():
            parameter.add_(epsilon * direction)
        assert (ends[0] - ends[1]) / (2 * epsilon) == pytest.approx(slope, rel=1e-4)


# ---- what is drawn


def test_masks_have_exact_counts_and_depend_on_their_sample_alone():
    view = MaskedView(0.75)
    assert (view.count(196), view.count(256), MaskedView(0.29).count(100)) == (147, 192, 29)
    drawn = torch.stack([view.draw(N, 0, epoch, f"{index}") for epoch in range(40) for index in range(25)])
    assert (drawn.sum(1) == 12).all() and len(drawn.unique(dim=0)) > 500
    shares = drawn.double().mean(0)
    assert (shares - 0.75).abs().max() < 5 * math.sqrt(0.75 * 0.25 / 1000)
    state = torch.get_rng_state()
    assert torch.equal(view.draw(N, 0, 3, "x"), view.draw(N, 0, 3, "x"))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(view.draw(N, 1, 3, "x"), view.draw(N, 0, 3, "x"))


def test_captions_are_long_clips_and_the_short_one_is_cut():
    backbone, method, _, batch = setup("7 all")
    text = "The first sentence is longer than the short table " + "and goes on " * 60 + "until here. Then another."
    arguments = text, backbone.tokenizer, 0, 0, "x"
    long, short = method.captions(*arguments)
    plain = METHODS["long-clip"].captions(*arguments)
    assert long == plain[0] and short.ids == plain[1].ids[:75] and short.is_short and len(plain[1].ids) > 75
    assert backbone.tokenizer.tokenizer.model_max_length == 248
    assert batch.tokens.is_short.tolist() == [False] * 6 + [True] * 6
    assert [chunk.tokens.is_short.tolist() for chunk in batch.chunks(4)] == [
        [False] * 4 + [True] * 4,
        [False] * 2 + [True] * 2,
    ]


def test_short_captions_are_read_as_by_the_base_model_and_long_ones_as_without_them():
    backbone, method, _, batch = setup("1 DB")
    base = tiny_clip(layers=LAYERS).double()
    texts, n = backbone.encode_text(batch.tokens), len(batch)
    shorts = [method.captions(caption(index), backbone.tokenizer, 0, 0, str(index))[1].ids for index in range(n)]
    rows = base.tokenizer.batch(shorts)
    torch.testing.assert_close(texts[n:], base.model.encode_text(rows.padded()), rtol=1e-9, atol=1e-9)
    everyday(backbone.model)  # the long table moves, the short one does not
    long = backbone.tokenizer([caption(index) for index in range(n)])
    torch.testing.assert_close(backbone.encode_text(batch.tokens)[:n], backbone.encode_text(long), rtol=1e-9, atol=1e-9)


# ---- hierarchy and losses


def test_aggregation_and_weights_are_the_papers():
    hierarchy = Hierarchy(6, 4)
    assert [hierarchy.weight(group) for group in hierarchy.numbers] == pytest.approx([0.2, 0.4, 0.8])
    assert hierarchy.blocks(12) == [6, 7, 8, 9, 10, 11] and hierarchy.blocks(24) == list(range(12, 24))
    states = torch.randn(2, 12, 5, dtype=torch.float64)  # after the last twelve of 24 blocks
    aggregated = hierarchy.aggregate(states)
    for group in range(3):
        expected = sum(
            math.exp(-((j - 4) ** 2) / 2) / math.sqrt(2 * math.pi) * states[:, 4 * group + j - 1] for j in range(1, 5)
        )
        torch.testing.assert_close(aggregated[:, group], expected)


def literal_loss(case, backbone, method, modules, batch):
    """E1 to E8 on literal rows, one image after the other."""
    visual, tower, n = backbone.model.visual, backbone.model, len(batch)
    mask = method.prompt_mask if method.prompts else None
    raw = [literal_image(visual, image, mask) for image in batch.images]
    image = torch.stack([feature for feature, _ in raw])
    masked = image
    if method.mask_ratio:
        vector = modules.mask_vector if method.masked_patches == "replace" else None
        masked = torch.stack(
            [
                literal_image(visual, picture, mask, row, vector)[0]
                for picture, row in zip(batch.images, batch.views["is_masked"], strict=True)
            ]
        )
    texts, eot_states = [], []
    for at, row in enumerate(batch.tokens.padded()):
        table = tower.positional_embedding
        if method.short_positions == "own" and at >= n:
            # SOT's row is in both tables, and the long one's is read
            table, row = torch.cat([table[:1], backbone.short_positions[1:]]), row[:77]
        x = (tower.token_embedding(row) + table)[None]
        mask, eot, states = torch.full((len(row), len(row)), -torch.inf, dtype=x.dtype).triu(1), int(row.argmax()), []
        for block in tower.transformer.resblocks:
            x = block(x, attn_mask=mask)
            states.append(x[0, eot])
        texts.append(tower.ln_final(x[0, eot]) @ tower.text_projection)
        eot_states.append(states)
    image, masked, texts = (F.normalize(part, dim=-1) for part in (image, masked, torch.stack(texts)))
    if method.components:
        mean = masked.mean(0)
        basis = torch.linalg.svd((masked - mean).detach(), full_matrices=False).Vh[:COMPONENTS].T
        masked = mean + (masked - mean) @ basis @ basis.T
    scale = tower.logit_scale.exp()
    if not (method.has_long and method.has_short):
        return literal_info_nce(masked if method.has_short else image, texts, scale, 0.1)
    total = literal_info_nce(image, texts[:n], scale, 0.1) + literal_info_nce(masked, texts[n:], scale, 0.1)
    for at, group in enumerate(method.hierarchy.numbers if method.hierarchy else ()):
        size = LAYERS // GROUPS
        sides = []
        for heads, states in ((modules.image_heads, [of for _, of in raw]), (modules.text_heads, eot_states[:n])):
            rows = []
            for of_blocks in states:
                gta = sum(
                    math.exp(-((j - size) ** 2) / 2) / math.sqrt(2 * math.pi) * of_blocks[(group - 1) * size + j - 1]
                    for j in range(1, size + 1)
                )
                rows.append(heads.norms[at](heads.projections[at].weight @ gta))
            sides.append(F.normalize(torch.stack(rows), dim=-1))
        total = total + 0.8 * 2 ** (group - GROUPS) * literal_info_nce(*sides, scale, 0.0)
    return total / 2


@pytest.fixture(scope="module")
def shared_gradients():
    """What each of two processes, with half of the samples in chunks of two, ends with: [{case: gradients}]"""

    def steps(accelerator):
        assert accelerator.num_processes == 2
        found = {}
        for case in CASES:
            backbone, method, modules, batch = setup(case, size=3, first=3 * accelerator.process_index)
            backward(backbone, method, batch, accelerator, chunk=2, modules=modules)
            found[case] = gradients(backbone, modules)
        return found

    return ranks(2, steps)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_papers_however_the_batch_is_split(case, shared_gradients):
    backbone, method, modules, batch = setup(case)
    literal_loss(case, backbone, method, modules, batch).backward()
    expected = gradients(backbone, modules)
    names = {name for model in (backbone.model, modules) if model is not None for name, _ in model.named_parameters()}
    assert expected.keys() == names and all(gradient.abs().sum() > 0 for gradient in expected.values())
    loss = literal_loss(case, backbone, method, modules, batch).item()
    for chunk in (None, 1, 4):
        for model in filter(None, (backbone, modules)):
            model.zero_grad()
        report = backward(backbone, method, batch, CPU, chunk=chunk, modules=modules)
        assert report["loss"] == pytest.approx(loss, abs=1e-9)
        assert_same(gradients(backbone, modules), expected)
    for of_one_process in shared_gradients:
        assert_same(of_one_process[case], expected)


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-8, atol=1e-9, msg=name)


def test_features_are_float32_or_more_and_small():
    backbone, method, modules, batch = setup("7 all")
    backbone.float(), modules.float()
    with torch.autocast("cpu", torch.bfloat16):
        features = method.encode(backbone, replace(batch, images=batch.images.float()), modules)
    assert {feature.dtype for feature in features.values()} == {torch.float32}
    assert sum(feature[0].numel() for feature in features.values()) == (4 + 2 * GROUPS) * 24


def test_new_parameters_have_a_rate_of_their_own_and_old_names_stay():
    rates = {}
    for factor in (1.0, 10.0):
        backbone, method, modules, batch = setup("7 all")
        method = replace(method, new_rate=factor)
        optimizer = Optimizer(backbone, 0.0, (0.9, 0.999), 1e-12, modules=modules, rate=method.rate)
        named = dict(backbone.model.named_parameters())
        named |= {f"method/{name}": parameter for name, parameter in modules.named_parameters()}
        before = {name: p.detach().clone() for name, p in named.items()}
        backward(backbone, method, batch, CPU, modules=modules)
        optimizer.step(1e-4)
        rates[factor] = {name: (p - before[name]).abs().max().item() for name, p in named.items()}
    new = {name for name in rates[1.0] if rates[10.0][name] > 5 * rates[1.0][name]}
    assert new == {name for name in rates[1.0] if name.startswith("method/")} | {"visual.regional_prompts.prompts"}
    assert {name for name in rates[1.0] if name not in new} == dict(tiny_clip(layers=4).model.named_parameters()).keys()
    assert "method/mask_vector" in new and "method/text_heads.norms.1.bias" in new


def test_both_tables_stay_where_they_are_frozen():
    backbone, method, modules, batch = setup("7 all")
    optimizer = Optimizer(backbone, 0.5, (0.9, 0.999), 1e-8, modules=modules)
    long, short = backbone.model.positional_embedding.detach().clone(), backbone.short_positions.clone()
    for _ in range(3):
        backward(backbone, method, batch, CPU, modules=modules)
        optimizer.step(1e-2)
    assert torch.equal(backbone.short_positions, short) and torch.equal(short[:20], long[:20])
    moved = (backbone.model.positional_embedding != long).any(dim=1)
    assert not moved[:20].any() and moved[20:].all()


def test_states_can_be_kept_beside_it():
    backbone, _, _, _ = setup("7 all")
    kept = replace(method_of("7 all"), terms=(KeepStates(1.0),)).bind(backbone)
    modules = kept.all_modules(backbone).double()
    report = backward(backbone, kept, make_batch(backbone, kept), CPU, modules=modules)
    assert {"group_1", "group_2", "state_error", "short", "long"} <= report.keys()


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_group": 7}, "first_group is 7, but must be from 1 to --method.groups, which is 6"),
        ({"first_group": 0}, "first_group is 0, but must be a whole number, at least 1"),
        ({"groups": 0, "first_group": 1}, "first_group is 1, but must be from 1 to --method.groups, which is 0"),
        ({"groups": -1}, "groups is -1, but must be a whole number, at least 0"),
        ({"mask_ratio": 1.0}, "mask_ratio is 1.0, but must be a number, at least 0 and below 1"),
        ({"masked_patches": "drop"}, "masked_patches is 'drop', but must be replace or discard"),
        ({"prompts": -1}, "prompts is -1, but must be a whole number, at least 0"),
        ({"prompt_mask": "some"}, "prompt_mask is 'some', but must be bands or none or r2p or p2r"),
        ({"prompts": 0, "prompt_layers": "x"}, "prompt_layers is 'x', but must be own or shared"),
        ({"short_positions": "both"}, "short_positions is 'both', but must be own or shared"),
        ({"new_rate": 0.0}, "new_rate is 0.0, but must be a number, above 0"),
        ({"padding": "random"}, "Give --padding none, or --method.short_positions shared"),
        ({"short_weight": 0.0}, "need both captions. Give one between 0 and 1"),
        ({"patches": 3}, "has no setting 'patches'"),
        ({"first_group": "4"}, "first_group is '4', but must be a whole number, at least 1, or null"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        find_method("fix-clip", changes)


def refuse(base_model, match, keep_positions=20, freeze=False, **changes):
    with pytest.raises(UserError, match=match):
        find_method("fix-clip", {"groups": 2} | changes).check_base(base_model, keep_positions, freeze)


def test_base_models_that_it_cannot_train_are_refused():
    base = tiny_clip(layers=LAYERS)
    find_method("fix-clip", {"groups": 2}).check_base(base, 20, False)
    refuse(
        base,
        "does not divide the 4 blocks of the image tower. Give .*groups with one of 1, 2, 4, or 0",
        groups=3,
    )
    refuse(tiny_clip(), "does not divide the 3 blocks of the text tower", groups=2)
    refuse(base, "masks 0 of the image's 16 patches", mask_ratio=0.05)
    refuse(base, "prompts is 17, but an image has 16 patches", prompts=17)
    refuse(base, "keep_positions is 0. Give at least 1", keep_positions=0)
    refuse(base, "masked images, new prompts and groups need", freeze=True)
    refuse(tiny_siglip(), "is a SigLIP; Fix-CLIP's parts are those of a CLIP")
    stretched = tiny_clip(layers=LAYERS)
    stretched.stretch()
    refuse(stretched, "already stretched and trained: its rows for short captions are gone")
    find_method("fix-clip", {"groups": 2, "short_positions": "shared"}).check_base(stretched, 20, False)
    refuse(prompted(), "prompts 3 --method.prompt_mask bands.*other than asked for.*prompts 4")
    find_method("fix-clip", {"prompts": 3, "groups": 0, "mask_ratio": 0.0}).check_base(prompted(), 20, True)
    visual = base.model.visual
    for name, value, match in (
        ("patch_dropout", PatchDropout(0.5), "patch dropout"),
        ("pool_type", "avg", "avg pooling instead of CLS"),
        ("attn_pool", torch.nn.Identity(), "attention pooling"),
    ):
        before = getattr(visual, name)
        setattr(visual, name, value)
        refuse(base, match)
        setattr(visual, name, before)
    with pytest.raises(UserError, match="whose attention cannot be replaced"):
        prompted().replace_image_attention({0: torch.add}, {"x": 1})


def test_heads_of_an_image_tower_with_prompts_are_not_searched(finished, tmp_path):
    with pytest.raises(UserError, match="has regional prompts, whose attention cannot be replaced"):
        ablate(AblateConfig(str(finished), str(tmp_path), data="toy/test", search="naive"))


def test_the_flags_belong_to_two_recipes():
    with pytest.raises(UserError, match="The recipe 'debias-clip' has no setting 'groups'"):
        find_method("debias-clip", {"groups": 2})
    method = find_method("long-clip", {"groups": 6, "prompts": 4})
    assert (method.components, method.mask_ratio, method.short_positions) == (32, 0.0, "shared")


def test_help_explains_every_setting_of_a_method_that_has_no_option():
    explained = {option for page in TrainConfig.more_help().values() for option, text in page.items() if text}
    settings = {part.name for part in fields(METHODS["fix-clip"]) if part.metadata.get("is_setting", True)}
    assert explained == {f"--method.{name}" for name in settings - set(RECIPE_OPTIONS)}


# ---- runs


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


SETTINGS = dict(recipe="fix-clip", components=None, sampling="given", max_steps=4, method={"groups": 2, "prompts": 3})


@pytest.fixture(scope="module")
def finished(fix_world, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    train(config(fix_world, output, **SETTINGS))
    return output


def test_a_run_leaves_what_inference_needs_and_resumes_bit_for_bit(fix_world, finished, tmp_path):
    last = finished / "last"
    weights = load_file(last / "open_clip_model.safetensors")
    assert "visual.regional_prompts.prompts" in weights and not any("mask_vector" in name for name in weights)
    assert {"mask_vector", "image_heads.norms.0.weight"} < checkpoint(finished, 4)["modules"].keys()
    base = load_backbone(fix_world[0])
    short = load_file(last / "short_positions.safetensors")["positional_embedding"]
    assert torch.equal(short, base.model.positional_embedding)
    for workers in (0, 2):
        again = killed_copy(finished, tmp_path / str(workers), step=4)
        train(config(fix_world, again, **SETTINGS, workers=workers))
        is_the_same_run(again, finished)


def test_evaluations_keep_the_prompts_and_open_clip_refuses_them(fix_world, finished, tmp_path):
    backbone = load_two_tower(finished)
    assert backbone.prompt_settings == PromptSettings(3)
    images = pixels().float()
    without = backbone.model.encode_image(images)
    assert (backbone.encode_image(images) - without).abs().max() > 1e-4
    with pytest.raises(RuntimeError, match="regional_prompts"):
        open_clip.create_model(f"local-dir:{finished / 'last'}")
    key, digest = FrozenTower(backbone, CPU, "fp32").key, backbone.digest()
    backbone.config["debias_diffusion"]["regional_prompts"]["mask"] = "none"
    assert FrozenTower(backbone, CPU, "fp32").key != key and backbone.digest() != digest
    backbone.config["debias_diffusion"]["regional_prompts"]["mask"] = "all"
    backbone.save(tmp_path / "hostile")
    with pytest.raises(UserError, match="prompt_mask must be one of"):
        load_two_tower(tmp_path / "hostile")


def test_a_run_can_be_continued_as_a_base_model(fix_world, finished, tmp_path):
    world = (str(finished / "last"), *fix_world[1:])
    train(config(world, tmp_path / "on", **SETTINGS))
    short = [load_backbone(str(folder / "last")).short_positions for folder in (finished, tmp_path / "on")]
    assert torch.equal(*short)
    with pytest.raises(UserError, match="other than asked for"):
        train(config(world, tmp_path / "other", **SETTINGS | {"method": {"groups": 2, "prompts": 2}}))


def test_the_text_side_is_exported_as_ever_and_the_image_side_is_refused(finished, tmp_path, capsys):
    export = ["export", f"--model={finished}"]
    main([*export, f"--output={tmp_path / 'long'}"])
    encoder, tokenizer = load_text_encoder(tmp_path / "long")
    assert tokenizer.model_max_length == encoder.config.max_position_embeddings == 248
    stored = load_file(tmp_path / "long" / "text_encoder" / "model.safetensors")
    assert not any("prompt" in name or "short" in name or "head" in name for name in stored)
    main([*export, f"--output={tmp_path / 'short'}", "--positions=short"])
    short, tokenizer = load_text_encoder(tmp_path / "short")
    assert tokenizer.model_max_length == 77
    table = load_file(finished / "last" / "short_positions.safetensors")["positional_embedding"]
    tables = {name: tensor for name, tensor in short.state_dict().items() if "position_embedding" in name}
    assert [torch.equal(tensor, table) for tensor in tables.values()] == [True]
    assert load_file(tmp_path / "short" / "text_encoder" / "model.safetensors").keys() == stored.keys()
    for kind in ("clip", "open_clip"):
        with pytest.raises(SystemExit):
            main([*export, f"--output={tmp_path / kind}", f"--to={kind}"])
        assert "regional prompts" in capsys.readouterr().err
    assert "learned from" in (tmp_path / "long" / "README.md").read_text()


def test_without_prompts_every_export_works(fix_world, tmp_path):
    train(config(fix_world, tmp_path / "run", **SETTINGS | {"method": {"groups": 2, "prompts": 0}, "max_steps": 1}))
    for kind, positions, length in (("clip", "short", 77), ("open_clip", "long", 248)):
        folder = tmp_path / kind
        main(
            ["export", f"--model={tmp_path / 'run'}", f"--output={folder}", f"--to={kind}", f"--positions={positions}"]
        )
        assert load_two_tower(folder).context_length == length
    with pytest.raises(SystemExit):
        main(["export", f"--model={fix_world[0]}", f"--output={tmp_path / 'none'}", "--positions=short"])


def test_short_captions_of_the_data_are_read_everywhere(fix_world, tmp_path):
    _, data, images = fix_world
    records = open_data(data, images)[0].records
    assert records[3].short == "Two colours, number 3."
    write_shards(ShardsConfig(data, str(tmp_path / "shards"), images, workers=0))
    assert [record.short for record in open_data(tmp_path / "shards")[0].records] == [
        record.short for record in records
    ]
    entries = json.loads(Path(data).read_text())
    lines = [
        json.dumps({"image": entry["image"], "caption": "A long one.", "short_caption": short})
        for entry, short in zip(entries, ["", 5, None, "  ", "x" * 40_000, *["Good."] * 19], strict=True)
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    shorts = [record.short for record in open_data(tmp_path / "lines.jsonl", images)[0].records]
    assert shorts == [None] * 5 + ["Good."] * 19
    settings = SETTINGS | {"method": {"groups": 0, "prompts": 0}, "max_steps": 1, "validation": 0}
    world = (fix_world[0], str(tmp_path / "lines.jsonl"), images)
    with pytest.raises(UserError, match="of 24 records looked up 5 have no short_caption"):
        train(config(world, tmp_path / "refused", **settings))
    train(config(world, tmp_path / "run", **settings | {"max_bad": 0.5, "max_steps": 2}))
    assert "no short caption" in (tmp_path / "run" / "bad-records.jsonl").read_text()
    train(config(world, tmp_path / "checked", **settings | {"max_bad": 0.5, "check_data": True}))
    assert (tmp_path / "checked" / "bad-records.jsonl").read_text().count("no short caption") == 5
