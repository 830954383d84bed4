"""What captions are drawn, by samplers, paddings and recipes: as often as defined, and a pure function of the key."""

import random
from collections import Counter
from dataclasses import replace
from itertools import permutations
from math import comb

import pytest
import torch
from helpers.tiny_clip import tiny_clip
from helpers.vocabulary import BOS, EOS, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from debias_diffusion.errors import UserError
from debias_diffusion.methods import METHODS, find_method
from debias_diffusion.methods.dual_caption import PADDINGS, RECIPES, find_padding
from debias_diffusion.methods.sampling import SAMPLERS, draw_generator, find_sampler, random_subset
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.text.tokens import PAD, CaptionTokenizer
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.optimizer import Optimizer

SENTENCES = ["S.", "a.", "b.", "c.", "d."]
DETAILS = SENTENCES[1:]


def arrangements(items, size):
    """Every ordered choice of `size` items, each as likely as the others."""
    choices = list(permutations(items, size))
    return {choice: 1 / len(choices) for choice in choices}


def mixture(parts):
    """{choice: probability} of several equally likely or weighted parts."""
    total = Counter()
    for weight, part in parts:
        for choice, probability in part.items():
            total[choice] += weight * probability
    return dict(total)


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


@pytest.mark.parametrize("name", sorted(DEFINITIONS.keys() - {"summary-as-released"}))
@given(sentences=st.lists(st.text(min_size=1), max_size=200, unique=True), seed=st.integers(0, 2**31))
@settings(max_examples=50)
def test_a_short_caption_is_some_of_the_sentences_once_each(name, sentences, seed):
    before = list(sentences)
    drawn = find_sampler(name)(sentences, random.Random(seed))
    assert sentences == before
    assert bool(drawn) == bool(sentences)
    assert len(drawn) == len(set(drawn)) and set(drawn) <= set(sentences)
    if len(sentences) > 1 and name not in ("summary", "opening"):
        assert sentences[0] not in drawn


def test_the_released_summary_is_long_clips_split_of_the_caption():
    for caption in ("Mr. Lee reads a book. He smiles.", "Is it a dog? It is one. It barks.", "No stop at all"):
        assert find_sampler("summary-as-released")(split_sentences(caption), None) == [caption.split(". ")[0]]


def test_draws_depend_on_seed_epoch_and_sample_and_on_nothing_else():
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (0, 0, "a")]
    draws = [draw_generator(*key).random() for key in keys]
    assert draws[0] == draws[4] and len(set(draws)) == 4
    # The same on every machine and Python, or a resumed run would not continue the same one.
    assert random_subset(SENTENCES, draw_generator(7, 2, "coco/1.jpg")) == ["b.", "d.", "a."]


# ---- recipes

TOKENIZER = CaptionTokenizer(tiny_tokenizer(60), 60)
CAPTION = "A scene. The cat is red. The dog is blue. The sky is dark."


def text(ids):
    return TOKENIZER.tokenizer.decode(ids)


def draw(recipe, caption=CAPTION, seed=0, epoch=0, sample_id="x"):
    return recipe.captions(caption, TOKENIZER, seed, epoch, sample_id)


def test_debias_clip_drops_the_summary_and_pads_in_front_which_long_clip_does_not():
    pairs = [draw(RECIPES["debias-clip"], sample_id=str(i)) for i in range(300)]
    assert all(text(long.ids) == CAPTION.lower().replace(".", " .") and long.n_pre == 0 for long, _ in pairs)
    shorts = {text(short.ids) for _, short in pairs}
    assert "the sky is dark . the cat is red ." in shorts and len(shorts) == 3 + 6 + 6
    assert not any("scene" in short for short in shorts)
    assert all(0 <= short.n_pre <= TOKENIZER.n_post(short.ids) for _, short in pairs)
    assert len({short.n_pre for _, short in pairs}) > 20
    _, short = draw(METHODS["long-clip"])
    assert (text(short.ids), short.n_pre) == ("a scene .", 0)


def test_the_recipes_are_the_papers():
    debias, long, smart = (METHODS[name] for name in ("debias-clip", "long-clip", "smart-clip-sampling"))
    assert (debias.short_weight, debias.components, debias.label_smoothing) == (0.1, 32, 0.1)
    assert (long.short_weight, long.components, long.label_smoothing) == (0.5, 32, 0.1)
    assert (smart.short_weight, smart.components, smart.sampling, smart.has_long) == (1.0, 0, "opening", False)
    assert {recipe.pooling for recipe in RECIPES.values()} == {"eot"}
    assert METHODS["debias-clip-as-released"] == replace(debias, component_parts=4, decay="all")


def test_the_training_defaults_are_the_papers():
    """Table S1, in its order; and the schedule, the kept positions and the scale of Long-CLIP, which it follows."""
    defaults = TrainConfig(data="data", output="output", model="toy/clip")
    assert (defaults.batch_size(1_244_000), defaults.epochs, defaults.weight_decay) == (256, 3, 1e-2)
    assert defaults.warmup_steps(1_244_000 * 3 // 256) == 200
    assert (defaults.learning_rate, defaults.betas, defaults.eps) == (1e-6, (0.9, 0.999), 1e-8)
    assert (defaults.recipe, defaults.keep_positions, defaults.stretch) == ("debias-clip", 20, 4)
    assert (defaults.initial_scale, defaults.freeze_image_tower, defaults.max_steps) == ("auto", False, None)
    adamw = Optimizer(tiny_clip(), defaults.weight_decay, defaults.betas, defaults.eps).adamw
    assert type(adamw) is torch.optim.AdamW
    assert {(group["betas"], group["eps"]) for group in adamw.param_groups} == {((0.9, 0.999), 1e-8)}
    assert {group["weight_decay"] for group in adamw.param_groups} == {1e-2, 0.0}


def test_padding_is_uniform_over_all_the_room():
    rng = random.Random(0)
    for name in ("random", "pre-sot"):
        counts = Counter(PADDINGS[name].draw(9, rng) for _ in range(10_000))
        assert sorted(counts) == list(range(10))
        assert chisquare(list(counts.values())).pvalue > 1e-3
        assert PADDINGS[name].draw(0, rng) == 0
    assert [name for name, padding in PADDINGS.items() if padding.before_sot] == ["pre-sot"]


@given(st.integers(0, 300), st.integers(0, 300))
def test_fixed_padding_is_as_many_as_fit(count, n_post):
    assert find_padding(f"pad-{count}").draw(n_post, random.Random(0)) == min(count, n_post)
    assert find_padding("none").draw(n_post, random.Random(0)) == 0


def test_where_the_pads_stand():
    rows = {}
    for name in ("pad-3", "pre-sot", "none"):
        recipe = replace(RECIPES["debias-clip"], padding=name)
        rows[name] = recipe.collate([draw(recipe, sample_id="3")], TOKENIZER).padded()[1].tolist()
    assert rows["pad-3"][:4] == [BOS, PAD, PAD, PAD] and rows["pad-3"][4] != PAD
    assert rows["none"][0] == BOS and rows["none"][1] != PAD
    assert rows["pre-sot"][0] == PAD and rows["pre-sot"].index(BOS) > 0


@given(
    st.sampled_from(sorted(RECIPES)),
    st.sampled_from(sorted(SAMPLERS)),
    st.sampled_from(["random", "none", "pad-20", "pre-sot"]),
    st.lists(st.text(max_size=400), max_size=200).map(". ".join) | st.text(max_size=50),
    st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_any_caption_in_any_script_fits_the_window_and_ends_in_eot(name, sampling, padding, caption, seed):
    recipe = replace(RECIPES[name], sampling=sampling, padding=padding)
    drawn = draw(recipe, caption, seed)
    assert len(drawn) == recipe.has_long + recipe.has_short
    assert drawn == draw(recipe, caption, seed)
    rows = recipe.collate([drawn], TOKENIZER).padded()
    assert rows.shape == (len(drawn), 60)
    for row, one in zip(rows.tolist(), drawn, strict=True):
        assert row.count(BOS) == row.count(EOS) == 1
        assert row.index(EOS) == 1 + len(one.ids) + one.n_pre
        assert set(row[row.index(EOS) + 1 :]) <= {PAD}


def test_unknown_samplings_and_paddings_are_named():
    for changes, message in (
        ({"sampling": "randm"}, "Unknown sampling 'randm'. Did you mean random"),
        ({"sampling": "keep-0"}, "Unknown sampling 'keep-0'.*random.*keep-N with another N from 1"),
        ({"padding": "pad-x"}, "Unknown padding 'pad-x'.*none.*pad-N with another N from 0"),
    ):
        with pytest.raises(UserError, match=message):
            replace(RECIPES["debias-clip"], **changes)


def test_parts_with_components_of_their_own_must_be_equal_and_large_enough():
    recipe = find_method("long-clip", {"component_parts": 4})
    recipe.check(256, 512)  # 32 of at most 63 directions
    assert recipe.fit(256, 512) is recipe and recipe.fit(128, 512).components == 15  # half of at most 30
    assert "32 components of each of 4 parts" in recipe.describe()
    with pytest.raises(UserError, match=r"components is 32, .* less than 31, .* or a part of it, less one \(31\)"):
        recipe.check(128, 512)
