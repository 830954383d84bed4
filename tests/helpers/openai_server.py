"""An HTTP server of one tiny multimodal model, with OpenAI's chat completions and log probabilities."""

import base64
import io
import json
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from PIL import Image

MODEL = "tiny"


def serve(model, processor, failures=()):
    """As `serve_replies`, with the likeliest first tokens of a model."""

    def top(picture, prompt, body):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        chat = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=chat, images=picture, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            best = model(**inputs).logits[0, -1].log_softmax(-1).topk(body.get("top_logprobs", 1))
        words = [processor.tokenizer.decode([index]) for index in best.indices.tolist()]
        return [{"token": word, "logprob": value} for word, value in zip(words, best.values.tolist(), strict=True)]

    return serve_replies(top, failures)


@contextmanager
def serve_replies(reply=None, failures=(), parts=()):
    """Yields (address, requests so far). Requests fail first with the codes of `failures`, one after the other.

    Args:
        reply: (image, prompt, request) to the tokens that may come first, the likeliest first; it is the whole answer.
        parts: bytes that are sent in place of every answer, one after the other.
    """
    requests, failures, lock = [], [*failures], threading.Lock()

    def replied(body):
        image, text = body["messages"][0]["content"]
        content = base64.b64decode(image["image_url"]["url"].partition(",")[2])
        return reply(Image.open(io.BytesIO(content)).convert("RGB"), text["text"], body)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, {"data": [{"id": MODEL}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append(body)
                code = failures.pop(0) if failures else 200
                found = replied(body) if reply and code == 200 else None
            message, logprobs = {"content": found and found[0]["token"]}, {"content": [{"top_logprobs": found}]}
            self.answer(code, {"choices": [{"message": message, "logprobs": logprobs}]})

        def answer(self, code, content):
            if not parts:
                self.send_response(code)
                self.end_headers()
            with suppress(OSError):  # the client has enough
                for part in parts or [json.dumps(content).encode()]:
                    self.wfile.write(part)
                    time.sleep(0.001)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
