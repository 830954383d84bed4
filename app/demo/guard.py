"""Protects gradio's server: closes what the page does not need, and limits requests, connections and logins."""

import ipaddress
import re
import sys
from html import escape
from inspect import signature
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

from .fair_queue import MOST_NAME, Queue
from .visitors import LONGEST_WAIT, Logins, visitor

MOST_SENT = 4 * 2**20  # bytes of a request: the longest prompts, or the first megabyte of a PNG in base64
INTERNAL_ERROR = "Something went wrong inside the demo. Its console says more."
PATIENCE = 60.0  # seconds that a client may take to send or read another piece
_PIECE = 2**16  # bytes of an answer handed to the connection at once
# Prefixes of gradio's paths that write to the disk, serve files, fetch from elsewhere or edit pages.
_CLOSED = (
    *("upload", "process_recording", "deep_link", "component_server", "stream"),
    *("file=", "file", "proxy=", "run-history", "dev", "vibe-", "undo-vibe-"),
)
# Paths that need no login: the parts of the login page, and the check made when the server starts.
_OPEN = ("/", "/login", "/login/", "/theme.css", "/gradio_api/theme.css", "/favicon.ico", "/manifest.json")
_OPEN += ("/robots.txt", "/gradio_api/startup-events")
_OPEN_FOLDERS = ("/assets/", "/static/", "/svelte/")
_TOO_MUCH = f"A request may have at most {MOST_SENT:,} bytes."
_NOT_LOCAL = "The demo answers only to localhost on its own machine. Start it with another --host to let others in."
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?", re.IGNORECASE)


class Server(App):
    """gradio's server behind a `Guard`, gradio's own middleware included.

    Args:
        local: the host name if only this machine can reach the server; else None.
    """

    def __init__(self, local: str | None):
        handlers = {Exception: _failed, FnIndexInferError: _no_endpoint}
        super().__init__(default_response_class=ORJSONResponse, exception_handlers=handlers)
        self.local = local

    def build_middleware_stack(self) -> ASGIApp:
        return Guard(super().build_middleware_stack(), self, self.local)


def _no_endpoint(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"{reason(error)}. /gradio_api/info lists the endpoints."}, 404)


def _failed(request: Request, error: Exception) -> Response:
    """The answer to a request that made gradio fail, without a traceback: anyone can send any request."""
    missing = isinstance(error, LookupError)
    said = f"There is no {reason(error)}" if missing else f"{type(error).__name__}: {reason(error)}"
    message = f"The request cannot be answered ({said}). /gradio_api/info lists the accepted parameters."
    status = 404 if missing else 400 if isinstance(error, ValueError | TypeError) else 500
    return JSONResponse({"error": message}, status)


class Guard:
    """ASGI middleware that refuses uploads, requests without a login, and bodies of more than `MOST_SENT` bytes.

    gradio would write uploads to the disk at once, and keep them. The page instead sends the first part of a PNG within
    the request that reads it, so nothing is stored.

    If the server has a password, every path but those of the login page needs a login, even where gradio asks for none.
    A client that neither reads nor disconnects, or never sends the body it announced, is cut off after `PATIENCE`
    seconds.

    Args:
        app: the wrapped application.
        server: gradio's application, which holds the logins.
        local: host name of a server that only this machine can reach: only requests to this name or to a loopback
            address pass. This stops DNS rebinding, where another site points its own name to this machine. None: the
            server answers to all names.
    """

    def __init__(self, app: ASGIApp, server: App, local: str | None):
        self.app, self.server, self.local, self.logins = app, server, local, Logins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)  # the demo has none
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
            # starlette re-raises errors that `_failed` has answered; the server would print a traceback.
            said = f"{type(error).__name__}: {reason(error)}"
            print(f"A request to {scope['path'][:200]!r} failed ({said}).", file=sys.stderr)
            await connection.finish()

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that may not pass, else None."""
        if self.local is not None and not _is_local(host_of(scope), self.local):
            return PlainTextResponse(_NOT_LOCAL, 403)
        if _is_closed(scope["path"]):
            return PlainTextResponse("This path is closed.", 403)
        if _announced(scope) > MOST_SENT:
            return PlainTextResponse(_TOO_MUCH, 413)
        path = scope["path"]
        is_open = path in _OPEN or (path.startswith(_OPEN_FOLDERS) and ".." not in path)
        if self.server.auth is not None and not is_open and self._user(scope) is None:
            # gradio's own message, which its page and client understand.
            detail = {"error": "Not authenticated", "auth_message": None}
            return JSONResponse({"detail": detail}, 401)
        return None

    def _user(self, scope: Scope) -> str | None:
        """The logged-in user, by gradio's cookies."""
        cookies = HTTPConnection(scope).cookies
        tokens = (cookies.get(f"access-token{kind}-{self.server.cookie_id}") for kind in ("", "-unsecure"))
        return next((self.server.tokens[token] for token in tokens if token in self.server.tokens), None)

    def _is_login(self, scope: Scope) -> bool:
        return self.server.auth is not None and scope["method"] == "POST" and scope["path"].rstrip("/") == "/login"

    async def _slow(self, scope: Scope) -> Response | None:
        """Waits until a login may be checked; returns a refusal if that takes too long."""
        wait = self.logins.wait(visitor(scope["client"]))
        if wait > LONGEST_WAIT:
            message = f"Too many wrong passwords. Try again in {wait:.0f} seconds."
            return JSONResponse({"detail": message}, 429, {"Retry-After": f"{wait:.0f}"})
        await anyio.sleep(wait)
        return None

    def _logged_in(self, scope: Scope):
        """A callback for the status of an answer, which records successful logins."""

        def see(status: int) -> None:
            if self._is_login(scope) and status == 200:
                self.logins.right(visitor(scope["client"]))

        return see

    def _headers(self, scope: Scope):
        """A callback for the headers of an answer, which removes permissions for other sites (CORS).

        gradio lets every site read answers as the visitor, unless the server is called localhost or 127.0.0.1. Other
        sites may do so only if everyone may: without a password, on a server that others can reach.
        """
        origin = HTTPConnection(scope).headers.get("origin")

        def change(headers: MutableHeaders) -> None:
            if origin is None or (self.local is None and self.server.auth is None):
                return
            name = _origin_host(origin)
            if name != host_of(scope) and not (self.local is not None and _is_local(name, self.local)):
                for header in ("access-control-allow-origin", "access-control-allow-credentials"):
                    if header in headers:
                        del headers[header]

        return change


class _Connection:
    """A connection that limits the size and the delays of a client's requests and reads."""

    def __init__(self, receive: Receive, send: Send, change_headers, see_status):
        self._receive, self._send = receive, send
        self._change_headers, self._see_status = change_headers, see_status
        self._received, self._complete = 0, False  # bytes; whether the body is complete
        self._started, self._ended = False, False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        message = None
        with anyio.move_on_after(PATIENCE):
            message = await self._receive()
        if message is None:
            raise HTTPException(408, f"The request is incomplete, and nothing more came for {PATIENCE:.0f} seconds.")
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
        # In pieces: the server keeps whatever is handed over until the client reads it.
        for start in range(0, max(1, len(body)), _PIECE):
            last = start + _PIECE >= len(body)
            await self._hand_over(message | {"body": body[start : start + _PIECE], "more_body": more or not last})

    async def finish(self) -> None:
        """Ends an answer that has started."""
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
            # Closing the connection frees what uvicorn holds for the client; other servers free it when it closes.
            transport = getattr(getattr(self._send, "__self__", None), "transport", None)
            if transport is not None:
                transport.abort()


def host_of(scope: Scope) -> str | None:
    """The host name of a request, in lower case, without the port; None if it is missing or malformed."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    return _host_name(hosts[0].decode("latin-1")) if len(hosts) == 1 else None


def _host_name(host: str) -> str | None:
    match = _HOST.fullmatch(host)
    if match is None or int(match[3] or 0) > 65535:
        return None
    return (match[1] or match[2]).lower()


def _origin_host(origin: str) -> str | None:
    """The host name of an origin such as http://localhost:7860."""
    try:
        return _host_name(urlsplit(origin).netloc)
    except ValueError:
        return None


def _is_local(name: str | None, host: str) -> bool:
    """Whether a name means this machine wherever it is resolved, or is the host that the server was given."""
    if name is None:
        return False
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name in ("localhost", host.lower())


def _is_closed(path: str) -> bool:
    """Whether a path is closed, with or without the API's prefix."""
    return any(part.lstrip("/").startswith(_CLOSED) for part in (path, path.partition("/gradio_api/")[2]))


def _announced(scope: Scope) -> int:
    """The announced length of a request in bytes; 0 if there is none."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) < 20 else 0


class Blocks(gr.Blocks):
    """gradio's Blocks that fetches no files named in a request, keeps no requests and answers, and explains errors."""

    def queue(self, *arguments, **named):
        super().queue(*arguments, **named)
        queue = self._queue
        self._queue = Queue(
            live_updates=queue.live_updates,
            concurrency_count=queue.max_thread_count,
            update_intervals=queue.update_intervals,
            max_size=queue.max_size,
            blocks=self,
            default_concurrency_limit=queue.default_concurrency_limit,
        )
        return self

    async def process_api(self, **named):
        session = named.get("session_hash") or ""
        if len(session) > MOST_NAME:
            self.state_holder.session_data.pop(session, None)
            self.state_holder.time_last_used.pop(session, None)
            raise gr.Error(f"A session's name may have at most {MOST_NAME} characters.", print_exception=False)
        function = named["block_fn"]
        if function.fn is None:
            raise gr.Error("There is nothing to call: this runs in the browser.", print_exception=False)
        try:
            return await super().process_api(**named)
        except gr.Error:
            raise
        except Exception as error:
            message = INTERNAL_ERROR
            # The page's functions show their errors themselves; gradio would sometimes show a cancelled drawing as one.
            raise gr.Error(message, visible=function.api_visibility == "public") from error

    async def preprocess_data(self, block_fn, inputs, state, *more, **named):
        # gradio would fetch the file, from any address, and write it to the disk.
        if _names_file(inputs):
            raise gr.Error("Files are not accepted.", print_exception=False)
        inputs = _with_defaults(block_fn, inputs)
        try:
            return await super().preprocess_data(block_fn, inputs, state, *more, **named)
        except Exception as error:
            said = error.message if isinstance(error, gr.Error) else reason(error)
            message = f"The data sent cannot be used: {said[:1000].strip()}"
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


def _with_defaults(function: Any, values: Any) -> Any:
    """The values of a call, with the defaults of the last parameters of an endpoint, which a program may leave out."""
    if function.api_visibility != "public" or not isinstance(values, list):
        return values
    left = list(signature(function.fn).parameters.values())[len(values) :]
    return values if any(each.default is each.empty for each in left) else [*values, *(each.default for each in left)]


def _forget(state) -> None:
    """Empties gradio's copy of a visitor's page and images, which it keeps for links that the demo closes."""
    if state is not None:
        state.config_values.clear()
