import random
from collections import Counter

import pytest
from scipy.stats import chisquare

from debias_diffusion.errors import UserError
from debias_diffusion.recipes import RECIPES, Recipe, find_recipe, no_padding, random_padding
from debias_diffusion.tokens import CaptionTokenizer, clip_tokenizer

TOKENIZER = CaptionTokenizer(clip_tokenizer(60), 60)
CAPTION = "A scene. The cat is red. The dog is blue. The sky is dark."


def text(ids):
    return TOKENIZER.tokenizer.decode(ids)


def test_debias_clip_drops_the_summary_and_pads_in_front():
    pairs = [RECIPES["debias-clip"].captions(CAPTION, TOKENIZER, 0, 0, str(i)) for i in range(300)]
    assert all(text(pair.long_ids) == CAPTION.lower().replace(".", " .") for pair in pairs)
    shorts = Counter(text(pair.short_ids) for pair in pairs)
    assert not any("scene" in short for short in shorts)
    assert "the sky is dark . the cat is red ." in shorts
    assert len(shorts) == 3 + 6 + 6
    assert all(0 <= pair.n_pre <= TOKENIZER.n_post(pair.short_ids) for pair in pairs)
    assert len({pair.n_pre for pair in pairs}) > 20


def test_long_clip_takes_the_summary_and_does_not_pad():
    pair = RECIPES["long-clip"].captions(CAPTION, TOKENIZER, 0, 0, "x")
    assert (text(pair.short_ids), pair.n_pre) == ("a scene .", 0)


def test_the_recipes_are_the_papers():
    debias, long = RECIPES["debias-clip"], RECIPES["long-clip"]
    assert (debias.short_weight, debias.components, debias.label_smoothing) == (0.1, 32, 0.1)
    assert (long.short_weight, long.components, long.label_smoothing) == (0.5, 32, 0.1)


def test_padding_is_uniform_over_all_the_room():
    rng = random.Random(0)
    counts = Counter(random_padding(9, rng) for _ in range(10_000))
    assert sorted(counts) == list(range(10))
    assert chisquare(list(counts.values())).pvalue > 1e-3
    assert random_padding(0, rng) == no_padding(9, rng) == 0


def test_captions_are_a_pure_function_of_seed_epoch_and_sample():
    recipe = RECIPES["debias-clip"]
    assert recipe.captions(CAPTION, TOKENIZER, 1, 2, "a") == recipe.captions(CAPTION, TOKENIZER, 1, 2, "a")
    drawn = [recipe.captions(CAPTION, TOKENIZER, 1, epoch, "a") for epoch in range(10)]
    assert len({(tuple(pair.short_ids), pair.n_pre) for pair in drawn}) > 5


@pytest.mark.parametrize("caption", ["One sentence only.", "no stop", "..."])
def test_a_caption_of_one_sentence_keeps_it(caption):
    pair = RECIPES["debias-clip"].captions(caption, TOKENIZER, 0, 0, "x")
    assert pair.short_ids == pair.long_ids != []


def test_a_short_caption_longer_than_the_window_is_cut_and_has_no_room_for_pads():
    caption = "Summary. " + "word " * 300 + "."
    pair = RECIPES["debias-clip"].captions(caption, TOKENIZER, 0, 0, "x")
    assert len(pair.short_ids) == 58 and pair.n_pre == 0


def test_unknown_or_impossible_recipes_are_named():
    with pytest.raises(UserError, match="Unknown recipe 'debias'. Did you mean debias-clip"):
        find_recipe("debias")
    with pytest.raises(UserError, match=r"short_weight must be in \[0, 1\], got 2"):
        Recipe("random", "random", short_weight=2)
    with pytest.raises(UserError, match=r"label_smoothing must be in \[0, 1\), got 1"):
        Recipe("random", "random", short_weight=0.1, label_smoothing=1)
