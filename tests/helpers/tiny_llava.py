"""A tiny random LLaVA-NeXT with a tokenizer and a chat template."""

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
)

TILE = 32  # pixels
# Two tiles for wide and high images, one for the others, and always the whole image.
GRID = [[TILE, TILE], [TILE, 2 * TILE], [2 * TILE, TILE]]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)


def make_processor(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [*SPECIAL.values(), "<image>"]
    learning = {"vocab_size": 900, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=special, **learning))
    # Padded on the right, as some models are saved: batches of these need the pads on the left.
    extra = {"padding_side": "right", "extra_special_tokens": {"image_token": "<image>"}}
    crop = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
    return LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(image_grid_pinpoints=GRID, **crop),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **extra, **SPECIAL),
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def tiny_llava(processor, width=64):
    tokenizer = processor.tokenizer
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "image_size": TILE, "patch_size": 8, "projection_dim": 32}
    text = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"model_type": "llama", "num_key_value_heads": 4, "max_position_embeddings": 1024}
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=text | ids | {"vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=GRID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(0)
    model = LlavaNextForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def noise(rng):
    height, width = rng.permutation([32, int(rng.integers(32, 65))])
    coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC)


def judge(questions):
    """(model, processor) of a random model that says yes and no."""
    processor = make_processor(["Yes no yes No"] * 20 + questions)
    model, vocabulary = tiny_llava(processor), processor.tokenizer.get_vocab()
    ids = [index for token, index in vocabulary.items() if token.strip("Ġ").lower() in ("yes", "no")]
    assert len(ids) >= 4  # of several cases
    with torch.no_grad():
        model.lm_head.weight[ids] *= 20
    return model, processor
