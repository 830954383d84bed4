"""What stands before gradio: what the page does not need is closed, and nobody sends more than a request needs."""

from typing import Any

import gradio as gr
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_SENT = 4 * 2**20  # bytes of a request: the longest prompts, and the beginning of a PNG in base64
# Beginnings of those of gradio's addresses that write to the disk, give files out, fetch from elsewhere or edit pages.
_CLOSED = (
    *("upload", "process_recording", "deep_link", "component_server", "stream"),
    *("file=", "file", "proxy=", "run-history", "dev", "vibe-", "undo-vibe-"),
)
_TOO_MUCH = f"A request has at most {MOST_SENT:,} bytes here."
LOCAL = (b"localhost", b"127.0.0.1")  # names of a server that only this machine reaches
_NOT_LOCAL = "The demo is for its own machine, as localhost. Start it with another --host to let others in."


class Guard:
    """ASGI middleware that refuses uploads and the like, and bodies of more than `MOST_SENT` bytes.

    gradio writes uploads to the disk before anything asks for them, and keeps them. The page sends the little it reads
    of a picture with the request that reads it, so that there is nothing to keep.

    Args:
        app: what it stands before.
        local: whether only requests that call the server by one of the names in `LOCAL` are let through. A browser on
            this machine sends others where a page from elsewhere has its own name lead to this machine.
    """

    def __init__(self, app: ASGIApp, local: bool):
        self.app, self.local = app, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.local and _host(scope) not in LOCAL:
            await PlainTextResponse(_NOT_LOCAL, 403)(scope, receive, send)
            return
        if _is_closed(scope["path"]):
            await PlainTextResponse("This is closed here.", 403)(scope, receive, send)
            return
        if _announced(scope) > MOST_SENT:
            await PlainTextResponse(_TOO_MUCH, 413)(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MOST_SENT:
                raise HTTPException(413, _TOO_MUCH)
            return message

        await self.app(scope, limited, send)


def _is_closed(path: str) -> bool:
    """Whether it is closed as gradio's own, or as one of its API."""
    return any(its.lstrip("/").startswith(_CLOSED) for its in (path, path.partition("/gradio_api/")[2]))


def _host(scope: Scope) -> bytes:
    """The name by which the server is called, without the port."""
    return dict(scope["headers"]).get(b"host", b"").partition(b":")[0]


def _announced(scope: Scope) -> int:
    """The length that the request says it has; 0 if it does not say."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0


class Blocks(gr.Blocks):
    """gradio's Blocks, that fetches no file which a request names, and keeps nothing of what was asked and shown."""

    async def preprocess_data(self, block_fn, inputs, state, *more, **named):
        # gradio would fetch it, from any address, and write it to the disk.
        if _names_file(inputs):
            raise gr.Error("No files are taken here.", print_exception=False)
        try:
            return await super().preprocess_data(block_fn, inputs, state, *more, **named)
        finally:
            _forget(state)

    async def postprocess_data(self, block_fn, predictions, state):
        try:
            return await super().postprocess_data(block_fn, predictions, state)
        finally:
            _forget(state)


def _names_file(value: Any) -> bool:
    if isinstance(value, dict):
        return {"path", "meta"} <= set(value) or any(map(_names_file, value.values()))
    return isinstance(value, list | tuple) and any(map(_names_file, value))


def _forget(state) -> None:
    """Empties gradio's copy of a visitor's page, with all pictures, which it keeps for links that are closed here."""
    if state is not None:
        state.config_values.clear()
