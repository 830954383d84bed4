"""Serves the demo, by default to this machine only, and asks no other server than a judge."""

import os
import re
import sys

from debias_diffusion.errors import UserError, explain_failure

from ..prompt_options import AppConfig

MOST_WAITING = 100  # requests in the queue
MOST_UPLOAD = "32mb"  # more than the largest image has uncompressed
PASSWORD = "DEBIAS_DIFFUSION_PASSWORD"  # environment variable
LOCAL = ("127.0.0.1", "localhost", "::1")


def run_app(config: AppConfig) -> None:
    """Opens the demo and serves it until interrupted."""
    page, url = open_app(config)
    print(f"The demo is at {url} (Ctrl+C stops it)", flush=True)
    page.block_thread()


def open_app(config: AppConfig):
    """Opens the demo and returns at once: gradio's Blocks, whose `close()` stops the server, and its address.

    Raises:
        UserError: a setting cannot be used.
    """
    password = os.environ.get(PASSWORD) if config.user else None  # without a user it may be meant for another run
    if config.user and not password:
        raise UserError(f"A user needs a password: set the environment variable {PASSWORD}, or leave out the user.")
    host = config.host.strip("[]")
    is_open = host not in LOCAL and not password
    notice = "Anyone who can reach this machine can use the demo: it has no password." if is_open else ""
    if is_open:
        print(f"Warning: {notice} Give --user and a password to restrict access.", file=sys.stderr, flush=True)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    from debias_diffusion.devices import DTYPES, pick_device

    from . import page
    from .models import DemoModels

    judge = None
    if config.judge or config.server:
        from debias_diffusion.eval.judge import load_judge
        from debias_diffusion.eval.options import Judging

        judge = load_judge(Judging(judge=config.judge, server=config.server))
    models = DemoModels(config.base, config.encoders, pick_device(config.device), DTYPES.get(config.precision))
    from starlette.middleware import Middleware  # comes with gradio, which is missed first where it is missing
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # A page of another site could otherwise reach a local demo under a name of its own (DNS rebinding).
    hosts = [*LOCAL, "[::1]"] if host in LOCAL else ["*"]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)]
    middleware += [Middleware(refuse_other_sites)] if host in LOCAL else []
    blocks = page.build(models, config.budget, MOST_WAITING, notice, judge)
    advice = "Give another --port, from 1 to 65535, or another --host."
    with explain_failure(f"Cannot listen on host {host!r}, port {config.port}", advice):
        _, url, _ = blocks.launch(
            server_name=f"[{host}]" if ":" in host else host,
            server_port=config.port,
            auth=(config.user, password) if password else None,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            enable_monitoring=False,
            run_history=False,
            max_file_size=MOST_UPLOAD,
            footer_links=["api"],
            theme=page.theme(),
            css=page.STYLE,
            app_kwargs={"middleware": middleware},
        )
    return blocks, url


def refuse_other_sites(app):
    """ASGI middleware that serves this machine's pages and programs, and no page of another site."""
    from starlette.responses import PlainTextResponse

    refusal = PlainTextResponse("Pages of other sites cannot use this demo.", 403)

    async def serve(scope, receive, send):
        refused = scope["type"] != "lifespan" and is_of_other_site(scope.get("method", ""), scope["headers"])
        await (refusal if refused else app)(scope, receive, send)

    return serve


def is_of_other_site(method: str, headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a page of another site has a browser send a request, other than by a link that is followed.

    Only browsers send these headers, and no page can change them. Some send an Origin alone.
    """
    sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}  # names in lower case
    local = r"https?://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?/?"
    origin_is_local = re.fullmatch(local, sent.get("origin", "http://localhost"))
    follows_link = method == "GET" and sent.get("sec-fetch-mode") == "navigate"
    return not origin_is_local or (sent.get("sec-fetch-site") == "cross-site" and not follows_link)
