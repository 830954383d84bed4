"""Multimodal models on an OpenAI-compatible server, which are asked about images."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
from PIL import Image

from debias_diffusion.data.bad_records import printable
from debias_diffusion.errors import FailedError, UserError, explain_failure, reason

from .report import image_url

TOP = 20  # tokens whose probability is looked at: the most that OpenAI's interface gives
LEAST = 0.5  # the probability that yes and no must have together
WAITS = (0, 1, 4, 16, 60)  # seconds before each try of a request
PATIENCE, MOST = 600, 8 << 20  # seconds that a whole answer may take, and its bytes
ANSWER = " Please answer yes or no."  # behind each question, as VQAScore asks


def p_yes(choice: dict) -> float | None:
    """The probability of yes among the likeliest first tokens that read yes or no, such as `yes`, ` Yes.` and `ĠYES`.

    None where these have less than `LEAST` of the probability, as of a model that thinks first.

    Args:
        choice: of a server's answer, with top_logprobs.
    """
    sums = {"yes": 0.0, "no": 0.0}
    for each in choice["logprobs"]["content"][0]["top_logprobs"]:
        if (word := re.sub(r"[\WĠĊ]", "", each["token"]).lower()) in sums:  # Ġ and Ċ are byte-level white space
            sums[word] += math.exp(each["logprob"])
    if not (total := sum(sums.values())) < 1.1:  # NaN is not, either
        raise ValueError("no log probabilities")
    return sums["yes"] / total if total >= LEAST else None


def _said(text: str) -> str:
    """What a server says, in a line that can be printed: the message of its error, or the beginning of its text."""
    with suppress(Exception):  # it may have any form
        text = str(json.loads(text)["error"]["message"])
    return printable(" ".join(text[:300].split())) + " ..." * (len(text) > 300)


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
        self._pool, headers = ThreadPoolExecutor(batch), {"Accept-Encoding": "identity"}
        if key := os.environ.get("OPENAI_API_KEY", "").strip():
            headers["Authorization"] = f"Bearer {key}"
        with explain_failure(f"The server {url!r} cannot be asked"):
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, follow_redirects=False)
        names = self._request("/models", None, lambda answer: [str(entry["id"]) for entry in answer["data"]])
        if model not in names:
            raise UserError(f"The server {url!r} has no model {model!r}. It has: {_said(', '.join(names))}.")

    def __call__(self, image: Image.Image, questions: Sequence[str]) -> list[float | None]:
        """p(yes) of each question, see `p_yes`."""
        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        ask = partial(self._ask, image_url(image), options=options, parse=p_yes)
        return [*self._pool.map(ask, [question + ANSWER for question in questions])]

    def _ask(self, image: str, prompt: str, options: dict, parse: Callable[[dict], Any]) -> Any:
        """What `parse` makes of the first choice of the answer."""
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": prompt}]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0} | options
        return self._request("/chat/completions", body, lambda answer: parse(answer["choices"][0]))

    def _request(self, path: str, body: dict | None, parse: Callable[[dict], Any]) -> Any:
        """What `parse` makes of the answer. Raises FailedError if none comes, UserError if it cannot be used."""
        for wait in WAITS:
            time.sleep(wait)
            content, end, status, failure = bytearray(), time.monotonic() + PATIENCE, 0, ""
            try:
                with self._client.stream("POST" if body else "GET", path, json=body) as response:
                    for part in response.iter_raw():
                        content += part
                        if len(content) > MOST or time.monotonic() > end:  # httpx's timeout is that of one part
                            raise ValueError(f"an answer of more than {PATIENCE} seconds or {MOST >> 20} MB")
                said = _said(content.decode(errors="replace") or response.reason_phrase)
                if response.has_redirect_location:  # is not followed, because the key would go along
                    place = _said(str(response.url.join(response.headers["Location"])))
                    said = f"it redirects to {place.removesuffix(path)}. Give that address, if it may have your key"
                status, failure = response.status_code, f"{response.status_code}, {said}"
                if status < 300:
                    return parse(json.loads(content))
            except Exception as error:  # an answer of another form makes the parsing raise almost anything
                failure = failure or reason(error)
            if 0 < status < 500 and status not in (408, 429):
                hint = " A judge needs top_logprobs, which vLLM and llama.cpp's llama-server give."
                hint *= "logprobs" in (body or {})
                raise UserError(f"The server {self.url!r} gives no usable answer: {failure}.{hint}")
        raise FailedError(
            f"The server {self.url!r} does not answer after {len(WAITS)} tries: {failure}. Check that it runs, and "
            "start the same command again, which keeps what was answered."
        )
