"""A multimodal model that writes captions, in batches that the library can concatenate."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import NamedTuple

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, pipeline
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from debias_diffusion.clip.model_files import load_pretrained
from debias_diffusion.devices import DTYPES
from debias_diffusion.encoders.hub import place_digest
from debias_diffusion.encoders.spec import check_model
from debias_diffusion.errors import explain_failure

_SIZES = 4096  # of images, whose shapes are remembered


class Asked(NamedTuple):
    """One image and what is asked about it; `index` is the caller's."""

    index: int
    image: Image.Image
    prompt: str


def model_digest(model: str) -> str:
    """What identifies a model's weights: the sha256 of a folder's files, or a hub repository's name and commit.

    Nothing but the configuration is loaded.

    Raises:
        UserError: there is no such model, or it is no image-text-to-text one.
    """
    with _explain(model):
        check_model(model)
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise ValueError(f"transformers has no image-text-to-text model of its kind, {config.model_type}")
    return place_digest(model)


def _explain(model: str) -> AbstractContextManager:
    """Raises UserError for whatever a wrong folder or a failed download raises."""
    advice = (
        "Give --model a folder or hub id of an image-text-to-text model that transformers knows, such as "
        "llava-hf/llama3-llava-next-8b-hf (Fix-CLIP's). Code that comes with a model is not run."
    )
    return explain_failure(f"The model {model!r} cannot be used", advice)


class Captioner:
    """Greedy answers of an image-text-to-text model of transformers to a prompt about an image, in chat form.

    Args:
        model: folder or hub id.
        precision: "fp32", "bf16" or "fp16".
        max_new_tokens: where an answer is cut.
        batch: images that are asked about at once.

    Attributes:
        shapes: of a size of images, the shapes, without the first axis, of what the processor makes of them: alike for
            a batch. LLaVA-NeXT cuts an image into tiles, more or fewer as its sides demand, and the library's pipeline
            concatenates images along the first axis only. Raises whatever the processor raises for this size.

    Raises:
        UserError: the model cannot be loaded, lacks weights, or has no chat template.
    """

    def __init__(self, model: str, device: torch.device, precision: str, max_new_tokens: int, batch: int):
        with _explain(model):
            processor = AutoProcessor.from_pretrained(model, trust_remote_code=False)
            # Files other than safetensors are read with weights_only=True.
            options = {"dtype": DTYPES[precision], "trust_remote_code": False}
            loaded = load_pretrained(AutoModelForImageTextToText, model, repr(model), **options)
            if not getattr(processor, "chat_template", None):
                raise ValueError("it has no chat template, so it cannot be asked")
            tokenizer, self.image_processor = processor.tokenizer, processor.image_processor
        # Answers continue the last position of a row, so the pads must stand on the left.
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.pipeline = pipeline("image-text-to-text", model=loaded, processor=processor, device=device)
        self.batch, self.max_new_tokens = batch, max_new_tokens
        self.shapes = lru_cache(_SIZES)(self._shapes)

    def captions(self, asked: Iterable[Asked]) -> Iterator[tuple[int, str]]:
        """(index, answer) of each image, batch by batch and therefore in another order.

        Images are batched with those that the processor makes as many tiles of. Which ones share a batch depends on
        `asked` alone, so that the same images give the same answers.
        """
        waiting: dict[tuple, list[Asked]] = {}
        for one in asked:
            group = waiting.setdefault(self.shapes(one.image.size), [])
            group.append(one)
            if len(group) == self.batch:
                yield from self._answers(group)
                group.clear()
        for group in filter(None, waiting.values()):
            yield from self._answers(group)

    def _shapes(self, size: tuple[int, int]) -> tuple:
        processed = self.image_processor(Image.new("RGB", size), return_tensors="pt")
        return tuple(sorted((name, part.shape[1:]) for name, part in processed.items() if torch.is_tensor(part)))

    def _answers(self, group: list[Asked]) -> list[tuple[int, str]]:
        contents = [[{"type": "image", "image": one.image}, {"type": "text", "text": one.prompt}] for one in group]
        answers = self.pipeline(
            text=[[{"role": "user", "content": content}] for content in contents],
            batch_size=len(group),
            return_full_text=False,
            generate_kwargs={"do_sample": False, "num_beams": 1, "max_new_tokens": self.max_new_tokens},
        )
        return [(one.index, answer[0]["generated_text"]) for one, answer in zip(group, answers, strict=True)]
