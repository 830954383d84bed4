"""What stands before gradio: what the page does not need is closed, and nobody sends more than a request needs."""

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


class Guard:
    """ASGI middleware that refuses uploads and the like, and bodies of more than `MOST_SENT` bytes.

    gradio writes uploads to the disk before anything asks for them, and keeps them. The page sends the little it reads
    of a picture with the request that reads it, so that there is nothing to keep.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
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


def _announced(scope: Scope) -> int:
    """The length that the request says it has; 0 if it does not say."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0
