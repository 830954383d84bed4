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
from hypothesis import given
from hypothesis import strategies as st
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
from debias_diffusion.head_search.genetic import Generation, evolve, first_masks, next_masks
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
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.models.blocks import block_forward, causal_attention, full_attention
from debias_diffusion.models.image_tower import ImageTower
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.models.weight_files import weights_digest
from debias_diffusion.retrieval import encode_images, encode_texts, recall_at_k

# ---- suppression


def literally(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, causal: bool = False) -> Tensor:
    """The paper's two steps on the matrix of weights, [batch, tokens, heads, head_dim] each."""
    weights = _weights(query, key, causal)
    columns = torch.ones_like(weights)
    columns[..., 1:] = beta[:, None, None]
    weights = weights * columns
    return torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), value)


def by_logits(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, causal: bool = False) -> Tensor:
    """log beta added to the logits."""
    logits = _logits(query, key, causal)
    logits = torch.cat([logits[..., :1], logits[..., 1:] + beta.log()[:, None, None]], dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), value)


def _logits(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.zeros(1, dtype=torch.bool)
    return logits.masked_fill(hidden, -torch.inf)


def _weights(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    return _logits(query, key, causal).softmax(-1)


def drawn(seed: int = 0, first: float = 0.0) -> list[Tensor]:
    """Query, key and value in float64; `first` makes token 0 draw more attention, or less."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 2, 7, 3, 4, generator=generator, dtype=torch.float64)
    key[:, 0] = first * query.mean(dim=1)
    query[..., 0] += abs(first)
    return [part.clone().requires_grad_() for part in (query, key, value)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0.0, 30.0, -30.0])
def test_three_forms_of_suppression_agree_in_value_and_gradient(causal, first):
    attend = causal_attention if causal else full_attention
    results = []
    for form in (literally, by_logits, None):
        parts, beta = drawn(first=first), torch.tensor([0.1, 0.7, 1.0], dtype=torch.float64, requires_grad=True)
        result = form(*parts, beta, causal) if form else Suppressed(beta, attend)(*parts)
        gradients = torch.autograd.grad(result.square().sum(), [*parts, beta])
        results.append((result, *gradients))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-11)


def test_at_0_a_head_gives_the_first_value_and_at_1_what_it_gave():
    query, key, value = drawn(first=-300.0)
    plain = full_attention(query, key, value)
    assert _weights(query, key, False)[..., 0].min() < 1e-30  # too little to divide by
    result = Suppressed(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))(query, key, value)
    assert torch.equal(result[:, :, 0], value[:, :1, 0].expand(-1, 7, -1))
    torch.testing.assert_close(result[:, :, 1], plain[:, :, 1], rtol=0, atol=1e-12)


def test_half_precision_divides_in_single():
    query, key, value = (part.detach().bfloat16() for part in drawn(first=-3.0))
    beta = torch.tensor([0.0, 0.02, 0.5])
    result = Suppressed(beta)(query, key, value)
    assert result.dtype == torch.bfloat16
    exact = literally(query.double(), key.double(), value.double(), beta.double().clamp(min=1e-12))
    torch.testing.assert_close(result.double(), exact, rtol=0.1, atol=0.1)


# ---- populations


@pytest.fixture(scope="module")
def tower() -> ImageTower:
    return ImageTower(tiny_clip().double().eval().model.visual)


@pytest.fixture(scope="module")
def embedded(tower) -> Tensor:
    with torch.no_grad():
        return tower.embed(torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def one_by_one(tower: ImageTower, embedded: Tensor, masks: Tensor, beta: float) -> Tensor:
    """Every ablation in a pass of its own, with the attention of whole blocks replaced."""
    features = []
    for mask in masks:
        states = embedded
        for block, ablated in enumerate(mask):
            betas = 1 - (1 - beta) * ablated.double()
            states = tower.run_block(block, states, partial(literally, beta=betas))
        features.append(tower.project(states))
    return torch.stack(features)


ALL = torch.tensor(list(itertools.product([False, True], repeat=4))).view(16, 2, 2)  # two blocks of two heads


@pytest.mark.parametrize("beta", [0.1, 0.02, 1.0])
@pytest.mark.parametrize("batch", [2, 64])
@torch.no_grad()
def test_a_population_equals_one_ablation_at_a_time(tower, embedded, beta, batch):
    masks = ALL[torch.randperm(16, generator=torch.Generator().manual_seed(3))].repeat(2, 1, 1)
    population = Population(tower, beta, batch)
    expected = one_by_one(tower, embedded, masks, beta)
    torch.testing.assert_close(population.features(embedded, masks), expected, rtol=0, atol=1e-10)
    # 4 children of the root, and 16 leaves: equal ablations and equal beginnings once.
    assert population.children == (4 + 16) * len(embedded)
    untouched = population.features(embedded, torch.zeros(1, 2, 2, dtype=torch.bool))[0]
    torch.testing.assert_close(untouched, expected[masks.flatten(1).any(1).logical_not()][0], rtol=0, atol=1e-10)


# ---- fitness


def test_fitness_is_the_margin_over_the_worst_of_the_negatives():
    generator = torch.Generator().manual_seed(0)
    texts, images = torch.randn(2, 30, 6, generator=generator, dtype=torch.float64)
    margin = Margin.of(texts, images, k1=4, k2=5, seed=7)
    ablations = torch.randn(3, 30, 6, generator=generator, dtype=torch.float64)
    negatives = margin.negatives(2)
    scores = []
    for features in ablations:
        cosine = F.cosine_similarity(texts[:, None], features[None], dim=-1)
        margins = [cosine[i, i] - max(cosine[i, j] for j in negatives[i]) for i in range(30)]
        scores.append(sum(margins) / 30)
    torch.testing.assert_close(margin(ablations, texts[None], 2), torch.stack(scores))
    whole = F.cosine_similarity(texts[:, None], ablations[0][None], dim=-1)
    margins = [whole[i, i] - max(whole[i, j] for j in range(30) if j != i) for i in range(30)]
    assert margin(ablations, texts[None], None)[0].item() == pytest.approx((sum(margins) / 30).item())


def test_negatives_are_the_hardest_and_others_drawn_for_each_generation():
    generator = torch.Generator().manual_seed(0)
    texts, images = torch.randn(2, 30, 6, generator=generator)
    margin = Margin.of(texts, images, k1=4, k2=5)
    first, again, second = (margin.negatives(number) for number in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)
    cosine = F.cosine_similarity(texts[:, None], images[None], dim=-1)
    for text, row in enumerate(first.tolist()):
        assert text not in row and len(set(row)) == 9
        order = [image for image in cosine[text].argsort(descending=True).tolist() if image != text]
        assert row[:4] == order[:4] == second[text, :4].tolist()
    with pytest.raises(UserError, match="8 pairs are too few: 4 hard and 5 random .* at least 10"):
        Margin.of(texts[:8], images[:8], k1=4, k2=5)


# ---- the search


def towards(target: Tensor):
    """A fitness whose optimum is known."""
    return lambda masks, _: (masks == target).double().mean(dim=1)


def test_the_search_finds_a_known_optimum_and_without_selection_it_does_not(monkeypatch):
    for seed in range(3):
        target = first_masks(1, 40, seed=100 + seed)[0]
        masks = first_masks(48, 40, seed)
        history = evolve(masks, towards(target), 100, seed)
        assert max(generation.fitness.max() for generation in history) > 0.95
        with monkeypatch.context() as patch:
            patch.setattr(genetic, "TOURNAMENT", 1)
            blind = evolve(masks, towards(target), 100, seed)
        assert max(generation.fitness.max() for generation in blind) < 0.9


@given(seed=st.integers(0, 99), number=st.integers(0, 50))
def test_what_follows_a_generation_depends_on_it_alone(seed, number):
    masks = first_masks(10, 12, seed)
    generation = Generation(number, masks, masks.double().sum(dim=1))
    after = next_masks(generation, seed)
    assert torch.equal(after, next_masks(Generation(number, masks.clone(), generation.fitness), seed))
    assert after.shape == masks.shape and torch.equal(masks, first_masks(10, 12, seed))


def test_diversity_is_the_mean_distance_of_pairs():
    masks = first_masks(6, 9, seed=4)
    distances = [(a != b).double().mean() for a, b in itertools.combinations(masks, 2)]
    generation = Generation(0, masks, torch.zeros(6))
    assert generation.diversity == pytest.approx(float(sum(distances) / len(distances)))


def test_a_search_ends_when_it_no_longer_gains_or_all_are_alike():
    flat = evolve(first_masks(20, 30, 0), lambda masks, _: torch.zeros(len(masks)), 100, seed=0)
    assert len(flat) == genetic.PATIENCE + 1
    alike = torch.zeros(20, 30, dtype=torch.bool)
    assert len(evolve(alike, towards(alike[0]), 100, seed=0)) == 1


# ---- text towers


def padded_features(backbone: Backbone, captions: list[str], betas: Tensor) -> Tensor:
    """The features of whole padded rows, with every block's attention suppressed literally."""
    tower, tokens = backbone.text.tower, backbone.tokenize(captions)
    states = tower.token_embedding(tokens.padded()) + tower.positional_embedding
    for block, beta in zip(tower.transformer.resblocks, betas, strict=True):
        states = block_forward(block, states, partial(literally, beta=beta, causal=True))
    pooled = tower.ln_final(states)[torch.arange(len(captions)), tokens.n_prefix + tokens.lengths - 1]
    return backbone.text.project(pooled)


CAPTIONS = ["A red cat.", "Two dogs sit on a very long green bench beside the river.", ""]


@torch.no_grad()
def test_text_heads_are_suppressed_in_packed_rows_too():
    backbone = tiny_clip().double().eval()
    betas = torch.tensor([[1.0, 0.1, 1.0, 0.0001], [1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 0.02, 1.0]], dtype=torch.float64)
    plain = backbone.encode_text(backbone.tokenize(CAPTIONS))
    Ablation("text", tuple(map(tuple, betas.tolist()))).apply(backbone)
    features = backbone.encode_text(backbone.tokenize(CAPTIONS))
    # The betas of a model are in single precision.
    torch.testing.assert_close(features, padded_features(backbone, CAPTIONS, betas), rtol=0, atol=1e-6)
    assert (features - plain).abs().max() > 1e-3


@pytest.mark.parametrize("pooling", ["eot", "average"])
@pytest.mark.parametrize("beta", [0.1, 0.0])
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
        expected = torch.cat([backbone.encode_text(batch) for batch in batches])
        # The betas of a model are in single precision.
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)
        backbone.restore_text_attention()


@torch.no_grad()
def test_folded_heads_are_ordinary_weights():
    ablated, folded = tiny_clip().double().eval(), tiny_clip().double().eval()
    mask = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    Ablation.of_mask("text", mask, 0.0).apply(ablated)
    Ablation.of_mask("text", mask, 0.0).apply(folded)
    fold_text_heads(folded)
    tokens = ablated.tokenize(CAPTIONS)
    torch.testing.assert_close(folded.encode_text(tokens), ablated.encode_text(tokens), rtol=0, atol=1e-10)
    states = [backbone.text.token_states(tokens) for backbone in (ablated, folded)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-10)
    encoder, tokenizer = to_transformers(folded.float())
    rows = tokenizer(CAPTIONS[:2], padding="max_length", return_tensors="pt").input_ids
    features = encoder(rows).pooler_output @ folded.text.tower.text_projection
    torch.testing.assert_close(features, ablated.encode_text(tokens)[:2].float(), rtol=0, atol=1e-5)


# ---- heads and their names


def test_an_ablation_is_named_applied_and_noted(tower):
    backbone = tiny_clip().eval()
    ablation = Ablation("image", ((1.0, 0.1), (0.1, 1.0)))
    assert ablation.names == ["0-1", "1-0"]
    images, before = torch.rand(2, 3, 32, 32), backbone.image_fingerprint()
    ablation.apply(backbone)
    population = Population(backbone.image, 0.1)
    mask = torch.tensor([[[False, True], [True, False]]])
    expected = population.features(backbone.image.embed(images), mask)[0]
    torch.testing.assert_close(backbone.encode_image(images), expected, rtol=0, atol=1e-5)
    assert backbone.image_fingerprint() == before | {"attention": ablation.description()}


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_saved_model_brings_its_ablation(tower, tmp_path):
    backbone = tiny_clip().eval()
    mask = torch.zeros(tower_shape(backbone, tower), dtype=torch.bool)
    mask[1, 1] = True
    Ablation.of_mask(tower, mask, 0.0).apply(backbone)
    images, tokens = torch.rand(2, 3, 32, 32), backbone.tokenize(CAPTIONS)
    backbone.save(tmp_path)
    loaded = load_backbone(str(tmp_path)).eval()
    with pytest.raises(UserError, match="was saved with other attention"):
        loaded.encode_image(images) if tower == "image" else loaded.encode_text(tokens)
    apply_saved(loaded)
    assert torch.equal(loaded.encode_image(images), backbone.encode_image(images))
    assert torch.equal(loaded.encode_text(tokens), backbone.encode_text(tokens))


def average_pooled() -> Backbone:
    backbone = tiny_clip()
    backbone.model.visual.pool_type = "avg"
    return backbone


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ablation("image", ((0.5, 1.1),)), "beta of head 0-1 is 1.1, but must be from 0 to 1"),
        (lambda: Ablation("image", ((0.5, float("nan")),)), "beta of head 0-1 is nan"),
        (lambda: Ablation("image", ((0.5,),)).apply(tiny_clip()), "the tower has 2 blocks of 2 heads"),
        (lambda: Ablation("image", ((1.0, 1.0),) * 2).apply(tiny_clip()), "No head is ablated"),
        (lambda: Ablation("image", ((0.1, 1.0),) * 2).apply(tiny_siglip()), "has no class token"),
        (lambda: Ablation("image", ((0.1, 1.0),) * 2).apply(average_pooled()), "pools by 'avg', not at a class token"),
        (lambda: Ablation("text", ((0.1, 1.0),) * 2).apply(tiny_siglip()), "has no class token and no SOT"),
    ],
)
def test_heads_that_are_not_there_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


# ---- searches of a tower


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


PLANTED = torch.tensor([False, True, True, False])


def test_every_search_finds_what_was_planted(problem, monkeypatch):
    masks = every_mask(*problem.shape)
    assert torch.equal(fittest(problem, masks), PLANTED)
    found, history = genetic_search(problem)
    assert torch.equal(found, PLANTED) and len(history) <= 100
    encode, encoded = problem.encode, []
    monkeypatch.setattr(problem, "encode", lambda masks, **options: encoded.append(masks) or encode(masks, **options))
    recalls = probe(problem)
    assert torch.equal(torch.cat(encoded), torch.eye(4, dtype=torch.bool))  # the untouched model is known already
    assert len(recalls) == 5 and better_alone(recalls).tolist() == [
        row["mean_r"] > recalls[0]["mean_r"] for row in recalls[1:]
    ]
    best = max(range(4), key=lambda head: recalls[1 + head]["mean_r"])
    assert best_alone(recalls).nonzero().tolist() == [[best]] and PLANTED[best]
    assert not best_alone([recalls[1 + best], *recalls[1:]]).any()  # no head raises that
    assert recalls[0] == problem.recalls(problem.untouched)[0]
    assert {"text_to_image_R@1", "image_to_text_R@10", "mean_r"} <= recalls[0].keys()


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


def test_sizes_are_those_of_the_paper():
    assert [genetic.population_size(heads) for heads in (12, 144, 384, 512)] == [48, 48, 96, 128]
    assert [genetic.population_size(heads, efficient=True) for heads in (144, 384, 512)] == [48, 48, 64]
    with pytest.raises(UserError, match="144 heads, too many to try every set"):
        every_mask(12, 12)


# ---- by gradient descent


def descent(problem: ImageProblem, job: Job | None = None, **settings) -> Backprop:
    return Backprop(problem, torch.tensor(20.0), job, **({"batch": 8} | settings))


def test_the_gradient_of_alpha_is_that_of_finite_differences(problem):
    bp, images = descent(problem), torch.arange(12)
    bp.alpha = torch.tensor([[0.3, -0.2], [0.1, 0.5]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda alpha: setattr(bp, "alpha", alpha) or bp.loss(images), [bp.alpha])


@torch.no_grad()
def test_a_beta_for_each_head_gives_the_features_of_a_mask(problem):
    masked, texts = problem.encode(PLANTED[None])
    betas = (1 - (1 - problem.population.beta) * PLANTED.double()).view(*problem.shape)
    features, again = problem.encode_betas(betas)
    torch.testing.assert_close(features, masked, rtol=0, atol=1e-10)
    assert torch.equal(texts["whole"], again["whole"])


def test_descent_quiets_what_was_planted_and_changes_no_weight(problem, tmp_path):
    before = weights_digest(problem.population.tower.visual)
    with Job.open(tmp_path, "ablate") as job:
        bp = descent(problem, job, rate=0.1, epochs=20)
        start = bp.loss(torch.arange(30)).item()
        beta = bp.run()
    assert bp.loss(torch.arange(30)).item() < start
    assert set(beta.flatten().argsort()[:2].tolist()) == set(PLANTED.nonzero().flatten().tolist())
    assert weights_digest(problem.population.tower.visual) == before
    assert all(weight.grad is None for weight in problem.population.tower.visual.parameters())


def test_a_stopped_or_damaged_descent_continues_to_the_same_bits(problem, tmp_path):
    with Job.open(tmp_path, "ablate") as job:
        whole, epochs = descent(problem, job, epochs=4).run(), job.names("epochs/")
        assert len(epochs) == 4
        for epoch in epochs[2:]:  # as if it had been stopped before
            job.remove(epoch)
        assert torch.equal(descent(problem, job, epochs=4).run(), whole) and job.names("epochs/") == epochs
    state = load_file(tmp_path / epochs[3])
    save_file(state | {"alpha": -state["alpha"]}, tmp_path / epochs[3])
    (tmp_path / epochs[1]).write_bytes((tmp_path / epochs[1]).read_bytes()[:-1])
    with Job.open(tmp_path, "ablate") as job:
        assert torch.equal(descent(problem, job, epochs=4).run(), whole)


def test_heads_of_a_text_tower_are_searched_on_several_sets_of_texts():
    backbone = tiny_clip().double().eval()
    whole = [
        f"A {colour} {kind} number {n}." for n in range(4) for colour in ("red", "blue") for kind in ("cat", "dog")
    ]
    blocks, heads = tower_shape(backbone, "text")
    planted = torch.zeros(blocks, heads, dtype=torch.bool)
    planted[0, 1] = planted[2, 3] = True
    ablated = tiny_clip().double().eval()
    Ablation.of_mask("text", planted, 0.0).apply(ablated)
    with torch.no_grad():
        images = ablated.encode_text(ablated.tokenize(whole)).float()
    shorter = [text.removeprefix("A ") for text in whole]
    batches = {"whole": [backbone.tokenize(whole)], "shorter": [backbone.tokenize(shorter)]}
    problem = TextProblem(TextPopulation(backbone.text, 0.0), images, batches)
    problem.make_margins(k1=5, k2=5)
    encoded = problem.encode(torch.stack([torch.zeros(blocks * heads, dtype=torch.bool), planted.flatten()]))
    fitness = problem.fitness(encoded, 0)
    assert fitness[1] > fitness[0]
    assert problem.recalls(encoded)[1]["mean_r"] == 100
    parts = [problem.margins[name](encoded[0], encoded[1][name], 0) for name in ("whole", "shorter")]
    torch.testing.assert_close(fitness, (parts[0] + parts[1]) / 2)
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
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2).as_subclass(OnDevice).double()
    backbone, results = tiny_clip().eval(), []
    texts = [f"A {colour} cat number {n}." for n in range(6) for colour in ("red", "blue", "green")]
    with torch.no_grad():
        pixels = torch.randn(len(texts), 3, 32, 32, generator=torch.Generator().manual_seed(4))
        embedded = backbone.image.embed(pixels)
        features = {"image": backbone.image(pixels), "text": backbone.encode_text(backbone.tokenize(texts))}
    for place in (lambda tensor: tensor, lambda tensor: tensor.as_subclass(OnDevice)):
        if tower == "image":
            problem = ImageProblem(Population(backbone.image, 0.1), place(embedded), {"keep": place(features["text"])})
        else:
            tokens = {"keep": [backbone.tokenize(texts)]}
            problem = TextProblem(TextPopulation(backbone.text, 0.1), place(features["image"]), tokens)
        problem.make_margins(k1=5, k2=5)
        mask, history = genetic_search(problem, generations=2)
        results.append((probe(problem), mask.tolist(), [row.fitness.tolist() for row in history]))
    assert results[0] == results[1]


# ---- what a search leaves


@pytest.mark.parametrize("tower", ["image", "text"])
def test_the_command_searches_and_every_evaluation_takes_what_it_leaves(tower, world, tmp_path, capsys):
    base, data, images = world
    settings = dict(data=data, images=images, tower=tower, generations=2, limit=None, beta=0.0)
    folder = ablate(AblateConfig(base, str(tmp_path / tower), **settings))
    printed = capsys.readouterr().out
    content = json.loads((folder / "ablation.json").read_text())
    assert content["heads"] and f"Ablated: {', '.join(content['heads'])}" in printed
    before = (folder / "items.jsonl").read_bytes()
    assert ablate(AblateConfig(base, str(folder), **settings)) == folder
    assert (folder / "items.jsonl").read_bytes() == before  # finished
    assert capsys.readouterr().out == printed
    plain, loaded = load_two_tower(base), load_two_tower(str(folder))
    pixels, tokens = torch.rand(2, 3, 32, 32), plain.tokenize(CAPTIONS)
    with torch.no_grad():
        assert torch.equal(plain.encode_image(pixels), loaded.encode_image(pixels)) == (tower == "text")
        assert torch.equal(plain.encode_text(tokens), loaded.encode_text(tokens)) == (tower == "image")
        encoder, tokenizer = load_text_encoder(str(folder))
        rows = tokenizer(CAPTIONS[:2], padding="max_length", return_tensors="pt").input_ids
        features = encoder(rows).pooler_output @ loaded.text.tower.text_projection
        torch.testing.assert_close(features, loaded.encode_text(tokens)[:2], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="is ablated already"):
        ablate(AblateConfig(str(folder), str(tmp_path / "again"), **settings))
    (folder / "ablation.json").write_text(json.dumps(content | {"model_sha256": "0" * 64}))
    with pytest.raises(UserError, match="that model has other weights now"):
        load_two_tower(str(folder))
    with pytest.raises(UserError, match="is ablated already"):  # known without loading anything
        ablate(AblateConfig(str(folder), str(tmp_path / "again"), **settings))


@torch.no_grad()
def test_betas_leave_as_they_were_learned(world, tmp_path, capsys):
    base, data, images = world
    settings = dict(data=data, images=images, search="bp", limit=None, epochs=3, learning_rate=0.5, bp_batch=8)
    picture, linked = tmp_path / "bp" / "heads.png", tmp_path / "linked"
    picture.parent.mkdir()
    linked.write_text("kept")
    picture.symlink_to(linked)
    folder = ablate(AblateConfig(base, str(tmp_path / "bp"), **settings))
    assert linked.read_text() == "kept" and picture.read_bytes()[:4] == b"\x89PNG"  # nothing goes through a link
    content, loaded = json.loads((folder / "ablation.json").read_text()), load_two_tower(str(folder))
    betas = torch.tensor(content["beta"])
    assert ((betas > 0) & (betas < 1)).all()  # a beta above 0.5 counts, too
    assert content["heads"] == [f"{block}-{head}" for block, head in (betas < 0.5).nonzero().tolist()]
    pairs = read_source(AblateConfig(base, str(folder), **settings))
    features, _, _ = encode_images(loaded, pairs.records, pairs.images, 8, "cpu", False)
    texts = encode_texts(loaded, pairs.captions, 8, "cpu", progress=False)
    recalls = recall_at_k(features, texts, [1, 5, 10])
    assert content["recall"]["after"]["text_to_image_R@1"] == pytest.approx(recalls["text_to_image"]["R@1"])
    assert content["recall"]["after"] != content["recall"]["before"]


def test_a_model_whose_features_became_alike_is_not_passed_off_as_better(tmp_path, capsys):
    """Of equation 3: a model of constant features has a margin of 0, and one that errs a negative one."""
    settings = dict(data="toy/validation", search="all", limit=60, beta=0.0)
    ablate(AblateConfig("toy/clip", str(tmp_path), **settings))
    content = json.loads((tmp_path / "ablation.json").read_text())
    assert content["recall"]["after"]["mean_r"] < content["recall"]["before"]["mean_r"]
    assert "though the fitness rose" in capsys.readouterr().out


def test_a_probe_leaves_the_recalls_of_each_head_and_no_ablation(world, tmp_path, capsys):
    base, data, images = world
    printed = []
    for _ in range(2):  # the second time it is finished
        folder = ablate(AblateConfig(base, str(tmp_path / "run"), data, images, search="probe", limit=22))
        printed.append(capsys.readouterr().out)
    recalls = json.loads((folder / "probe.json").read_text())["recall"]
    assert list(recalls) == ["none", "0-0", "0-1", "1-0", "1-1"] and "| 1-1 | " in printed[0] == printed[1]
    assert not (folder / "ablation.json").exists()


def test_too_few_pairs_are_refused(world, tmp_path):
    base, data, images = world
    with pytest.raises(UserError, match="20 pairs are too few: 10 hard and 10 random"):
        ablate(AblateConfig(base, str(tmp_path / "run"), data, images, limit=20))


@pytest.mark.parametrize("search", ["single", "naive", "all", "ga", "bp"])
def test_pairs_that_are_all_alike_ablate_nothing(world, tmp_path, search):
    base, data, images = world
    entry = json.loads(Path(data).read_text())[0]
    (tmp_path / "data.json").write_text(json.dumps([entry] * 40))
    with pytest.raises(UserError, match="Which heads hurt cannot be known from these 40 pairs"):
        ablate(AblateConfig(base, str(tmp_path / "run"), str(tmp_path / "data.json"), images, search=search))
    assert not (tmp_path / "run" / "ablation.json").exists()


def test_a_gain_within_rounding_ablates_nothing(problem):
    features = problem.texts["whole"][:3].repeat(10, 1)  # each text ten times: no margin above 0
    alike = ImageProblem(problem.population, problem.embedded[:3].repeat(10, 1, 1), {"whole": features})
    alike.make_margins(k1=5, k2=5)
    assert not fittest(alike, every_mask(*alike.shape)).any() and not genetic_search(alike, 2)[0].any()


def one_sentence(data: str, file: Path) -> str:
    """The data with the first sentence of each caption alone, as `file`."""
    entries = json.loads(Path(data).read_text())
    for entry in entries:
        entry["conversations"][1]["value"] = entry["conversations"][1]["value"].partition(". ")[0] + "."
    file.write_text(json.dumps(entries))
    return str(file)


def test_robust_needs_captions_of_two_sentences(world, tmp_path, monkeypatch):
    base, data, images = world
    monkeypatch.setattr(command, "encode_images", None)  # refused before anything is encoded
    short = one_sentence(data, tmp_path / "data.json")
    with pytest.raises(UserError, match="fitness robust moves and removes sentences, and no caption has two"):
        ablate(AblateConfig(base, str(tmp_path / "run"), short, images, fitness="robust"))


def test_a_search_continues_with_its_own_settings_alone(world, tmp_path, monkeypatch):
    base, original, images = world
    data = str(tmp_path / "data.json")
    shutil.copyfile(original, data)
    settings = dict(data=data, images=images, generations=2, limit=22, beta=0.5)
    whole = ablate(AblateConfig(base, str(tmp_path / "whole"), **settings))
    note, folder = command._Search._note, tmp_path / "run"

    def stop(search, generation):
        note(search, generation)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command._Search, "_note", stop)
        ablate(AblateConfig(base, str(folder), **settings))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert json.loads(before["items.jsonl"])["item"]["name"] == "generation-0000"
    for change, message in (
        ({"beta": 0.1}, "beta: 0.5 there, 0.1 here"),
        ({"search": "naive"}, "search: 'ga' there, 'naive' here"),
    ):
        with pytest.raises(UserError, match=message):
            ablate(AblateConfig(base, str(folder), **settings | change))
    one_sentence(original, tmp_path / "data.json")
    with pytest.raises(UserError, match="The data is another one"):
        ablate(AblateConfig(base, str(folder), **settings))
    others = shutil.copytree(images, tmp_path / "others")
    first = next(others.iterdir())
    stat = first.stat()
    Image.open(first).transpose(Image.Transpose.FLIP_LEFT_RIGHT).rotate(90).save(first)
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError, match="The set of images is another one"):
        ablate(AblateConfig(base, str(folder), **settings | {"data": original, "images": str(others)}))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    # Other paths to the same data and model, and another batch, change nothing.
    ablate(AblateConfig(f"{base}/.", str(folder), **settings | {"data": original}, batch=7))
    contents = [json.loads((place / "ablation.json").read_text()) for place in (whole, folder)]
    assert contents[0]["beta"] == contents[1]["beta"] and contents[0]["recall"] == contents[1]["recall"]


@pytest.mark.parametrize("damage", ["result", "note"])
def test_damaged_results_and_notes_are_made_again(world, tmp_path, damage):
    base, data, images = world
    settings = dict(data=data, images=images, generations=3, limit=22, beta=0.5)
    folder = ablate(AblateConfig(base, str(tmp_path / "run"), **settings))
    result, items = folder / "ablation.json", folder / "items.jsonl"
    whole, notes = result.read_text(), items.read_text().splitlines(keepends=True)
    if damage == "result":
        result.write_text(whole.replace('"heads": [', '"heads": [ ', 1))
    else:
        assert "generation-0002" in notes[2]
        items.write_text(notes[0] + "[1, 2]\n" + notes[1].replace('"0', '"1') + notes[2])
        result.unlink()
    ablate(AblateConfig(base, str(folder), **settings))
    assert result.read_text() == whole


@pytest.mark.parametrize(
    ("search", "advice"), [("naive", "each of these heads alone raises it"), ("bp", "contrastive loss fell")]
)
def test_the_advice_after_a_fall_is_that_of_the_search(world, tmp_path, monkeypatch, capsys, search, advice):
    base, data, images = world
    recalls = command.Problem.recalls
    falling = lambda problem, encoded: [  # noqa: E731
        row | {"mean_r": 100.0 - 50 * (encoded is not problem.untouched)} for row in recalls(problem, encoded)
    ]
    monkeypatch.setattr(command, "better_alone", lambda recalls: torch.tensor([True] + [False] * (len(recalls) - 2)))
    monkeypatch.setattr(command.Problem, "recalls", falling)
    settings = dict(data=data, images=images, search=search, limit=None, epochs=1)
    ablate(AblateConfig(base, str(tmp_path / "run"), **settings))
    printed = capsys.readouterr().out
    assert "mean-R fell from 100.0 to 50.0, though" in printed and advice in printed and "Try" in printed


def test_features_that_are_not_finite_are_refused(problem):
    broken = problem.embedded.clone()
    broken[3] = torch.nan
    images = ImageProblem(problem.population, broken, problem.texts)
    with pytest.raises(UserError, match="The features of images are not finite"):
        images.make_margins(k1=5, k2=5)
    texts = ImageProblem(problem.population, problem.embedded, {"whole": problem.texts["whole"] * torch.inf})
    with pytest.raises(UserError, match=r"The features of texts \(whole\) are not finite"):
        texts.make_margins(k1=5, k2=5)
    images.margins = problem.margins
    with pytest.raises(UserError, match="The features of an ablation are not finite"):
        images.fitness(images.untouched, 0)
