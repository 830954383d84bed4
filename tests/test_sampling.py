"""What captions are drawn, by samplers, paddings and recipes: as often as defined, and a pure function of the key."""

import random
from collections import Counter
from dataclasses import replace
from itertools import permutations
from math import comb

import pytest
from helpers.vocabulary import BOS, tiny_tokenizer
from scipy.stats import chisquare

from debias_diffusion.data.batch import draw_generator
from debias_diffusion.methods import METHODS
from debias_diffusion.methods.dual_caption import PADDINGS, RECIPES, find_padding
from debias_diffusion.methods.sampling import SAMPLERS, find_sampler, random_subset
from debias_diffusion.text.tokens import PAD, CaptionTokenizer
from debias_diffusion.training.config import TrainConfig

SENTENCES = ["S.", "a.", "b.", "c.", "d."]
DETAILS = SENTENCES[1:]


def arrangements(items, size):
    """Every ordered choice of `size` items, each as likely as the others."""
    choices = list(permutations(items, size))
    return {choice: 1 / len(choices) for choice in choices}


def mixture(parts):
    """{choice: probability} of several weighted parts, which share no choice."""
    return {choice: weight * p for weight, part in parts for choice, p in part.items()}


# What each sampler draws from five sentences, and how often: the definitions, written out.
DEFINITIONS = {
    "random": mixture([(1 / 4, arrangements(DETAILS, n)) for n in range(1, 5)]),
    "ordered": {tuple(SENTENCES[1:end]): 1 / 4 for end in range(2, 6)},
    "independent": mixture([(comb(4, n) / 15, arrangements(DETAILS, n)) for n in range(1, 5)]),
    "shuffle": arrangements(DETAILS, 4),
    "keep-4": arrangements(DETAILS, 4),
    "keep-2": arrangements(DETAILS, 2),
    "keep-9": arrangements(DETAILS, 4),
    "summary": {("S.",): 1.0},
    "summary-as-released": {("S",): 1.0},
    "opening": {tuple(SENTENCES[:end]): 1 / 5 for end in range(1, 6)},
    "details": {tuple(DETAILS): 1.0},
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_sampler_draws_what_its_definition_says_as_often_as_it_says(name):
    assert set(SAMPLERS) <= set(DEFINITIONS)
    sampler, expected, draws = find_sampler(name), DEFINITIONS[name], 24_000
    assert sum(expected.values()) == pytest.approx(1)
    counts = Counter(tuple(sampler(SENTENCES, draw_generator(0, 0, str(i)))) for i in range(draws))
    assert set(counts) == set(expected)
    if len(expected) > 1:
        observed = [counts[choice] for choice in expected]
        assert chisquare(observed, [draws * p for p in expected.values()]).pvalue > 1e-3


def test_draws_depend_on_seed_epoch_and_sample_and_on_nothing_else():
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (0, 0, "a")]
    draws = [draw_generator(*key).random() for key in keys]
    assert draws[0] == draws[4] and len(set(draws)) == 4
    # The same on every machine and Python, or a resumed run would not continue the same one.
    assert random_subset(SENTENCES, draw_generator(7, 2, "coco/1.jpg")) == ["b.", "d.", "a."]


# ---- recipes

TOKENIZER = CaptionTokenizer(tiny_tokenizer(60), 60)
CAPTION = "A scene. The cat is red. The dog is blue. The sky is dark."


def draw(recipe, caption=CAPTION, seed=0, epoch=0, sample_id="x"):
    return recipe.captions(caption, TOKENIZER, seed, epoch, sample_id)


def test_the_recipes_are_the_papers():
    debias, long, smart = (METHODS[name] for name in ("debias-clip", "long-clip", "smart-clip-sampling"))
    assert [(recipe.sampling, recipe.padding) for recipe in (debias, long)] == [("random",) * 2, ("summary", "none")]
    assert (debias.short_weight, debias.components, debias.label_smoothing) == (0.1, 32, 0.1)
    assert (long.short_weight, long.components, long.label_smoothing) == (0.5, 32, 0.1)
    assert (smart.short_weight, smart.components, smart.sampling, smart.has_long) == (1.0, 0, "opening", False)
    assert {recipe.pooling for recipe in RECIPES.values()} == {"eot"}


def test_the_training_defaults_are_the_papers():
    """Table S1, in its order; and the schedule, the kept positions and the scale of Long-CLIP, which it follows."""
    defaults = TrainConfig(data="data", output="output", model="toy/clip")
    assert (defaults.batch_size(1_244_000), defaults.epochs, defaults.weight_decay) == (256, 3, 1e-2)
    assert defaults.warmup_steps(1_244_000 * 3 // 256) == 200
    assert (defaults.learning_rate, defaults.betas, defaults.eps) == (1e-6, (0.9, 0.999), 1e-8)
    assert (defaults.recipe, defaults.keep_positions, defaults.stretch) == ("debias-clip", 20, 4)
    assert (defaults.initial_scale, defaults.freeze_image_tower, defaults.max_steps) == ("auto", False, None)


def test_padding_is_uniform_over_all_the_room():
    rng = random.Random(0)
    for name in ("random", "pre-sot"):
        counts = Counter(PADDINGS[name].draw(9, rng) for _ in range(10_000))
        assert sorted(counts) == list(range(10)) and chisquare(list(counts.values())).pvalue > 1e-3
        assert PADDINGS[name].draw(0, rng) == 0


def test_fixed_padding_is_as_many_as_fit_and_stands_behind_sot():
    for count, n_post in ((0, 5), (3, 5), (5, 3), (20, 0)):
        assert find_padding(f"pad-{count}").draw(n_post, random.Random(0)) == min(count, n_post)
    rows = {}
    for name in ("pad-3", "pre-sot", "none"):
        recipe = replace(RECIPES["debias-clip"], padding=name)
        rows[name] = recipe.collate([draw(recipe, sample_id="3")], TOKENIZER).padded()[1].tolist()
    assert rows["pad-3"][:4] == [BOS, PAD, PAD, PAD] and PAD not in (rows["pad-3"][4], rows["none"][1])
    assert rows["pre-sot"][0] == PAD and rows["pre-sot"].index(BOS) > 0
