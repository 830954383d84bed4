"""Serves the demo, by default to this machine only, without requests to any other server."""

import ipaddress
import os
import socket
import sys

from debias_diffusion.devices import DTYPES, pick_device
from debias_diffusion.errors import UserError, reason

from ..options import AppConfig
from .models import DemoModels

MOST_WAITING = 100  # requests in the queue
PASSWORD = "DEBIAS_DIFFUSION_PASSWORD"  # environment variable
OPEN = "Anyone who can reach this machine can use the demo."
_MOST_PASSWORD = 1000  # characters
_PORTS = 100  # tried in turn


def run_app(config: AppConfig) -> None:
    """Opens the demo and serves it until interrupted.

    Raises:
        UserError: a setting cannot be used.
    """
    page, url = open_app(config)
    print(f"The demo is at {url} (Ctrl+C stops it)", flush=True)
    page.block_thread()


def open_app(config: AppConfig):
    """Opens the demo and returns at once.

    Returns:
        gradio's Blocks, whose `close()` stops the server; its address

    Raises:
        UserError: a setting cannot be used.
    """
    host, password = _check(config)
    port = _free_port(host, config.port)
    # Read when gradio is imported.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    models = DemoModels(config.base, config.encoders, pick_device(config.device), DTYPES.get(config.precision))

    from . import page
    from .guard import Server

    notice = f"{OPEN} It has no password." if _is_open(host, password) else ""
    blocks = page.build(models, MOST_WAITING, config.budget, notice)
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
        raise UserError(f"Cannot listen on {host!r}, port {port} ({reason(error)}). Give another port.") from error
    return blocks, url


def _check(config: AppConfig) -> tuple[str, str | None]:
    """The host without brackets, and the password. Raises UserError for settings that cannot be used."""
    password = _password(config)
    if bool(config.user) != bool(password):
        raise UserError(
            "A user and a password go together. Give both, or neither; the password by --password-file or the "
            f"environment variable {PASSWORD}."
        )
    host = config.host[1:-1] if config.host.startswith("[") and config.host.endswith("]") else config.host
    if not host:
        raise UserError("The host is empty. Give 127.0.0.1 for this machine only, or 0.0.0.0 to let others in.")
    if _is_open(host, password):
        _warn(f"{OPEN} Give --user and a password to restrict access.")
    return host, password


def _warn(message: str) -> None:
    print(f"Warning: {message}", file=sys.stderr, flush=True)


def _password(config: AppConfig) -> str | None:
    if not config.password_file:
        # Without a user the variable may be meant for another run.
        return os.environ.get(PASSWORD) or None if config.user else None
    try:
        with open(config.password_file, encoding="utf-8") as file:
            password = file.readline(_MOST_PASSWORD + 2).rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise UserError(f"The password file {config.password_file!r} cannot be read ({reason(error)}).") from error
    if not 0 < len(password) <= _MOST_PASSWORD:
        raise UserError(
            f"The first line of the password file {config.password_file!r} must be a password of 1 to "
            f"{_MOST_PASSWORD:,} characters, got {len(password):,}."
        )
    return password


def _addresses(host: str) -> list[tuple[int, str]]:
    """Families and addresses of a host name. Raises UserError if there are none."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"The host {host!r} is not an address of this machine ({reason(error)}).") from error
    return [(family, address[0]) for family, _, _, _, address in entries]


def _is_local(host: str) -> bool:
    """Whether only this machine can reach a server on this host."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for _, address in _addresses(host))


def _is_open(host: str, password: str | None) -> bool:
    """Whether others can use the demo without a password."""
    return password is None and not _is_local(host)


def _free_port(host: str, first: int) -> int:
    """The first free port from `first` on."""
    last = min(first + _PORTS, 65536)
    # The server uses the first address of a name; gradio needs the port on 127.0.0.1 as well.
    places = [_addresses(host)[0], (socket.AF_INET, "127.0.0.1")]
    for port in range(first, last):
        if all(_is_free(family, address, port) for family, address in places):
            return port
    raise UserError(f"None of the ports {first} to {last - 1} on {host!r} is free. Give another port or host.")


def _is_free(family: int, address: str, port: int) -> bool:
    try:
        with socket.create_server((address, port), family=family):
            return True
    except OSError:
        return False
