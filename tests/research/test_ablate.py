"""The search of AAT: populations against one ablation at a time, fitness, the search, and what it leaves."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.suppression import literally
from helpers.tiny_clip import CORRECTIONS, correct, save_tiny_clip, tiny_clip
from PIL import Image
from safetensors.torch import load_file, save_file

from debias_diffusion.clip.blocks import before_attention, full_attention
from debias_diffusion.clip.image_tower import ImageTower
from debias_diffusion.clip.weight_files import weights_digest
from debias_diffusion.data.retrieval import embed_texts, encode_images, recall_at_k
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.eval.session import read_source
from debias_diffusion.jobs import Job
from research.ablate.backprop import descend
from research.ablate.command import ablate
from research.ablate.population import Population, head_means
from research.ablate.problems import Margin, Problem, better_alone, every_mask, fittest, genetic_search
from research.options import AblateConfig

CAPTIONS = ["A red cat.", "Two dogs sit on a very long green bench beside the river.", ""]
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)

# ---- populations


@pytest.fixture(scope="module")
def tower() -> ImageTower:
    return ImageTower(tiny_clip().double().eval().model.visual)


@pytest.mark.parametrize(("beta", "batch"), [(0.1, 2), (0.02, 64)])
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
    population, batches = Population(tower, beta), embedded.split(batch)
    close(population.features(batches, masks), torch.stack(expected))
    # 4 children of the root, and 16 leaves: equal ablations and equal beginnings once.
    assert population.children == (4 + 16) * len(batches)


# ---- the search


def test_fitness_is_the_margin_over_hard_and_drawn_negatives():
    generator = torch.Generator().manual_seed(0)
    texts, images, ablated = torch.randn(3, 30, 6, generator=generator, dtype=torch.float64)
    margin = Margin(texts, images, k1=4, k2=5, seed=7)
    first, again, second = (margin.negatives(number) for number in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)
    similar = F.cosine_similarity(texts[:, None], images[None], dim=-1).fill_diagonal_(-2).argsort(descending=True)
    assert torch.equal(first[:, :4], similar[:, :4]) and torch.equal(second[:, :4], similar[:, :4])
    assert all(text not in row and len(set(row)) == 9 for text, row in enumerate(first.tolist()))
    cosine = F.cosine_similarity(texts[:, None], ablated[None], dim=-1)
    for generation, negatives in ((1, second), (None, similar[:, :-1])):
        expected = (cosine.diagonal() - cosine.gather(1, negatives).amax(dim=1)).mean()
        close(margin(ablated[None], texts[None], generation)[0], expected)


PLANTED = torch.tensor([False, True, True, False])


@pytest.fixture(scope="module")
def problem(tower) -> Problem:
    """30 images, whose texts are near the features of an ablation of the tower, so that this one is best."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        images = tower.embed(torch.randn(30, 3, 32, 32, generator=generator, dtype=torch.float64))
        population = Population(tower, 0.1)
        best = population.features([images], PLANTED.view(1, 2, 2))[0]
    noise = torch.randn(best.shape, generator=generator, dtype=torch.float64)
    texts = {"whole": best + 0.3 * best.std() * noise, "shorter": best + 0.1 * best.std() * noise}
    return Problem(population, images, texts, k1=5, k2=5)


def test_every_search_finds_what_was_planted(problem):
    assert torch.equal(fittest(problem, every_mask(*problem.shape)), PLANTED)
    assert torch.equal(genetic_search(problem)[0], PLANTED)
    images, texts = problem.encode(PLANTED[None])
    parts = [problem.margins[name](images, texts[name], 0) for name in ("whole", "shorter")]
    close(problem.fitness((images, texts), 0), (parts[0] + parts[1]) / 2)
    with pytest.raises(UserError, match="not finite"):
        problem.fitness((images * torch.inf, texts), 0)


def test_heads_are_judged_by_the_recall_that_is_named():
    names = ("mean_r", "mean_r_text_to_image")
    rows = [dict(zip(names, row, strict=True)) for row in ((50, 50), (60, 40), (40, 60))]
    assert [better_alone(rows, name).tolist() for name in names] == [[True, False], [False, True]]
    assert AblateConfig("toy/clip", "x", data="toy/validation").recall == "text_to_image"  # as in the paper


def test_a_gain_within_rounding_ablates_nothing(problem):
    features = problem.texts["whole"][:3].repeat(10, 1)  # each text ten times: no margin above 0
    alike = Problem(problem.population, problem.images[:3].repeat(10, 1, 1), {"whole": features}, k1=5, k2=5)
    assert not fittest(alike, every_mask(*alike.shape)).any() and not genetic_search(alike, 2)[0].any()


# ---- by gradient descent


def test_descent_quiets_what_was_planted_changes_no_weight_and_continues(problem, tmp_path):
    tower = problem.population.tower
    before, pairs = weights_digest(tower.visual), (problem.images, problem.texts["whole"], torch.tensor(20.0))
    descent = partial(descend, tower, *pairs, rate=0.1, epochs=20, batch=8)
    with Job.open(tmp_path, "ablate") as job:
        whole, epochs = descent(job), job.names("epochs/")
        assert set(whole.flatten().argsort()[:2].tolist()) == set(PLANTED.nonzero().flatten().tolist())
        assert weights_digest(tower.visual) == before and len(epochs) == 20
        for epoch in epochs[15:]:  # as if it had been stopped before
            job.remove(epoch)
        assert torch.equal(descent(job), whole) and job.names("epochs/") == epochs


# ---- what a search leaves


@pytest.fixture
def config(world, tmp_path):
    """Settings of a search on the tiny data, which begins in `run`."""
    base, data, images = world
    return lambda output="run", **settings: AblateConfig(
        base, str(tmp_path / output), **{"data": data, "images": images, "limit": None} | settings
    )


GENETIC = dict(generations=2, beta=0.0)
DESCENT = dict(search="bp", epochs=3, learning_rate=0.5, bp_batch=8)


@pytest.mark.parametrize("changes", [GENETIC, GENETIC | {"tower": "text"}, DESCENT])
@torch.no_grad()
def test_a_search_leaves_what_evaluations_load_and_its_recall_is_theirs(changes, config, capsys):
    settings = config(**changes)
    folder = ablate(settings)
    content = json.loads((folder / "ablation.json").read_text())
    betas = torch.tensor(content["beta"])
    assert content["heads"] == [f"{block}-{head}" for block, head in (betas < 0.5).nonzero().tolist()]
    assert f"Ablated: {', '.join(content['heads']) or 'none'}" in capsys.readouterr().out
    # Of a descent a beta above 0.5 counts, too.
    assert ((betas > 0) & (betas < 1)).all() if changes == DESCENT else content["heads"]
    loaded, pairs = load_two_tower(str(folder)), read_source(settings)
    for model, when in ((load_two_tower(settings.model), "before"), (loaded, "after")):
        images, _, _ = encode_images(model, pairs.records, pairs.images, 8, "cpu", False)
        recalls = recall_at_k(images, embed_texts(model, pairs.captions, 8, "cpu", progress=False), [1])
        assert content["recall"][when]["text_to_image_R@1"] == pytest.approx(recalls["text_to_image"]["R@1"])
    assert content["recall"]["after"] != content["recall"]["before"]


@pytest.mark.parametrize("part", CORRECTIONS)
def test_a_model_that_was_corrected_is_another_one(part, config, copy_of):
    base = copy_of(Path(config().model))
    settings = replace(config(**GENETIC), model=str(base))
    folder = ablate(settings)
    assert load_two_tower(folder).image_attention
    correct(base, part)
    for use, message in (
        (partial(ablate, settings), "contents of model: "),
        (partial(load_two_tower, folder), "other"),
    ):
        with pytest.raises(UserError, match=message):
            use()


def test_a_stopped_command_continues_to_the_same_bits_on_the_same_data_alone(config, tmp_path, monkeypatch):
    settings = dict(generations=4, limit=22, beta=0.5, population=6)
    whole, note, folder = ablate(config("whole", **settings)), Job.note, tmp_path / "run"

    def stop(job, name, **notes):
        note(job, name, **notes | {"seconds": 1000.0})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Job, "note", stop)
        ablate(config(**settings))
    others = shutil.copytree(config().images, tmp_path / "others")
    stat = (first := next(others.iterdir())).stat()
    Image.open(first).transpose(Image.Transpose.FLIP_LEFT_RIGHT).rotate(90).save(first)
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for change, message in (
        ({"beta": 0.1}, "beta: 0.5 there"),
        ({"images": str(others)}, "contents of set of images: "),
    ):
        with pytest.raises(UserError, match=message):
            ablate(config(**settings | change))
    ablate(config(**settings))

    def left(place):
        job, content = Job.read(place), json.loads((place / "ablation.json").read_text())
        notes = [job.notes(f"generation-{number:04}") | {"seconds": 0} for number in range(4)]
        return content["seconds"] > 1000, (notes, content["beta"], content["recall"])

    (was_long, ours), (is_long, again) = left(whole), left(folder)
    assert again == ours and len(ours[0][0]["masks"]) == 6  # individuals
    assert is_long and not was_long  # with the time of the run that was stopped


# ---- heads that give their mean


@torch.no_grad()
def test_the_mean_is_over_images_and_tokens_and_in_the_last_block_over_cls():
    backbone = tiny_clip().eval()
    states = backbone.image.embed(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    means = head_means(backbone.image, states.split(1))
    for number, block in enumerate(backbone.model.visual.transformer.resblocks):
        attended = full_attention(*before_attention(block, states))
        attended = attended[:, :1] if number == 1 else attended
        close(means[number], attended.mean(dim=(0, 1)), atol=1e-5)
        states = backbone.image.run_block(number, states)


def test_a_search_leaves_its_means_and_makes_damaged_ones_again(tmp_path):
    settings = AblateConfig(
        save_tiny_clip(tmp_path / "base"), str(tmp_path / "run"), "toy/validation", search="all", way="mean", limit=40
    )
    content = json.loads(((folder := ablate(settings)) / "ablation.json").read_text())
    assert content["kind"] == "mean" and content["heads"] and content["settings"]["way"] == "mean"
    assert content["command"].endswith("--data toy/validation --limit 40 --search all --way mean")
    file = folder / "means.safetensors"
    whole, means = file.read_bytes(), load_file(file)["means"]
    save_file({"means": -means}, file)
    with pytest.raises(UserError, match="Search again"):
        load_two_tower(folder)
    ablate(settings)
    assert file.read_bytes() == whole and load_two_tower(folder).image_attention is None
