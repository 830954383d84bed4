"""Attention ablation: suppression against its definition, populations against one at a time, fitness, the search."""

import itertools
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_clip import tiny_clip, tiny_siglip
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from debias_diffusion.ablation.heads import Ablation, apply_saved, fold_text_heads, tower_shape
from debias_diffusion.ablation.suppression import Suppressed
from debias_diffusion.app import ablate as command
from debias_diffusion.app.ablate import ablate
from debias_diffusion.app.options import AblateConfig
from debias_diffusion.encoders import load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.eval.session import read_source
from debias_diffusion.head_search import genetic
from debias_diffusion.head_search.backprop import Backprop
from debias_diffusion.head_search.genetic import Generation, evolve, first_masks
from debias_diffusion.head_search.population import Population, TextPopulation
from debias_diffusion.head_search.problems import (
    ImageProblem,
    Margin,
    TextProblem,
    best_alone,
    better_alone,
    every_mask,
    fittest,
    genetic_search,
    probe,
)
from debias_diffusion.interchange.text_encoders import to_transformers
from debias_diffusion.jobs import Job
from debias_diffusion.models.blocks import block_forward, causal_attention, full_attention
from debias_diffusion.models.image_tower import ImageTower
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.models.weight_files import weights_digest
from debias_diffusion.retrieval import encode_images, encode_texts, recall_at_k

CAPTIONS = ["A red cat.", "Two dogs sit on a very long green bench beside the river.", ""]
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)

# ---- suppression


def literally(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, causal: bool = False) -> Tensor:
    """The paper's two steps on the matrix of weights, [batch, tokens, heads, head_dim] each."""
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.zeros(1, dtype=torch.bool)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    columns = torch.ones_like(weights)
    columns[..., 1:] = beta[:, None, None]
    weights = weights * columns
    return torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), value)


def drawn(first: float) -> list[Tensor]:
    """Query, key and value in float64; `first` makes token 0 draw more attention, or less."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 7, 3, 4, generator=generator, dtype=torch.float64)
    key[:, 0] = first * query.mean(dim=1)
    query[..., 0] += abs(first)
    return [part.clone().requires_grad_() for part in (query, key, value)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0.0, 30.0, -30.0])
def test_suppression_is_the_papers_in_value_and_gradient(causal, first):
    parts, beta = drawn(first), torch.tensor([0.1, 0.7, 1.0], dtype=torch.float64, requires_grad=True)
    suppressed = Suppressed(beta, causal_attention if causal else full_attention)
    results = []
    for result in (literally(*parts, beta, causal), suppressed(*parts)):
        results.append((result, *torch.autograd.grad(result.square().sum(), [*parts, beta])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)


def test_at_0_a_head_gives_the_first_value_and_at_1_what_it_gave():
    query, key, value = drawn(first=-300.0)  # the first weight is too little to divide by
    result = Suppressed(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))(query, key, value)
    assert torch.equal(result[:, :, 0], value[:, :1, 0].expand(-1, 7, -1))
    close(result[:, :, 1], full_attention(query, key, value)[:, :, 1])


def test_half_precision_divides_in_single():
    parts = [part.detach().bfloat16() for part in drawn(first=-3.0)]
    result = Suppressed(torch.tensor([0.0, 0.02, 0.5]))(*parts)
    assert result.dtype == torch.bfloat16
    exact = literally(*(part.double() for part in parts), torch.tensor([1e-12, 0.02, 0.5], dtype=torch.float64))
    close(result.double(), exact, rtol=0.1, atol=0.1)


# ---- populations


@pytest.fixture(scope="module")
def tower() -> ImageTower:
    return ImageTower(tiny_clip().double().eval().model.visual)


@pytest.mark.parametrize(("beta", "batch"), [(0.1, 2), (0.02, 64), (1.0, 64)])
@torch.no_grad()
def test_a_population_equals_one_ablation_at_a_time(tower, beta, batch):
    generator = torch.Generator().manual_seed(1)
    embedded = tower.embed(torch.randn(5, 3, 32, 32, generator=generator, dtype=torch.float64))
    masks = every_mask(2, 2).view(16, 2, 2)[torch.randperm(16, generator=generator)].repeat(2, 1, 1)
    expected = []
    for mask in masks:
        states = embedded
        for block, ablated in enumerate(mask):
            states = tower.run_block(block, states, partial(literally, beta=1 - (1 - beta) * ablated.double()))
        expected.append(tower.project(states))
    population = Population(tower, beta, batch)
    close(population.features(embedded, masks), torch.stack(expected))
    # 4 children of the root, and 16 leaves: equal ablations and equal beginnings once.
    assert population.children == (4 + 16) * len(embedded)


@torch.no_grad()
def test_text_heads_are_suppressed_in_packed_rows_too():
    backbone = tiny_clip().double().eval()
    betas = torch.tensor([[1.0, 0.1, 1.0, 0.0001], [1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 0.02, 1.0]], dtype=torch.float64)
    tokens, tower = backbone.tokenize(CAPTIONS), backbone.text.tower
    plain = backbone.encode_text(tokens)
    states = tower.token_embedding(tokens.padded()) + tower.positional_embedding
    for block, beta in zip(tower.transformer.resblocks, betas, strict=True):
        states = block_forward(block, states, partial(literally, beta=beta, causal=True))
    pooled = tower.ln_final(states)[torch.arange(3), tokens.n_prefix + tokens.lengths - 1]
    Ablation("text", tuple(map(tuple, betas.tolist()))).apply(backbone)
    features = backbone.encode_text(tokens)
    close(features, backbone.text.project(pooled), atol=1e-6)  # the betas of a model are in single precision
    assert (features - plain).abs().max() > 1e-3


@pytest.mark.parametrize(("pooling", "beta"), [("eot", 0.1), ("average", 0.0)])
@torch.no_grad()
def test_a_population_of_texts_equals_one_ablation_at_a_time(pooling, beta):
    backbone = tiny_clip().double().eval()
    backbone.pooling = pooling
    masks = torch.rand(12, 3, 4, generator=torch.Generator().manual_seed(2)) < 0.4
    masks = torch.cat([masks, masks[:3], torch.zeros(1, 3, 4, dtype=torch.bool)])
    batches = [backbone.tokenize(CAPTIONS), backbone.tokenize(["A dog."])]
    features = TextPopulation(backbone.text, beta).features(batches, masks)
    for mask, row in zip(masks, features, strict=True):
        if mask.any():
            Ablation.of_mask("text", mask, beta).apply(backbone)
        close(row, torch.cat([backbone.encode_text(batch) for batch in batches]), atol=1e-6)
        backbone.restore_text_attention()


# ---- heads of a model


@torch.no_grad()
def test_folded_heads_are_ordinary_weights():
    ablated, folded = tiny_clip().double().eval(), tiny_clip().double().eval()
    mask = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    for backbone in (ablated, folded):
        Ablation.of_mask("text", mask, 0.0).apply(backbone)
    fold_text_heads(folded)
    tokens = ablated.tokenize(CAPTIONS)
    close(folded.encode_text(tokens), ablated.encode_text(tokens))
    close(folded.text.token_states(tokens), ablated.text.token_states(tokens))
    encoder, tokenizer = to_transformers(folded.float())
    rows = tokenizer(CAPTIONS[:2], padding="max_length", return_tensors="pt").input_ids
    features = encoder(rows).pooler_output @ folded.text.tower.text_projection
    close(features, ablated.encode_text(tokens)[:2].float(), atol=1e-5)


@pytest.mark.parametrize("tower", ["image", "text"])
@torch.no_grad()
def test_a_saved_model_brings_its_ablation(tower, tmp_path):
    backbone = tiny_clip().eval()
    before = backbone.image_fingerprint()
    mask = torch.zeros(tower_shape(backbone, tower), dtype=torch.bool)
    mask[1, 1] = True
    ablation = Ablation.of_mask(tower, mask, 0.0)
    ablation.apply(backbone)
    assert ablation.names == ["1-1"]
    note = {"attention": ablation.description()} if tower == "image" else {}
    assert backbone.image_fingerprint() == before | note  # of the cache of features
    images, tokens = torch.rand(2, 3, 32, 32), backbone.tokenize(CAPTIONS)
    backbone.save(tmp_path)
    loaded = load_backbone(str(tmp_path)).eval()
    with pytest.raises(UserError, match="was saved with other attention"):
        loaded.encode_image(images) if tower == "image" else loaded.encode_text(tokens)
    apply_saved(loaded)
    assert torch.equal(loaded.encode_image(images), backbone.encode_image(images))
    assert torch.equal(loaded.encode_text(tokens), backbone.encode_text(tokens))


def test_heads_that_are_not_there_are_refused():
    averaged = tiny_clip()
    averaged.model.visual.pool_type = "avg"
    for tower, betas, backbone, message in (
        ("image", ((0.5, 1.1),), None, "beta of head 0-1 is 1.1, but must be from 0 to 1"),
        ("image", ((0.5, float("nan")),), None, "beta of head 0-1 is nan"),
        ("image", ((0.5,),), tiny_clip(), "the tower has 2 blocks of 2 heads"),
        ("image", ((1.0, 1.0),) * 2, tiny_clip(), "No head is ablated"),
        ("image", ((0.1, 1.0),) * 2, tiny_siglip(), "has no class token"),
        ("image", ((0.1, 1.0),) * 2, averaged, "pools by 'avg', not at a class token"),
        ("text", ((0.1, 1.0),) * 2, tiny_siglip(), "has no class token and no SOT"),
    ):
        with pytest.raises(UserError, match=message):
            Ablation(tower, betas).apply(backbone)


# ---- fitness


def test_fitness_is_the_margin_over_hard_and_drawn_negatives():
    generator = torch.Generator().manual_seed(0)
    texts, images, ablated = torch.randn(3, 30, 6, generator=generator, dtype=torch.float64)
    margin = Margin.of(texts, images, k1=4, k2=5, seed=7)
    first, again, second = (margin.negatives(number) for number in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)
    cosine = F.cosine_similarity(texts[:, None], images[None], dim=-1)
    for text, row in enumerate(first.tolist()):
        assert text not in row and len(set(row)) == 9
        order = [image for image in cosine[text].argsort(descending=True).tolist() if image != text]
        assert row[:4] == order[:4] == second[text, :4].tolist()
    cosine = F.cosine_similarity(texts[:, None], ablated[None], dim=-1)
    everyone = [[image for image in range(30) if image != text] for text in range(30)]
    for generation, negatives in ((1, second.tolist()), (None, everyone)):
        margins = [cosine[text, text] - cosine[text, negatives[text]].max() for text in range(30)]
        close(margin(ablated[None], texts[None], generation)[0], torch.stack(margins).mean())
    with pytest.raises(UserError, match="8 pairs are too few: 4 hard and 5 random .* at least 10"):
        Margin.of(texts[:8], images[:8], k1=4, k2=5)


# ---- the search


def towards(target: Tensor):
    """A fitness whose optimum is known."""
    return lambda masks, _: (masks == target).double().mean(dim=1)


def test_the_search_finds_a_known_optimum_by_selection(monkeypatch):
    for seed in range(3):
        target, masks = first_masks(1, 40, seed=100 + seed)[0], first_masks(48, 40, seed)
        history = evolve(masks, towards(target), 100, seed)
        assert max(generation.fitness.max() for generation in history) > 0.95
        with monkeypatch.context() as patch:
            patch.setattr(genetic, "TOURNAMENT", 1)
            blind = evolve(masks, towards(target), 100, seed)
        assert max(generation.fitness.max() for generation in blind) < 0.9


def test_a_search_ends_when_it_no_longer_gains_or_all_are_alike():
    masks = first_masks(20, 30, 0)
    assert len(evolve(masks, lambda masks, _: torch.zeros(len(masks)), 100, seed=0)) == genetic.PATIENCE + 1
    alike = torch.zeros(20, 30, dtype=torch.bool)
    assert len(evolve(alike, towards(alike[0]), 100, seed=0)) == 1
    distances = [(a != b).double().mean() for a, b in itertools.combinations(masks, 2)]
    assert Generation(0, masks, torch.zeros(20)).diversity == pytest.approx(float(sum(distances) / len(distances)))


def test_sizes_are_those_of_the_paper():
    assert [genetic.population_size(heads) for heads in (12, 144, 384, 512)] == [48, 48, 96, 128]
    assert [genetic.population_size(heads, efficient=True) for heads in (144, 384, 512)] == [48, 48, 64]
    with pytest.raises(UserError, match="144 heads, too many to try every set"):
        every_mask(12, 12)


PLANTED = torch.tensor([False, True, True, False])


@pytest.fixture(scope="module")
def problem(tower) -> ImageProblem:
    """30 images, whose texts are near the features of an ablation of the tower, so that this one is best."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        images = tower.embed(torch.randn(30, 3, 32, 32, generator=generator, dtype=torch.float64))
        population = Population(tower, 0.1)
        best = population.features(images, PLANTED.view(1, 2, 2))[0]
    noise = torch.randn(best.shape, generator=generator, dtype=torch.float64)
    problem = ImageProblem(population, images, {"whole": best + 0.3 * best.std() * noise})
    problem.make_margins(k1=5, k2=5)
    return problem


def test_every_search_finds_what_was_planted(problem):
    assert torch.equal(fittest(problem, every_mask(*problem.shape)), PLANTED)
    found, history = genetic_search(problem)
    assert torch.equal(found, PLANTED) and len(history) <= 100
    recalls = probe(problem)
    untouched, *alone = [row["mean_r"] for row in recalls]
    assert better_alone(recalls).tolist() == [recall > untouched for recall in alone]
    best = alone.index(max(alone))
    assert best_alone(recalls).nonzero().tolist() == [[best]] and PLANTED[best]
    assert not best_alone([recalls[1 + best], *recalls[1:]]).any()  # no head raises that
    assert recalls[0] == problem.recalls(problem.untouched)[0]


def test_a_stopped_search_continues_to_the_same_bits(problem):
    best, whole = genetic_search(problem, generations=6, seed=2)
    assert len(whole) > 3
    for kept in (0, 2, 3):
        made = []
        again, _ = genetic_search(problem, 6, seed=2, history=whole[:kept], on_generation=made.append)
        assert torch.equal(again, best) and len(made) == len(whole) - kept
        for one, other in zip(made, whole[kept:], strict=True):
            assert torch.equal(one.masks, other.masks) and torch.equal(one.fitness, other.fitness)


def test_the_efficient_search_leaves_out_what_ablates_most(problem):
    _, history = genetic_search(problem, generations=3, efficient=True)
    for generation in history:
        assert torch.equal(generation.fitness.isinf(), generation.masks.double().mean(dim=1) > 0.6)
    assert any(generation.fitness.isinf().any() for generation in history)


def test_a_gain_within_rounding_ablates_nothing(problem):
    features = problem.texts["whole"][:3].repeat(10, 1)  # each text ten times: no margin above 0
    alike = ImageProblem(problem.population, problem.embedded[:3].repeat(10, 1, 1), {"whole": features})
    alike.make_margins(k1=5, k2=5)
    assert not fittest(alike, every_mask(*alike.shape)).any() and not genetic_search(alike, 2)[0].any()


def test_features_that_are_not_finite_are_refused(problem):
    broken = problem.embedded.clone()
    broken[3] = torch.nan
    images = ImageProblem(problem.population, broken, problem.texts)
    texts = ImageProblem(problem.population, problem.embedded, {"whole": problem.texts["whole"] * torch.inf})
    for part, message in ((images, "features of images"), (texts, r"features of texts \(whole\)")):
        with pytest.raises(UserError, match=f"The {message} are not finite"):
            part.make_margins(k1=5, k2=5)
    images.margins = problem.margins
    with pytest.raises(UserError, match="The features of an ablation are not finite"):
        images.fitness(images.untouched, 0)


def test_heads_of_a_text_tower_are_searched_on_several_sets_of_texts():
    backbone, ablated = tiny_clip().double().eval(), tiny_clip().double().eval()
    words = itertools.product(range(4), ("red", "blue"), ("cat", "dog"))
    whole = [f"A {colour} {kind} number {n}." for n, colour, kind in words]
    planted = torch.zeros(tower_shape(backbone, "text"), dtype=torch.bool)
    planted[0, 1] = planted[2, 3] = True
    Ablation.of_mask("text", planted, 0.0).apply(ablated)
    with torch.no_grad():
        images = ablated.encode_text(ablated.tokenize(whole)).float()
    shorter = [text.removeprefix("A ") for text in whole]
    batches = {"whole": [backbone.tokenize(whole)], "shorter": [backbone.tokenize(shorter)]}
    problem = TextProblem(TextPopulation(backbone.text, 0.0), images, batches)
    problem.make_margins(k1=5, k2=5)
    encoded = problem.encode(torch.stack([torch.zeros_like(planted), planted]).flatten(1))
    fitness = problem.fitness(encoded, 0)
    assert fitness[1] > fitness[0] and problem.recalls(encoded)[1]["mean_r"] == 100
    parts = [problem.margins[name](encoded[0], encoded[1][name], 0) for name in batches]
    close(fitness, (parts[0] + parts[1]) / 2)
    assert not backbone.text.changes


class OnDevice(torch.Tensor):
    """A tensor on a device without double precision, as Apple's mps: what is computed from it is there too."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is torch.Tensor.cpu:
            with torch._C.DisableTorchFunctionSubclass():
                return arguments[0].as_subclass(torch.Tensor)
        result = super().__torch_function__(function, types, arguments, options or {})
        if isinstance(result, cls) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_device_without_double_precision_gives_the_same(tower):
    backbone, results = tiny_clip().eval(), []
    tokens = backbone.tokenize([f"A {colour} cat number {n}." for n in range(9) for colour in ("red", "blue")])
    with torch.no_grad():
        embedded = backbone.image.embed(torch.randn(18, 3, 32, 32, generator=torch.Generator().manual_seed(4)))
        texts, images = backbone.encode_text(tokens), torch.randn(18, 24, generator=torch.Generator().manual_seed(5))
    for kind in (torch.Tensor, OnDevice):
        if tower == "image":
            population = Population(backbone.image, 0.1)
            problem = ImageProblem(population, embedded.as_subclass(kind), {"keep": texts.as_subclass(kind)})
        else:
            population = TextPopulation(backbone.text, 0.1)
            problem = TextProblem(population, images.as_subclass(kind), {"keep": [tokens]})
        problem.make_margins(k1=5, k2=5)
        mask, history = genetic_search(problem, generations=2)
        results.append((probe(problem), mask.tolist(), [row.fitness.tolist() for row in history]))
    assert results[0] == results[1]


# ---- by gradient descent


def descent(problem: ImageProblem, job: Job | None = None, **settings) -> Backprop:
    return Backprop(problem, torch.tensor(20.0), job, **({"batch": 8} | settings))


def test_the_gradient_of_alpha_is_that_of_finite_differences(problem):
    bp, images = descent(problem), torch.arange(12)
    bp.alpha = torch.tensor([[0.3, -0.2], [0.1, 0.5]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda alpha: setattr(bp, "alpha", alpha) or bp.loss(images), [bp.alpha])


def test_descent_quiets_what_was_planted_and_changes_no_weight(problem, tmp_path):
    visual = problem.population.tower.visual
    before = weights_digest(visual)
    with Job.open(tmp_path, "ablate") as job:
        beta = descent(problem, job, rate=0.1, epochs=20).run()
    assert set(beta.flatten().argsort()[:2].tolist()) == set(PLANTED.nonzero().flatten().tolist())
    assert weights_digest(visual) == before and all(weight.grad is None for weight in visual.parameters())


def test_a_stopped_or_damaged_descent_continues_to_the_same_bits(problem, tmp_path):
    with Job.open(tmp_path, "ablate") as job:
        whole, epochs = descent(problem, job, epochs=4).run(), job.names("epochs/")
        assert len(epochs) == 4
        for epoch in epochs[2:]:  # as if it had been stopped before
            job.remove(epoch)
        assert torch.equal(descent(problem, job, epochs=4).run(), whole) and job.names("epochs/") == epochs
    state = load_file(tmp_path / epochs[3])
    save_file(state | {"alpha": -state["alpha"]}, tmp_path / epochs[3])
    with Job.open(tmp_path, "ablate") as job:
        assert torch.equal(descent(problem, job, epochs=4).run(), whole)


# ---- what a search leaves


@pytest.fixture
def config(world, tmp_path):
    """Settings of a search on the tiny data, which begins in `run`."""
    base, data, images = world
    return lambda output="run", **settings: AblateConfig(
        base, str(tmp_path / output), **{"data": data, "images": images, "limit": None} | settings
    )


@pytest.mark.parametrize("tower", ["image", "text"])
def test_the_command_searches_and_every_evaluation_takes_what_it_leaves(tower, config, capsys):
    settings = config(tower=tower, generations=2, beta=0.0)
    folder = ablate(settings)
    printed = capsys.readouterr().out
    content = json.loads((folder / "ablation.json").read_text())
    assert content["heads"] and f"Ablated: {', '.join(content['heads'])}" in printed
    before = (folder / "items.jsonl").read_bytes()
    assert ablate(settings) == folder  # finished
    assert (folder / "items.jsonl").read_bytes() == before and capsys.readouterr().out == printed
    plain, loaded = load_two_tower(settings.model), load_two_tower(str(folder))
    pixels, tokens = torch.rand(2, 3, 32, 32), plain.tokenize(CAPTIONS)
    with torch.no_grad():
        assert torch.equal(plain.encode_image(pixels), loaded.encode_image(pixels)) == (tower == "text")
        assert torch.equal(plain.encode_text(tokens), loaded.encode_text(tokens)) == (tower == "image")
        encoder, tokenizer = load_text_encoder(str(folder))
        rows = tokenizer(CAPTIONS[:2], padding="max_length", return_tensors="pt").input_ids
        features = encoder(rows).pooler_output @ loaded.text.tower.text_projection
        close(features, loaded.encode_text(tokens)[:2], atol=1e-5)
    (folder / "ablation.json").write_text(json.dumps(content | {"model_sha256": "0" * 64}))
    with pytest.raises(UserError, match="that model has other weights now"):
        load_two_tower(str(folder))
    with pytest.raises(UserError, match="is ablated already"):  # known without loading anything
        ablate(AblateConfig(str(folder), f"{folder}-again", settings.data, settings.images))


@torch.no_grad()
def test_betas_leave_as_they_were_learned(config, tmp_path, capsys):
    picture, linked = tmp_path / "run" / "heads.png", tmp_path / "linked"
    picture.parent.mkdir()
    linked.write_text("kept")
    picture.symlink_to(linked)
    settings = config(search="bp", epochs=3, learning_rate=0.5, bp_batch=8)
    folder = ablate(settings)
    assert linked.read_text() == "kept" and picture.read_bytes()[:4] == b"\x89PNG"  # nothing goes through a link
    content, loaded = json.loads((folder / "ablation.json").read_text()), load_two_tower(str(folder))
    betas = torch.tensor(content["beta"])
    assert ((betas > 0) & (betas < 1)).all()  # a beta above 0.5 counts, too
    assert content["heads"] == [f"{block}-{head}" for block, head in (betas < 0.5).nonzero().tolist()]
    pairs = read_source(settings)
    features, _, _ = encode_images(loaded, pairs.records, pairs.images, 8, "cpu", False)
    texts = encode_texts(loaded, pairs.captions, 8, "cpu", progress=False)
    recalls = recall_at_k(features, texts, [1, 5, 10])
    assert content["recall"]["after"]["text_to_image_R@1"] == pytest.approx(recalls["text_to_image"]["R@1"])
    assert content["recall"]["after"] != content["recall"]["before"]


def test_a_fitness_that_rose_while_recall_fell_is_not_passed_off_as_better(config, monkeypatch, capsys):
    recalls = command.Problem.recalls

    def falling(problem, encoded):
        rows = recalls(problem, encoded)
        return [row | {"mean_r": 100.0 - 50 * (encoded is not problem.untouched)} for row in rows]

    monkeypatch.setattr(command.Problem, "recalls", falling)
    ablate(config(search="bp", epochs=1))
    printed = capsys.readouterr().out
    assert "mean-R fell from 100.0 to 50.0, though" in printed and "contrastive loss fell" in printed


def test_a_probe_leaves_the_recalls_of_each_head_and_no_ablation(config, capsys):
    folder = ablate(config(search="probe", limit=22))
    recalls = json.loads((folder / "probe.json").read_text())["recall"]
    assert list(recalls) == ["none", "0-0", "0-1", "1-0", "1-1"] and "| 1-1 | " in capsys.readouterr().out
    assert not (folder / "ablation.json").exists()


@pytest.mark.parametrize("search", ["single", "naive", "all", "ga", "bp"])
def test_pairs_that_are_all_alike_ablate_nothing(config, tmp_path, search):
    data = tmp_path / "data.json"
    data.write_text(json.dumps(json.loads(Path(config().data).read_text())[:1] * 40))
    with pytest.raises(UserError, match="Which heads hurt cannot be known from these 40 pairs"):
        ablate(config(data=str(data), search=search))
    assert not (tmp_path / "run" / "ablation.json").exists()


def one_sentence(data: str, file: Path) -> str:
    """The data with the first sentence of each caption alone, as `file`."""
    entries = json.loads(Path(data).read_text())
    for entry in entries:
        entry["conversations"][1]["value"] = entry["conversations"][1]["value"].partition(". ")[0] + "."
    file.write_text(json.dumps(entries))
    return str(file)


def test_robust_needs_captions_of_two_sentences(config, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "encode_images", None)  # refused before anything is encoded
    short = one_sentence(config().data, tmp_path / "data.json")
    with pytest.raises(UserError, match="fitness robust moves and removes sentences, and no caption has two"):
        ablate(config(data=short, fitness="robust"))


def test_a_stopped_command_continues_to_the_same_result_on_the_same_data_alone(config, tmp_path, monkeypatch):
    settings = dict(generations=2, limit=22, beta=0.5)
    whole, note, folder = ablate(config("whole", **settings)), command._Search._note, tmp_path / "run"

    def stop(search, generation):
        note(search, generation)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command._Search, "_note", stop)
        ablate(config(**settings))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    others = shutil.copytree(config().images, tmp_path / "others")
    first = next(others.iterdir())
    stat = first.stat()
    Image.open(first).transpose(Image.Transpose.FLIP_LEFT_RIGHT).rotate(90).save(first)
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for change, message in (
        ({"beta": 0.1}, "beta: 0.5 there, 0.1 here"),
        ({"data": one_sentence(config().data, tmp_path / "data.json")}, "The data is another one"),
        ({"images": str(others)}, "The set of images is another one"),
    ):
        with pytest.raises(UserError, match=message):
            ablate(config(**settings | change))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    ablate(config(batch=7, **settings))  # another batch changes nothing
    contents = [json.loads((place / "ablation.json").read_text()) for place in (whole, folder)]
    assert contents[0]["beta"] == contents[1]["beta"] and contents[0]["recall"] == contents[1]["recall"]
