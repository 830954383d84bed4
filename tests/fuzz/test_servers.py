"""Answers of a server that is asked to judge and to describe: of any form, and damaged."""

import json

from helpers import openai_server
from helpers.fuzzing import fuzz, no_hang
from helpers.mutations import ODD_VALUES, damaged_bytes
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.eval import multimodal
from research.synthesize.command import Captioner

ODD = st.sampled_from(ODD_VALUES)
TOKEN = st.fixed_dictionaries({"token": st.sampled_from(("Yes", "no")) | ODD, "logprob": st.floats(-9, 0) | ODD})
LOGPROBS = st.fixed_dictionaries({"content": st.tuples(st.fixed_dictionaries({"top_logprobs": st.lists(TOKEN) | ODD}))})
CHOICE = st.fixed_dictionaries({"message": st.fixed_dictionaries({"content": ODD}) | ODD, "logprobs": LOGPROBS | ODD})


def test_an_answer_is_read_or_told(monkeypatch):
    monkeypatch.setattr(multimodal, "WAITS", (0,))
    parts, image = [b""], Image.new("RGB", (8, 8))

    @given(CHOICE | ODD, st.booleans(), st.data())
    def search(choice, captions, data):
        answer = json.dumps({"data": [{"id": openai_server.MODEL}], "choices": [choice]}).encode()
        whole = b"HTTP/1.1 200 OK\r\n\r\n" + answer
        parts[0] = data.draw(st.just(whole) | damaged_bytes(whole))
        try:
            with no_hang():
                model = Captioner(url, openai_server.MODEL, 1)
                [found] = model.describe([(image, "?")], 9) if captions else model(image, ["?"])
            assert isinstance(found, str) if captions else found is None or 0 <= found <= 1
        except UserError as told:
            assert str(told).isprintable()

    with openai_server.serve_replies(parts=parts) as (url, _):
        fuzz(search, seconds=4, count=100)
