"""Image-text-to-text models that answer about images: in process by transformers, or on an OpenAI-compatible server."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from debias_diffusion.devices import DTYPES
from debias_diffusion.encoders.hub import from_pretrained, load_pretrained, location_digest
from debias_diffusion.errors import explain_failure
from debias_diffusion.eval.multimodal import ServerModel
from debias_diffusion.eval.report import image_url

_SIZES = 4096  # of images, whose shapes are remembered
_ADVICE = (
    "Give a folder or hub id of an image-text-to-text model that transformers knows, such as "
    "Qwen/Qwen2.5-VL-7B-Instruct or llava-hf/llama3-llava-next-8b-hf. Code that comes with a model is not run."
)


class Asked(NamedTuple):
    """An image and what is asked about it; `index` is the caller's."""

    image: Image.Image
    prompt: str
    index: int = 0


def model_digest(model: str, server: str | None = None) -> str:
    """What identifies a model: the sha256 of a folder's files, or a hub repository's name and commit; on a server only
    its name is known. Raises UserError if there is none, or it is no image-text-to-text one.
    """
    if server:
        return f"served as {Server(server, model, 1).model}"
    with explain_failure(f"The model {model!r} cannot be used", _ADVICE):
        _check_kind(model)
    return location_digest(model)


def _check_kind(model: str) -> None:
    config = from_pretrained(AutoConfig, model, trust_remote_code=False)
    if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ValueError(f"transformers has no image-text-to-text model of its kind, {config.model_type}")


class ChatModel:
    """An image-text-to-text model of transformers, asked in chat form. Decoding is greedy.

    Args:
        model: folder or hub id.
        precision: "fp32", "bf16" or "fp16".
        batch: images asked about at once.

    Attributes:
        shapes: of a size of images, the shapes of what the processor makes of one, such as more tiles of a wide one:
            alike in a batch. Raises whatever the processor raises for this size.

    Raises:
        UserError: the model cannot be loaded, lacks weights, or has no chat template.
    """

    def __init__(self, model: str, device: torch.device, precision: str, batch: int):
        with explain_failure(f"The model {model!r} cannot be used", _ADVICE):
            _check_kind(model)
            processor = from_pretrained(AutoProcessor, model, trust_remote_code=False)
            # Files other than safetensors are read with weights_only=True.
            options = {"dtype": DTYPES[precision], "trust_remote_code": False}
            self.model = load_pretrained(AutoModelForImageTextToText, model, repr(model), **options).to(device).eval()
            if not getattr(processor, "chat_template", None):
                raise ValueError("it has no chat template, so it cannot be asked")
            self.processor, self.tokenizer, self.batch = processor, processor.tokenizer, batch
        # Answers continue the last position of a row, so the pads must stand on the left.
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.shapes = lru_cache(_SIZES)(partial(_shapes, processor.image_processor))

    @torch.inference_mode()
    def texts(self, group: Sequence[Asked], max_new_tokens: int) -> list[str]:
        """The answer to each, cut at `max_new_tokens`; all images of the same `shapes`."""
        contents = [[{"type": "image"}, {"type": "text", "text": one.prompt}] for one in group]
        chats = [[{"role": "user", "content": content}] for content in contents]
        texts = self.processor.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        # A template writes the special tokens itself.
        options = {"padding": True, "add_special_tokens": False, "return_tensors": "pt"}
        inputs = self.processor(text=texts, images=[[one.image] for one in group], **options)
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens}
        ids = self.model.generate(**inputs.to(self.model.device, self.model.dtype), **options)
        return self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _shapes(processor: Any, size: tuple[int, int]) -> tuple:
    processed = processor(Image.new("RGB", size), return_tensors="pt")
    return tuple(sorted((name, part.shape[1:]) for name, part in processed.items() if torch.is_tensor(part)))


class Server(ServerModel):
    """A model on a server, which is asked as a `ChatModel` is."""

    def shapes(self, size: tuple[int, int]) -> tuple:
        """Alike for all: the server batches."""
        return ()

    def texts(self, group: Sequence[Asked], max_new_tokens: int) -> list[str]:
        """The answer to each, cut at `max_new_tokens`."""
        options = {"max_tokens": max_new_tokens}
        choices = self._pool.map(lambda one: self._ask(image_url(one.image), one.prompt, options), group)
        return [choice["message"]["content"] or "" for choice in choices]


def answers(model: ChatModel | Server, asked: Iterable[Asked], max_new_tokens: int) -> Iterator[tuple[int, str]]:
    """(index, answer) of each image, in another order: batches are of one shape, and depend on `asked` alone."""
    waiting: dict[tuple, list[Asked]] = {}

    def answer(group: list[Asked]) -> Iterator[tuple[int, str]]:
        return zip([one.index for one in group], model.texts(group, max_new_tokens), strict=True)

    for one in asked:
        shapes = model.shapes(one.image.size)
        waiting.setdefault(shapes, []).append(one)
        if len(waiting[shapes]) == model.batch:
            yield from answer(waiting.pop(shapes))
    for group in waiting.values():
        yield from answer(group)
