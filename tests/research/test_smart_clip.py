"""SmartCLIP's loss and gradients against its formulas, its runs, and evaluations with masks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.literal import cosine, literal_ranks, literal_text
from helpers.steps import assert_split_exactly, in_two_processes, prepared
from helpers.tiny_clip import byte_tokenizer, tiny_clip
from helpers.tiny_data import make_tiny_data
from helpers.training_runs import checkpoint, config, log
from safetensors.torch import load_file

from debias_diffusion.app.cli import main
from debias_diffusion.data.sources import open_data
from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval, retrieve
from debias_diffusion.methods import METHODS
from debias_diffusion.training.two_tower import train
from research.options import MaskedRetrievalConfig
from research.smart_clip.method import MASK_FILE, SMART_CLIP, read_mask_network
from research.smart_clip.retrieval import MaskedSession, evaluate_masked_retrieval, masked_ranks

CASES = {"smart-clip": {}, "smoothed": {"label_smoothing": 0.1, "sparsity": 7.0}, "kept": {"keep_states": 0.7}}
square = partial(tiny_clip, quick_gelu=True, embed_dim=32)  # as wide as its text tower


def setup(case, *samples):
    step = prepared(square(), replace(SMART_CLIP, **CASES[case]), *samples)
    step[0].logit_scale.data.fill_(100.0).log_()
    return step


def literal_masks(backbone, network, tokens):
    """Binary masks of all padded states, with the gradient of the sigmoid; open_clip's own forward passes."""
    tower, rows = backbone.model, tokens.padded()
    states = tower.token_embedding(rows) + tower.positional_embedding
    states = tower.ln_final(tower.transformer(states, attn_mask=tower.attn_mask)).detach()
    states = network.block(states)
    weights = (states @ network.pool.weight[0]).softmax(1)
    soft = torch.stack([w @ rows for w, rows in zip(weights, states, strict=True)]).sigmoid()
    return (soft >= 0.5).double() - soft.detach() + soft


def literal_loss(backbone, method, modules, batch):
    """Each image under each caption's mask, one pair at a time."""
    images, texts = backbone.model.encode_image(batch.images), literal_text(backbone, batch.tokens)
    masks, count = literal_masks(backbone, modules["mask"], batch.tokens), len(batch)
    assert 0 < masks.mean() < 1 and (masks[0] != masks[1]).any()
    logits = [[100 * cosine(images[i] * masks[j], texts[j]) for j in range(count)] for i in range(count)]
    logits, share = torch.stack([torch.stack(row) for row in logits]), method.label_smoothing
    targets = (1 - share) * torch.eye(count, dtype=torch.float64) + share / count
    align = sum(-(targets * table.log_softmax(1)).sum(1).mean() for table in (logits, logits.T))
    return 10 * align + method.sparsity * masks.abs().mean()


@pytest.fixture(scope="module")
def of_processes():
    return in_two_processes(setup, CASES)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_smart_clips_however_the_batch_is_split(case, of_processes):
    backbone, method, modules, batch = setup(case)
    loss = literal_loss(backbone, method, modules, batch)
    if method.keep_states:
        features = method.features(backbone, batch, modules)
        drawn = batch.views["state_tokens"][:, 0, 0] >= 0
        assert 0 < drawn.sum() < 6 and not features["state_error"][~drawn].any()  # so a chunk may have none
        loss = loss + 0.7 * features["state_error"][drawn].mean()
    assert_split_exactly((backbone, method, modules, batch), loss, case, of_processes)


def test_masked_ranks_count_ties_against_the_model():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        images, texts, masks = (torch.randint(*ends, (n, 3), generator=generator).double() for ends, n in SHAPES)
        ranks, _ = masked_ranks(images, texts, masks, IMAGE_OF)
        got = ranks["text_to_image"].tolist(), ranks["image_to_text"].tolist()
        assert got == literal_ranks(images, texts, IMAGE_OF, masks)


SHAPES, IMAGE_OF = (((-1, 2), 4), ((-1, 2), 6), ((0, 2), 6)), (0, 1, 1, 2, 3, 3)

# ---- runs, and evaluations with masks

SETTINGS = dict(recipe="smart-clip", components=None, max_steps=4, new_rate=10.0, keep_best=4)


@pytest.fixture(scope="module")
def smart_world(tmp_path_factory):
    """(base model as wide as its text tower, data, image folder)"""
    folder = tmp_path_factory.mktemp("world")
    square(tokenizer=byte_tokenizer(77)).save(folder / "base")
    return (str(folder / "base"), *make_tiny_data(folder))


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "smart-clip", SMART_CLIP)
        yield


@pytest.fixture(scope="module")
def run(smart_world, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    train(config(smart_world, output, **SETTINGS))
    return output


def test_a_run_trains_and_saves_the_mask_network(run, tmp_path):
    first, last = (checkpoint(run, step)["modules"] for step in (2, 4))
    for folder in ("best", "last"):
        assert last.keys() == {f"mask.{name}" for name in load_file(run / folder / MASK_FILE)}
    assert all(
        torch.equal(last[f"mask.{name}"], tensor) for name, tensor in load_file(run / "last" / MASK_FILE).items()
    )
    assert not any(torch.equal(first[name], last[name]) for name in last)
    lines = [line for line in log(run) if "loss" in line]
    assert all(0 < line["mask_size"] < 1 for line in lines) and lines[-1]["loss"] < lines[0]["loss"]
    main(["export", f"--model={run}", f"--output={tmp_path / 'export'}"])
    assert load_text_encoder(tmp_path / "export")[0].config.max_position_embeddings == 248


@pytest.mark.usefixtures("coarse_results", "blank_figures")
def test_with_masks_ranks_are_those_of_masked_images(smart_world, run, tmp_path):
    base, data, images = smart_world
    settings = dict(output=str(tmp_path / "out"), data=data, images=images)
    plain, masked = RetrievalConfig([str(run)], **settings), MaskedRetrievalConfig([str(run), base], **settings)
    with pytest.raises(UserError, match="has a mask_network.safetensors. Give a run of"):
        evaluate_masked_retrieval(replace(masked, encoders=[base]))
    session = MaskedSession("masked_retrieval", masked)
    result = next(iter(session.by_encoder(partial(retrieve, session)).values()))
    backbone, (read, source) = load_two_tower(run), open_data(data, images)
    network = read_mask_network(str(run / "last"), backbone)
    with torch.no_grad():
        tokens = backbone.tokenize([record.caption for record in read.records])
        pixels = torch.stack([backbone.preprocess(source.open(record.image)) for record in read.records])
        of_images, of_texts = backbone.encode_image(pixels), backbone.encode_text(tokens)
        masks = literal_masks(backbone, network, tokens)
    expected = literal_ranks(of_images, of_texts, range(len(of_texts)), masks)
    assert (result["ranks"]["text_to_image"], result["ranks"]["image_to_text"]) == expected
    pairs = zip(of_images.double() * masks, of_texts.double(), strict=True)
    assert result["similarities"] == pytest.approx([float(cosine(*pair)) for pair in pairs], abs=1e-5)
    # In one cache.
    reports = [evaluate_masked_retrieval(masked)["encoders"], evaluate_retrieval(plain)["encoders"]]
    label = next(iter(reports[1]))
    assert len(reports[0]) == 2 and reports[0][label]["recall_percent"] != reports[1][label]["recall_percent"]
