"""Serves the demo: to this machine only, unless told otherwise, and without asking any other for anything."""

import ipaddress
import os
import socket
import sys
from dataclasses import dataclass, field
from typing import Literal

import torch

from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError, reason

from .models import Models
from .requests import BUDGET

MOST_WAITING = 100  # requests in the queue
PASSWORD = "DEBIAS_DIFFUSION_PASSWORD"  # environment variable
_MOST_PASSWORD = 1000  # characters
_PORTS = 100  # tried one after the other


@dataclass
class AppConfig:
    """What the demo draws and reads with, and who can reach it.

    Attributes:
        base: SDXL folder in diffusers' layout, a hub id, or toy/sdxl, which is embedded.
        encoders: Text encoders to compare, up to four: folders written by `export`, any transformers CLIPTextModel
            folder, toy/clip, toy/long-clip, toy/debias-clip, or original, the base's own.
        host: Address to listen at. The default is this machine only; 0.0.0.0 or :: lets others in.
        port: Port to listen at, or the next one that is free.
        user: Name that a visitor has to give, with a password.
        password: The password that goes with it. Others on this machine can read it in the list of processes; a
            password_file or the environment variable DEBIAS_DIFFUSION_PASSWORD keeps it from them.
        password_file: File whose first line is the password.
        budget: Denoising steps that one request may take, of all its images and encoders together. Images larger than
            the SDXL checkpoint's own, and prompts longer than the longest encoder reads at once, count more.
        device: cpu, cuda, cuda:1, mps; the fastest there is if not given.
        dtype: Precision of the models; float16 on an accelerator and float32 on the CPU if not given.
    """

    base: str = "toy/sdxl"
    encoders: list[str] = field(default_factory=lambda: ["toy/clip", "toy/long-clip", "toy/debias-clip"])
    host: str = "127.0.0.1"
    port: int = 7860
    user: str | None = None
    password: str | None = None
    password_file: str | None = None
    budget: int = BUDGET
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
    host, password = _check(config)
    port = _free_port(host, config.port)
    # Read when gradio is imported.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    dtype = getattr(torch, config.dtype) if config.dtype else None
    models = Models(config.base, config.encoders, pick_device(config.device), dtype)

    from . import page
    from .guard import Server

    blocks = page.build(models, MOST_WAITING, config.budget)
    try:
        _, url, _ = blocks.launch(
            server_name=f"[{host}]" if ":" in host else host,
            server_port=port,
            auth=(config.user, password) if config.user else None,
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
            _app=Server(local=host if _is_local(host) else None),
        )
    except OSError as error:
        raise UserError(f"Nothing can listen at {host!r}, port {port} ({reason(error)}). Give another port.") from error
    return blocks, url


def _check(config: AppConfig) -> tuple[str, str | None]:
    """The host without brackets, and the password. Raises UserError for settings that cannot be used."""
    password = _password(config)
    if bool(config.user) != bool(password):
        raise UserError(
            f"A user and a password go together. Give both, or neither; the password as --password-file, --password or "
            f"in the environment variable {PASSWORD}."
        )
    if not 1 <= config.port <= 65535:
        raise UserError(f"The port must be from 1 to 65535, got {config.port}.")
    if config.budget < 1:
        raise UserError(f"The budget must be at least 1 step, got {config.budget}.")
    host = config.host[1:-1] if config.host.startswith("[") and config.host.endswith("]") else config.host
    if not host:
        raise UserError("The host is empty. Give 127.0.0.1 for this machine only, or 0.0.0.0 to let others in.")
    if password is None and not _is_local(host):
        _warn("Whoever can reach this machine can use the demo. Give --user and a password to let in only some.")
    if config.password and any(config.password in argument for argument in sys.argv):
        _warn(
            f"Others on this machine can see the password in the list of processes. Use --password-file or {PASSWORD}."
        )
    return host, password


def _warn(message: str) -> None:
    print(f"Warning: {message}", file=sys.stderr, flush=True)


def _password(config: AppConfig) -> str | None:
    if config.password and config.password_file:
        raise UserError("There are a password and a password file. Give one of them.")
    if config.password or not config.password_file:
        # Without a user the variable may be there for another run.
        return config.password or (os.environ.get(PASSWORD) or None if config.user else None)
    try:
        with open(config.password_file, encoding="utf-8") as file:
            password = file.readline(_MOST_PASSWORD + 2).rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise UserError(f"The password file {config.password_file!r} cannot be read ({reason(error)}).") from error
    if not 0 < len(password) <= _MOST_PASSWORD:
        raise UserError(
            f"The first line of the password file {config.password_file!r} must be a password of 1 to "
            f"{_MOST_PASSWORD:,} characters, and has {len(password):,}."
        )
    return password


def _addresses(host: str) -> list[tuple[int, str]]:
    """Families and addresses that a host's name stands for. Raises UserError for none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"The host {host!r} is no address of this machine ({reason(error)}).") from error
    return [(family, address[0]) for family, _, _, _, address in found]


def _is_local(host: str) -> bool:
    """Whether only this machine reaches a server there."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for _, address in _addresses(host))


def _free_port(host: str, first: int) -> int:
    """The first port from `first` on that nothing listens at."""
    last = min(first + _PORTS, 65536)
    # Of a name that stands for several addresses the server takes the first; gradio wants the port here as well.
    places = [_addresses(host)[0], (socket.AF_INET, "127.0.0.1")]
    for port in range(first, last):
        if all(_is_free(family, address, port) for family, address in places):
            return port
    raise UserError(
        f"None of the ports {first} to {last - 1} can be listened at on {host!r}. Give another port or host."
    )


def _is_free(family: int, address: str, port: int) -> bool:
    try:
        with socket.create_server((address, port), family=family):
            return True
    except OSError:
        return False
