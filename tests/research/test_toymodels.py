"""How the toy models are made: stages that continue, the base CLIP, and what the UNet learns from."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from helpers.untrained_toys import untrained_models
from torch import nn
from transformers import CLIPTokenizer

from debias_diffusion.text.tokens import CaptionTokenizer
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, generator, scene
from research.toymodels import clip, prepared_unet, stage, unet
from research.toymodels.clip import encode, render_all, train_clip
from research.toymodels.scenes import base_scene
from research.toymodels.stage import run_stage
from research.toymodels.vae import SIZE, as_input, picture_tensor
from research.toymodels.vocabulary import learn_tokenizer

# ---- stages


def test_a_killed_stage_ends_as_an_unbroken_one(tmp_path):
    def stage(folder, fail_at=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)

        def loss(step):
            if step == fail_at:
                raise KeyboardInterrupt
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            return (model(x) - x[:, :2]).square().mean()

        run_stage(folder, model, loss, steps=1200, peak=1e-2)
        return [p.detach().clone() for p in model.parameters()]

    whole = stage(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path / "killed", fail_at=700)
    continued = stage(tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole, continued, strict=True))
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    assert len(logs[0]) == len(logs[1]) == 12  # a step that was made again is logged once


# ---- scenes and the tokenizer


def test_base_models_learn_from_few_objects_and_exchanged_ones():
    rows = [[base_scene(ARRANGEMENTS * family + n) for n in range(ARRANGEMENTS)] for family in range(1000)]
    counts = Counter(len(row[0].things) for row in rows)  # a third one, a third two, and a fifth of the others
    assert set(counts) == {1, 2, 3, 4, 5, 6} and 280 < counts[1] < 390 and 340 < counts[2] < 460


@pytest.fixture(scope="module")
def tokenizer():
    return learn_tokenizer((caption("train", i).text for i in range(1000)), merges=400)


def test_every_word_of_captions_is_a_token_and_they_have_at_most_200(tokenizer):
    counter = CaptionTokenizer(tokenizer, 248)
    texts = [caption("development", i).text for i in range(500)]
    counts = [counter.count(text) for text in texts]
    assert min(counts) >= 88 and max(counts) <= 200
    assert all(token.endswith("</w>") for text in texts[:50] for token in tokenizer.tokenize(text))


def test_the_tokenizer_is_laid_out_as_clips_and_saved_whole(tokenizer, tmp_path):
    assert tokenizer.eos_token_id == len(tokenizer) - 1 and tokenizer.bos_token_id == len(tokenizer) - 2
    text = "a giraffe , naïve 猫 👍"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    assert CLIPTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False).input_ids == ids


# ---- the base model


def test_the_base_clip_learns_and_is_an_ordinary_backbone(tmp_path, monkeypatch, full_precision, tokenizer):
    monkeypatch.setattr(stage, "_LOG_EVERY", 5)
    backbone = train_clip(tmp_path / "clip", tokenizer, scenes=8, steps=30, batch=8)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "clip" / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.85 * losses[0]
    pictures = [render(scene("train", i)) for i in range(16)]
    texts = [caption("train", i).text for i in range(16)]
    image, text = encode(backbone, pictures, texts, batch=5)
    assert image.shape == text.shape == (16, 128)
    # Training reads texts and images as the finished model does.
    tokens = backbone.tokenize(texts)
    with torch.no_grad():
        trained, hidden_states = clip._encode_text(backbone.model, tokens.padded(), tokens.n_prefix + tokens.lengths)
        trained_image, _ = clip.encode_patches(backbone, render_all([scene("train", i) for i in range(16)], backbone))
    torch.testing.assert_close(trained, text, rtol=0, atol=1e-5)
    torch.testing.assert_close(trained_image, image, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden_states, backbone.text.penultimate_states(tokens, pad=0), rtol=0, atol=1e-5)
    # What training drew and scaled itself is what the model's own transform gives.
    drawn = backbone.as_floats(render_all([scene("train", 0), scene("train", 1)], backbone))
    torch.testing.assert_close(drawn[1], backbone.preprocess(pictures[1]), rtol=0, atol=1e-6)


# ---- the UNet


@pytest.fixture(scope="module")
def pipe():
    """The toy SDXL in full precision, untrained."""
    return untrained_models()[1]


def test_what_the_unet_learns_from_is_what_the_pipeline_makes(pipe):
    pairs = unet.encode_pairs(pipe, 3)
    _, caption = unet.draw_pair(2)
    hidden_states, _, pooled, _ = pipe.encode_prompt([caption.text.lower()], do_classifier_free_guidance=False)
    for name, expected in (("hidden_states", hidden_states), ("pooled", pooled)):
        torch.testing.assert_close(pairs[name][2].float(), expected[0], atol=0.05, rtol=0.05)
    with torch.inference_mode():
        pictures = as_input(picture_tensor([render(unet.draw_pair(2)[0], SIZE)]))
        latents = pipe.vae.encode(pictures).latent_dist.mean * pipe.vae.config.scaling_factor
    torch.testing.assert_close(pairs["latents"][2].float(), latents[0], atol=0.1, rtol=0.05)


def test_two_chunks_are_joined_as_the_pipeline_joins_them(pipe):
    """Of both encoders, or of the second one beside a first that reads all at once."""
    joined = prepared_unet.encode_pairs_in_chunks(pipe, 12, start=7)
    width, at_once, close = pipe.text_encoder.config.hidden_size, [], dict(atol=0.05, rtol=0.05)
    for i in range(12):
        rng = generator("train", 7 + i, "windows")
        chunks = list(prepared_unet.chunks_of(unet.draw_pair(7 + i)[1], pipe.tokenizer, rng))
        whole = " ".join(chunks).strip()
        assert whole.endswith(".") and len(pipe.tokenizer(whole).input_ids) <= 77
        states, _, pooled, _ = pipe.encode_prompt([*chunks, "", whole], do_classifier_free_guidance=False)
        one = len(pipe.tokenizer(chunks[0]).input_ids) - 2
        first, second, empty, both = states  # BOS of the first, both texts, EOS and pads of the second, an empty one's
        expected = torch.cat([first[: 1 + one], second[1:], *[empty[1:]] * 2])[:152]
        read_at_once = torch.cat([both, *[empty[1:]] * 2])[:152, :width]
        hidden_states = joined["hidden_states"][i].float()
        torch.testing.assert_close(hidden_states[:, width:], expected[:, width:], **close)
        torch.testing.assert_close(joined["pooled"][i].float(), pooled[0], **close)
        at_once.append(not torch.allclose(hidden_states[:, :width], expected[:, :width], **close))
        assert not at_once[-1] or torch.allclose(hidden_states[:, :width], read_at_once, **close)
    assert 0 < sum(at_once) < 12


def test_the_unets_loss_is_the_error_of_v_and_is_zero_for_the_right_answer(pipe):
    one = {name: tensor[:1] for name, tensor in unet.encode_pairs(pipe, 1).items()}
    scheduler, asked, latents = unet.DDPMScheduler.from_config(pipe.scheduler.config), {}, one["latents"].float()

    class Oracle(torch.nn.Module):  # knows the one picture there is, and so v
        def forward(self, noisy, times, encoder_hidden_states, added_cond_kwargs):
            asked.update(text=encoder_hidden_states, pooled=added_cond_kwargs["text_embeds"])
            signal = scheduler.alphas_cumprod[times].view(-1, 1, 1, 1)
            noise = (noisy - signal.sqrt() * latents) / (1 - signal).sqrt()
            return SimpleNamespace(sample=signal.sqrt() * noise - (1 - signal).sqrt() * latents)

    loss = unet.denoising_loss(SimpleNamespace(unet=Oracle(), scheduler=pipe.scheduler), 400, 0, compiled=False)
    assert loss(one, 0) < 1e-3
    left_out = asked["text"].abs().amax((1, 2)) == 0
    assert 0.05 < left_out.float().mean() < 0.15
    assert torch.equal(left_out, asked["pooled"].abs().amax(1) == 0)
    loss(one, 0, lambda states, rng: states + 1)
    assert (asked["text"][~left_out] - 1).allclose(one["hidden_states"].float())
