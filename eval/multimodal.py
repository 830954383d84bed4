"""Multimodal models on an OpenAI-compatible server, which are asked about images."""

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from PIL import Image

from debias_diffusion.errors import FailedError, UserError, reason

from .report import image_url

TOP = 20  # tokens whose probability is looked at: the most that OpenAI's interface gives
WAITS = (0, 1, 4, 16, 60)  # seconds before each try of a request
ANSWER = " Please answer yes or no."  # behind each question, as VQAScore asks


def p_yes(top: Sequence[tuple[str, float]]) -> float | None:
    """The probability of yes among the likeliest first tokens that read yes or no, in whatever case, with or without
    white space; None where there are none.

    Args:
        top: tokens as text, and their log probabilities.
    """
    sums = {"yes": 0.0, "no": 0.0}
    for token, log_probability in top:
        if (word := token.strip().lower()) in sums:
            sums[word] += math.exp(log_probability)
    return sums["yes"] / sum(sums.values()) if any(sums.values()) else None


class ServerModel:
    """A model by its name on an OpenAI-compatible server, such as vLLM or llama.cpp's.

    It judges by the probabilities of its first token, as VQAScore (Lin et al. 2024) asks. The environment's
    OPENAI_API_KEY, if there is one, is sent along.

    Attributes:
        model: its name.
        batch: requests sent at once, and images that may be asked about at once, from threads.

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

    def __call__(self, image: Image.Image, questions: Sequence[str]) -> list[float | None]:
        """p(yes) of each question; None where the model says neither yes nor no.

        Raises UserError if the server does not give the probabilities of tokens.
        """
        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        ask = partial(self._ask, image_url(image), options=options)
        choices = [*self._pool.map(ask, [question + ANSWER for question in questions])]
        try:
            tops = [choice["logprobs"]["content"][0]["top_logprobs"] for choice in choices]
            return [p_yes([(each["token"], float(each["logprob"])) for each in top]) for top in tops]
        except (LookupError, TypeError):
            raise UserError(
                f"The server {self.url!r} gives no top_logprobs, so p(yes) is not known. vLLM and llama.cpp's "
                "llama-server give them; `transformers serve` does not."
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
