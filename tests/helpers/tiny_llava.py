"""A LLaVA-NeXT of a few ten thousand parameters, with a tokenizer and a chat template: random, or taught a few scenes.

`python tests/helpers/tiny_llava.py FOLDER` writes one that has learned four scenes of the toy world, for the README's
kind of first run: it describes any image as one of these.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
)

from debias_diffusion.app.synthesize.instructions import LONG, SHORT
from debias_diffusion.toyworld.grammar import short_prompt
from debias_diffusion.toyworld.render import render

TILE = 32  # pixels
PATCH = 8
SPLIT, SCENES = "development", (0, 3, 4, 8)  # of four backgrounds
STEPS = 130
SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "image_token"), SPECIAL, strict=True))
    extra = {"image_token": names.pop("image_token")}
    # As some models are saved: batches of these need the pads on the left.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="right", extra_special_tokens=extra, **names
    )


def make_processor(texts: list[str]) -> LlavaNextProcessor:
    images = LlavaNextImageProcessor(
        size={"shortest_edge": TILE},
        crop_size={"height": TILE, "width": TILE},
        # Two tiles for wide and high images, one for the others, and always the whole image.
        image_grid_pinpoints=[[TILE, TILE], [TILE, 2 * TILE], [2 * TILE, TILE]],
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=make_tokenizer(texts),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def tiny_llava(processor: LlavaNextProcessor, width: int = 64) -> LlavaNextForConditionalGeneration:
    tokenizer = processor.tokenizer
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=TILE,
        patch_size=PATCH,
        projection_dim=32,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(0)
    model = LlavaNextForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def scenes() -> tuple[list[Image.Image], list[str]]:
    """Images of toy scenes of few objects, and their captions."""
    pairs = [short_prompt(SPLIT, index) for index in SCENES]
    return [render(scene) for scene, _ in pairs], [caption.text for _, caption in pairs]


def noise(rng: np.random.Generator) -> Image.Image:
    """Coloured clouds, wide or high."""
    height, width = rng.permutation([32, int(rng.integers(32, 65))])
    coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC)


def teach(model, processor, images: list[Image.Image], captions: list[str], steps: int) -> float:
    """Overfits all but the vision tower on these pairs, whatever the prompt. Returns the last loss.

    An image of noise in each step also has one of the captions, so that any image gets a whole one.
    """
    model.model.vision_tower.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    rng, prompts = np.random.default_rng(0), (*LONG, *SHORT)
    newline = processor.tokenizer.encode("\n")[0]
    model.train()
    processor.tokenizer.padding_side = "right"
    for _ in range(steps):
        shown = [*images, noise(rng)]
        answers = [*captions, *rng.choice(captions, 1)]
        asked = zip(rng.choice(prompts, len(answers)), answers, strict=True)
        texts = [f"<s><image>{prompt}\n{answer}</s>" for prompt, answer in asked]
        batch = processor(images=shown, text=texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[batch["attention_mask"] == 0] = -100
        for row in labels:
            row[: int((row == newline).nonzero()[0]) + 1] = -100
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return float(loss.detach())


def save_llava(folder: Path, model, processor) -> str:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def build(folder: Path, steps: int = STEPS) -> float:
    """Writes a model that knows four toy scenes (with 0 steps: none). Returns the last loss."""
    images, captions = scenes()
    processor = make_processor([*captions, *LONG, *SHORT])
    model = tiny_llava(processor)
    loss = teach(model, processor, images, captions, steps) if steps else 0.0
    save_llava(folder, model, processor)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    print(f"loss {build(arguments.folder, arguments.steps):.4f}")
