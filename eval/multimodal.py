"""Multimodal models that are asked about images: in process by transformers, or on an OpenAI-compatible server."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from debias_diffusion.devices import DTYPES
from debias_diffusion.encoders.hub import check_location, from_pretrained, load_pretrained, location_digest
from debias_diffusion.errors import FailedError, UserError, explain_failure, reason

from .report import image_url

TOP = 20  # tokens whose probability is looked at: the most that OpenAI's interface gives
WAITS = (0, 1, 4, 16, 60)  # seconds before each try of a request
_SIZES = 4096  # of images, whose shapes are remembered
_ADVICE = (
    "Give a folder or hub id of an image-text-to-text model that transformers knows, such as "
    "Qwen/Qwen2.5-VL-7B-Instruct or llava-hf/llama3-llava-next-8b-hf. Code that comes with a model is not run."
)
# (token as text, log probability) of the likeliest tokens
Top = list[tuple[str, float]]


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
        return f"served as {ServerModel(server, model, 1).model}"
    with explain_failure(f"The model {model!r} cannot be used", _ADVICE):
        _check_kind(model)
    return location_digest(model)


def _check_kind(model: str) -> None:
    check_location(model)
    config = from_pretrained(AutoConfig, model, trust_remote_code=False)
    if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ValueError(f"transformers has no image-text-to-text model of its kind, {config.model_type}")


class ChatModel:
    """An image-text-to-text model of transformers, asked in chat form. Decoding is greedy.

    Args:
        model: folder or hub id.
        precision: "fp32", "bf16" or "fp16".
        batch: questions asked at once.

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
        # No method, which would keep the model in memory.
        self.shapes = lru_cache(_SIZES)(partial(_shapes, processor.image_processor))

    def texts(self, group: Sequence[Asked], max_new_tokens: int) -> list[str]:
        """The answer to each, cut at `max_new_tokens`; all images of the same `shapes`."""
        ids, _ = self._generate(group, max_new_tokens)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def first_tokens(self, image: Image.Image, prompts: Sequence[str]) -> list[Top]:
        """The `TOP` likeliest first tokens of the answer to each prompt."""
        tops = []
        for start in range(0, len(prompts), self.batch):
            _, (logits,) = self._generate([Asked(image, text) for text in prompts[start : start + self.batch]], 1)
            best = logits.float().log_softmax(-1).topk(TOP)  # [B, TOP]
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                tops.append([*zip(self.tokenizer.batch_decode([[each] for each in ids]), values, strict=True)])
        return tops

    @torch.inference_mode()
    def _generate(self, group: Sequence[Asked], tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """(ids of the answers [B, up to tokens], of a single token also its logits, [B, vocabulary] in a tuple)"""
        contents = [[{"type": "image"}, {"type": "text", "text": one.prompt}] for one in group]
        chats = [[{"role": "user", "content": content}] for content in contents]
        texts = self.processor.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        # A template writes the special tokens itself.
        options = {"padding": True, "add_special_tokens": False, "return_tensors": "pt"}
        inputs = self.processor(text=texts, images=[[one.image] for one in group], **options)
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": tokens}
        options |= {"output_logits": tokens == 1, "return_dict_in_generate": True}
        result = self.model.generate(**inputs.to(self.model.device, self.model.dtype), **options)
        return result.sequences[:, inputs["input_ids"].shape[1] :], result.logits


def _shapes(processor: Any, size: tuple[int, int]) -> tuple:
    processed = processor(Image.new("RGB", size), return_tensors="pt")
    return tuple(sorted((name, part.shape[1:]) for name, part in processed.items() if torch.is_tensor(part)))


class ServerModel:
    """A model by its name on an OpenAI-compatible server, such as vLLM or SGLang, with `batch` requests in flight.

    The environment's OPENAI_API_KEY, if there is one, is sent along.

    Raises:
        UserError: the server has no such model. FailedError: it does not answer.
    """

    def __init__(self, url: str, model: str, batch: int):
        if not url.startswith(("http://", "https://")):
            raise UserError(f"The server {url!r} is no address. Give one such as http://localhost:8000.")
        self.url, self.model, self.batch = url.rstrip("/").removesuffix("/v1") + "/v1", model, batch
        self._pool = ThreadPoolExecutor(batch)
        names = self._request("/models", None, lambda answer: [str(entry["id"]) for entry in answer["data"]])
        if model not in names:
            raise UserError(f"The server {url!r} has no model {model!r}. It has: {', '.join(names)}.")

    def shapes(self, size: tuple[int, int]) -> tuple:
        """Alike for all: the server batches."""
        return ()

    def texts(self, group: Sequence[Asked], max_new_tokens: int) -> list[str]:
        """The answer to each, cut at `max_new_tokens`."""
        options = {"max_tokens": max_new_tokens}
        choices = self._pool.map(lambda one: self._ask(image_url(one.image), one.prompt, options), group)
        return [choice["message"]["content"] or "" for choice in choices]

    def first_tokens(self, image: Image.Image, prompts: Sequence[str]) -> list[Top]:
        """The `TOP` likeliest first tokens of the answer to each prompt. Raises UserError if it does not give them."""
        shown, options = image_url(image), {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        choices = [*self._pool.map(lambda prompt: self._ask(shown, prompt, options), prompts)]
        try:
            tops = [choice["logprobs"]["content"][0]["top_logprobs"] for choice in choices]
            return [[(each["token"], each["logprob"]) for each in top] for top in tops]
        except (LookupError, TypeError):
            raise UserError(
                f"The server {self.url!r} gives no top_logprobs, so p(yes) is not known. vLLM and SGLang give them; "
                "`transformers serve` does not."
            ) from None

    def _ask(self, image: str, prompt: str, options: dict) -> dict:
        """The first choice of the answer."""
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": prompt}]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0} | options
        return self._request("/chat/completions", body, lambda answer: answer["choices"][0])

    def _request(self, path: str, body: dict | None, parse: Callable[[dict], Any]) -> Any:
        """What the server answers; again after `WAITS` where it is busy, cannot be reached, or answers otherwise."""
        headers, content, failure = {"Content-Type": "application/json"}, body and json.dumps(body).encode(), ""
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        for wait in WAITS:
            time.sleep(wait)
            try:
                request = urllib.request.Request(self.url + path, content, headers)
                with urllib.request.urlopen(request, timeout=600) as answer:
                    return parse(json.load(answer))
            except urllib.error.HTTPError as error:
                failure = f"{error.code}, {' '.join(error.read(300).decode(errors='replace').split())}"
                if error.code < 500 and error.code not in (408, 429):
                    hint = " It must give top_logprobs: `transformers serve` refuses them." * ("logprobs" in failure)
                    raise UserError(f"The server {self.url!r} refuses the request: {failure}.{hint}") from None
            except (OSError, ValueError, LookupError, TypeError) as error:
                failure = reason(error)
        raise FailedError(
            f"The server {self.url!r} does not answer after {len(WAITS)} tries: {failure}. Start it, and then the same "
            "command again, which keeps what was answered."
        )


def answers(model: ChatModel | ServerModel, asked: Iterable[Asked], max_new_tokens: int) -> Iterator[tuple[int, str]]:
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
