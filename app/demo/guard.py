"""What stands before gradio: nothing is uploaded, and nobody sends more than any request here needs."""

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_SENT = 4 * 2**20  # bytes of a request: the longest prompts, and the beginning of a PNG in base64


class Guard:
    """ASGI middleware that refuses uploads, and bodies of more than `MOST_SENT` bytes.

    gradio writes uploads to the disk before anything asks for them, and keeps them. The page sends the little it reads
    of a picture with the request that reads it, so that there is nothing to keep.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if "upload" in scope["path"].strip("/").split("/"):
            await PlainTextResponse("Files cannot be uploaded here.", 403)(scope, receive, send)
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


_TOO_MUCH = f"A request has at most {MOST_SENT:,} bytes here."


def _announced(scope: Scope) -> int:
    """The length that the request says it has; 0 if it does not say."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0
