"""Serves the demo: to this machine only, unless told otherwise, and without asking any other for anything."""

import os
import socket
from dataclasses import dataclass, field
from typing import Literal

import torch

from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError

from .models import Models

MOST_WAITING = 100  # requests in the queue
_PORTS = 100  # tried one after the other


@dataclass
class AppConfig:
    """What the demo draws and reads with, and who can reach it.

    Attributes:
        base: SDXL folder in diffusers' layout, a hub id, or toy/sdxl, which is embedded.
        encoders: Text encoders to compare, up to four: folders written by `export`, any transformers CLIPTextModel
            folder, toy/clip, toy/long-clip, toy/debias-clip, or original, the base's own.
        host: Address to listen at. The default is this machine only; 0.0.0.0 lets others in.
        port: Port to listen at, or the next one that is free.
        user: Name that a visitor has to give, with a password.
        password: The password that goes with it.
        device: cpu, cuda, cuda:1, mps; the fastest there is if not given.
        dtype: Precision of the models; float16 on an accelerator and float32 on the CPU if not given.
    """

    base: str = "toy/sdxl"
    encoders: list[str] = field(default_factory=lambda: ["toy/clip", "toy/long-clip", "toy/debias-clip"])
    host: str = "127.0.0.1"
    port: int = 7860
    user: str | None = None
    password: str | None = None
    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None


def run_app(config: AppConfig) -> None:
    """Opens the demo and serves it until it is interrupted.

    Raises:
        UserError: a setting cannot be used.
    """
    page, url = open_app(config)
    print(f"The demo is at {url} (Ctrl+C ends it)", flush=True)
    page.block_thread()


def open_app(config: AppConfig):
    """Opens the demo, and returns at once.

    Returns:
        gradio's Blocks, whose `close()` ends it; its address

    Raises:
        UserError: a setting cannot be used.
    """
    _check(config)
    port = _free_port(config.host, config.port)
    # Read when gradio is imported.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    dtype = getattr(torch, config.dtype) if config.dtype else None
    models = Models(config.base, config.encoders, pick_device(config.device), dtype)
    from starlette.middleware import Middleware

    from . import page
    from .guard import LOCAL, Guard

    blocks = page.build(models, MOST_WAITING)
    _, url, _ = blocks.launch(
        server_name=config.host,
        server_port=port,
        auth=(config.user, config.password) if config.user else None,
        share=False,
        quiet=True,
        inbrowser=False,
        prevent_thread_lock=True,
        ssr_mode=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=["api"],
        state_session_capacity=1000,
        theme=page.theme(),
        css=page.STYLE,
        head=f"<script>{page.SCRIPT}</script>",
        app_kwargs={"middleware": [Middleware(Guard, local=config.host.encode() in LOCAL)]},
    )
    return blocks, url


def _check(config: AppConfig) -> None:
    if bool(config.user) != bool(config.password):
        raise UserError("A user and a password go together. Give both, or neither.")
    if not 1 <= config.port <= 65535:
        raise UserError(f"The port must be from 1 to 65535, got {config.port}.")


def _free_port(host: str, first: int) -> int:
    """The first port from `first` on that nothing listens at."""
    last = min(first + _PORTS, 65536)
    for port in range(first, last):
        try:
            with socket.create_server((host, port)):
                return port
        except socket.gaierror as error:
            raise UserError(f"The host {host!r} is no address of this machine ({error.strerror}).") from error
        except OSError:
            continue
    raise UserError(
        f"None of the ports {first} to {last - 1} can be listened at on {host!r}. Give another port or host."
    )
