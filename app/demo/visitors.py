"""Visitors, identified by their address, and the rate of their password guesses."""

import ipaddress
import time
from collections import OrderedDict
from dataclasses import dataclass

MOST_VISITORS = 10_000  # addresses remembered; the least recently used is forgotten first
LONGEST_WAIT = 30.0  # seconds that a login may wait; it is refused if it would have to wait longer
_FORGOTTEN = 900.0  # seconds after which earlier guesses no longer count


def visitor(client: tuple[str, int] | None) -> str:
    """The key under which a visitor's requests are counted: the address, or the /64 network of an IPv6 address.

    Names and sessions chosen by a client do not count: it can choose as many as it likes. Behind a proxy it is the
    address that the proxy forwards, if the server trusts the proxy (see docs/app.md).

    Args:
        client: `client` of an ASGI scope or of a request.
    """
    if not client:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0][:100]
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return str(address.ipv4_mapped or address) if address.version == 6 else str(address)


@dataclass
class _Guesses:
    """Guesses of one visitor, or of all: the first few without delay, then with growing gaps."""

    count: int = 0
    free_at: float = 0.0
    last: float = 0.0

    def wait(self, now: float, at_once: int, longest_gap: float) -> float:
        """Seconds until another guess may be checked; it is counted unless the wait is too long."""
        if now - self.last > _FORGOTTEN:
            self.count, self.free_at = 0, now
        wait = max(0.0, self.free_at - now)
        if wait <= LONGEST_WAIT:
            self.count, self.last = self.count + 1, now
            past = self.count - at_once
            gap = min(longest_gap, 2.0 ** min(past - 1, 10)) if past > 0 else 0.0
            self.free_at = max(now, self.free_at) + gap
        return wait


class Logins:
    """Slows down password guesses, per visitor and in total.

    A visitor's first 5 logins are checked at once; each further one waits 1, 2, 4, ... 30 seconds after the one before.
    After 100 logins of all visitors, each waits a second after the one before. A login that would wait longer than 30
    seconds is refused. The correct password clears its visitor's guesses, and exempts that visitor from the total.
    """

    def __init__(self) -> None:
        self._all = _Guesses()
        self._each: OrderedDict[str, _Guesses] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    def wait(self, name: str, now: float | None = None) -> float:
        """Seconds until a visitor's login may be checked; more than `LONGEST_WAIT` if it is refused.

        Args:
            name: from `visitor`.
            now: seconds of a monotonic clock; the machine's if None.
        """
        now = time.monotonic() if now is None else now
        guesses = self._each.setdefault(name, _Guesses())
        self._each.move_to_end(name)
        _shorten(self._each)
        wait = guesses.wait(now, at_once=5, longest_gap=30.0)
        if wait > LONGEST_WAIT or name in self._known:
            return wait
        return max(wait, self._all.wait(now, at_once=100, longest_gap=1.0))

    def right(self, name: str) -> None:
        """Records that the visitor gave the correct password."""
        if self._each.pop(name, None) is not None and name not in self._known:
            self._all.count = max(0, self._all.count - 1)
        self._known[name] = None
        self._known.move_to_end(name)
        _shorten(self._known)


def _shorten(table: OrderedDict) -> None:
    while len(table) > MOST_VISITORS:
        table.popitem(last=False)
