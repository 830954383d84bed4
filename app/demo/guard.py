"""What stands before gradio: what the page does not need is closed, and nobody sends, holds or guesses too much."""

import ipaddress
import re
import sys
from html import escape
from typing import Any
from urllib.parse import urlsplit

import anyio
import gradio as gr
from gradio.route_utils import FnIndexInferError
from gradio.routes import App, ORJSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from debias_diffusion.errors import reason

from .visitors import LONGEST_WAIT, Logins, visitor
from .waiting import MOST_NAME, Queue

MOST_SENT = 4 * 2**20  # bytes of a request: the longest prompts, and the beginning of a PNG in base64
PATIENCE = 60.0  # seconds that a client may take to send, or to read, another piece
_PIECE = 2**16  # bytes of an answer that are handed to the connection at once
# Beginnings of those of gradio's addresses that write to the disk, give files out, fetch from elsewhere or edit pages.
_CLOSED = (
    *("upload", "process_recording", "deep_link", "component_server", "stream"),
    *("file=", "file", "proxy=", "run-history", "dev", "vibe-", "undo-vibe-"),
)
# What answers without a login: what the page that asks for it is made of, and what opening the server asks for.
_OPEN = ("/", "/login", "/login/", "/theme.css", "/gradio_api/theme.css", "/favicon.ico", "/manifest.json")
_OPEN += ("/robots.txt", "/gradio_api/startup-events")
_OPEN_FOLDERS = ("/assets/", "/static/", "/svelte/")
_TOO_MUCH = f"A request has at most {MOST_SENT:,} bytes here."
_NOT_LOCAL = "The demo is for its own machine, as localhost. Start it with another --host to let others in."
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?", re.IGNORECASE)


class Server(App):
    """gradio's server with a `Guard` before all of it, what gradio itself puts before its pages included.

    Args:
        local: the name of the machine if only it can reach the server; else None.
    """

    def __init__(self, local: str | None):
        handlers = {Exception: _failed, FnIndexInferError: _no_endpoint}
        super().__init__(default_response_class=ORJSONResponse, exception_handlers=handlers)
        self.local = local

    def build_middleware_stack(self) -> ASGIApp:
        return Guard(super().build_middleware_stack(), self, self.local)


def _no_endpoint(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"{reason(error)}. See /gradio_api/info for what there is."}, 404)


def _failed(request: Request, error: Exception) -> Response:
    """What a request causes that gradio does not expect: without a traceback, because anybody can send any request."""
    missing = isinstance(error, LookupError)
    said = f"There is no {reason(error)}" if missing else f"{type(error).__name__}: {reason(error)}"
    message = f"The request cannot be answered ({said}). See /gradio_api/info for what is accepted."
    status = 404 if missing else 400 if isinstance(error, ValueError | TypeError) else 500
    return JSONResponse({"error": message}, status)


class Guard:
    """ASGI middleware that refuses uploads and the like, strangers, and bodies of more than `MOST_SENT` bytes.

    gradio writes uploads to the disk before anything asks for them, and keeps them. The page sends the little it reads
    of a picture with the request that reads it, so that there is nothing to keep.

    Where the server has a password, everything but the page that asks for it needs a login, whatever gradio thinks of
    it. A client that neither reads nor goes, or never sends what it has announced, is cut off after `PATIENCE` seconds.

    Args:
        app: what it stands before.
        server: gradio's application, which knows who has logged in.
        local: name of a server that only this machine reaches: only requests that call it so, or by a loopback address,
            are let through. A browser on this machine sends others where a page from elsewhere has its own name lead to
            this machine. None: the server answers to all names.
    """

    def __init__(self, app: ASGIApp, server: App, local: str | None):
        self.app, self.server, self.local, self.logins = app, server, local, Logins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)  # nothing here has one
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None and self._is_login(scope):
            refusal = await self._slow(scope)
        connection = _Connection(receive, send, self._headers(scope), self._logged_in(scope))
        if refusal is not None:
            await refusal(scope, receive, connection.send)
            return
        try:
            await self.app(scope, connection.receive, connection.send)
        except Exception as error:
            # starlette raises again what `_failed` has answered, and the server would print it with a traceback.
            said = f"{type(error).__name__}: {reason(error)}"
            print(f"A request to {scope['path'][:200]!r} failed ({said}).", file=sys.stderr)
            await connection.finish()

    def _refusal(self, scope: Scope) -> Response | None:
        """What is answered to what may not pass."""
        if self.local is not None and not _is_local(host_of(scope), self.local):
            return PlainTextResponse(_NOT_LOCAL, 403)
        if _is_closed(scope["path"]):
            return PlainTextResponse("This is closed here.", 403)
        if _announced(scope) > MOST_SENT:
            return PlainTextResponse(_TOO_MUCH, 413)
        path = scope["path"]
        is_open = path in _OPEN or (path.startswith(_OPEN_FOLDERS) and ".." not in path)
        if self.server.auth is not None and not is_open and self._user(scope) is None:
            # In gradio's words, which its page and its client know.
            detail = {"error": "Not authenticated", "auth_message": None}
            return JSONResponse({"detail": detail}, 401)
        return None

    def _user(self, scope: Scope) -> str | None:
        """Who has logged in, by the cookies that gradio gave out."""
        cookies = HTTPConnection(scope).cookies
        names = (f"access-token-{self.server.cookie_id}", f"access-token-unsecure-{self.server.cookie_id}")
        return next((self.server.tokens[cookies[its]] for its in names if cookies.get(its) in self.server.tokens), None)

    def _is_login(self, scope: Scope) -> bool:
        return self.server.auth is not None and scope["method"] == "POST" and scope["path"].rstrip("/") == "/login"

    async def _slow(self, scope: Scope) -> Response | None:
        """Waits until a login may be looked at; what is answered where that takes too long."""
        wait = self.logins.wait(visitor(scope["client"]))
        if wait > LONGEST_WAIT:
            message = f"There were too many wrong passwords. Try again in {wait:.0f} seconds."
            return JSONResponse({"detail": message}, 429, {"Retry-After": f"{wait:.0f}"})
        await anyio.sleep(wait)
        return None

    def _logged_in(self, scope: Scope):
        """Called with the status of an answer: what follows from it for those who log in."""

        def see(status: int) -> None:
            if self._is_login(scope) and status == 200:
                self.logins.right(visitor(scope["client"]))

        return see

    def _headers(self, scope: Scope):
        """Called with the headers of an answer: takes out what lets other sites read it in a visitor's browser.

        gradio lets every site read, as the visitor, unless it is called localhost or 127.0.0.1. Sites of others may
        where everybody may, which is where there is neither a password nor a server for this machine alone.
        """
        origin = HTTPConnection(scope).headers.get("origin")

        def change(headers: MutableHeaders) -> None:
            if origin is None or (self.local is None and self.server.auth is None):
                return
            name = _name_of(origin)
            if name != host_of(scope) and not (self.local is not None and _is_local(name, self.local)):
                for header in ("access-control-allow-origin", "access-control-allow-credentials"):
                    if header in headers:
                        del headers[header]

        return change


class _Connection:
    """What a client sends and reads, neither too much nor too slowly."""

    def __init__(self, receive: Receive, send: Send, change_headers, see_status):
        self._receive, self._send = receive, send
        self._change_headers, self._see_status = change_headers, see_status
        self._received, self._complete = 0, False  # bytes; whether the client has sent all
        self._started, self._ended = False, False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        message = None
        with anyio.move_on_after(PATIENCE):
            message = await self._receive()
        if message is None:
            raise HTTPException(408, f"Nothing came for {PATIENCE:.0f} seconds, and the request is not complete.")
        self._received += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._received > MOST_SENT:
            raise HTTPException(413, _TOO_MUCH)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._change_headers(MutableHeaders(scope=message))
            self._see_status(message["status"])
            await self._hand_over(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        # In pieces: what is handed over at once is kept, however long it is, until the client reads it.
        for start in range(0, max(1, len(body)), _PIECE):
            last = start + _PIECE >= len(body)
            await self._hand_over(message | {"body": body[start : start + _PIECE], "more_body": more or not last})

    async def finish(self) -> None:
        """Ends an answer that has begun."""
        if self._started:
            await self._hand_over({"type": "http.response.body", "body": b"", "more_body": False})

    async def _hand_over(self, message: Message) -> None:
        if self._ended:
            return
        self._ended = message["type"] == "http.response.body" and not message["more_body"]
        with anyio.move_on_after(PATIENCE) as patience:
            await self._send(message)
        if patience.cancelled_caught:
            self._ended = True
            # What uvicorn holds for the client goes with the connection; of other servers it stays until it closes.
            transport = getattr(getattr(self._send, "__self__", None), "transport", None)
            if transport is not None:
                transport.abort()


def host_of(scope: Scope) -> str | None:
    """The name by which the server is called, in lower case, without the port; None if it is not said, or oddly."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    return _host_name(hosts[0].decode("latin-1")) if len(hosts) == 1 else None


def _host_name(host: str) -> str | None:
    found = _HOST.fullmatch(host)
    if found is None or int(found[3] or 0) > 65535:
        return None
    return (found[1] or found[2]).lower()


def _name_of(origin: str) -> str | None:
    """The name in an origin, such as http://localhost:7860."""
    try:
        return _host_name(urlsplit(origin).netloc)
    except ValueError:
        return None


def _is_local(name: str | None, own: str) -> bool:
    """Whether a name leads to this machine wherever it is looked up, or is the one that the server was given."""
    if name is None:
        return False
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name in ("localhost", own.lower())


def _is_closed(path: str) -> bool:
    """Whether it is closed as gradio's own, or as one of its API."""
    return any(its.lstrip("/").startswith(_CLOSED) for its in (path, path.partition("/gradio_api/")[2]))


def _announced(scope: Scope) -> int:
    """The length that the request says it has; 0 if it does not say."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) < 20 else 0


class Blocks(gr.Blocks):
    """gradio's Blocks, that fetches no file which a request names, keeps nothing of what was asked and shown, and says
    what is wrong with a request."""

    def queue(self, *arguments, **named):
        super().queue(*arguments, **named)
        own = self._queue
        self._queue = Queue(
            live_updates=own.live_updates,
            concurrency_count=own.max_thread_count,
            update_intervals=own.update_intervals,
            max_size=own.max_size,
            blocks=self,
            default_concurrency_limit=own.default_concurrency_limit,
        )
        return self

    async def process_api(self, **named):
        session = named.get("session_hash") or ""
        if len(session) > MOST_NAME:
            self.state_holder.session_data.pop(session, None)
            self.state_holder.time_last_used.pop(session, None)
            raise gr.Error(f"A session's name has at most {MOST_NAME} characters here.", print_exception=False)
        function = named["block_fn"]
        if function.fn is None:
            raise gr.Error("There is nothing to call: the page does this itself.", print_exception=False)
        try:
            return await super().process_api(**named)
        except gr.Error:
            raise
        except Exception as error:
            message = "Something went wrong that should not; the console of the demo says more."
            # The page's own functions show what is wrong; besides, gradio would at times show a drawing's end as this.
            raise gr.Error(message, visible=function.api_visibility == "public") from error

    async def preprocess_data(self, block_fn, inputs, state, *more, **named):
        # gradio would fetch it, from any address, and write it to the disk.
        if _names_file(inputs):
            raise gr.Error("No files are taken here.", print_exception=False)
        try:
            return await super().preprocess_data(block_fn, inputs, state, *more, **named)
        except Exception as error:
            said = error.message if isinstance(error, gr.Error) else reason(error)
            message = f"What was sent cannot be used: {said[:1000].strip()}"
            raise gr.Error(escape(message, quote=False), print_exception=False) from None
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
