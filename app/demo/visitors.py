"""Who asks: visitors by their address, and how often one may guess a password."""

import ipaddress
import time
from collections import OrderedDict
from dataclasses import dataclass

MOST_VISITORS = 10_000  # addresses remembered; the one unused for longest is forgotten first
LONGEST_WAIT = 30.0  # seconds that a login waits for its turn; it is refused where it would be more
_FORGOTTEN = 900.0  # seconds after which earlier guesses no longer count


def visitor(client: tuple[str, int] | None) -> str:
    """The name under which requests of one visitor are counted: the address, of IPv6 the network of 64 bits.

    Names and sessions that a client gives itself do not count, because it can give itself as many as it likes. Behind a
    proxy the address is the one that the proxy names, if the server trusts the proxy (see docs/app.md).

    Args:
        client: `client` of an ASGI scope, or of a request.
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
    """Guesses of one visitor, or of all: the first few at once, then each later than the one before."""

    count: int = 0
    free_at: float = 0.0
    last: float = 0.0

    def wait(self, now: float, at_once: int, longest_gap: float) -> float:
        """Seconds until another guess may be looked at; it is counted unless it would wait for too long."""
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
    """Slows those who guess a password, each visitor and all together, and nobody who knows it.

    The first 5 logins of a visitor are looked at when they come. After these, each waits 1, 2, 4, ... 30 seconds after
    the one before. After 100 of all visitors, each waits a second after the one before. A login that would wait for
    more than 30 seconds is refused. The right password clears what its visitor guessed before, and from then on that
    visitor waits for no guesses of others.
    """

    def __init__(self) -> None:
        self._all = _Guesses()
        self._each: OrderedDict[str, _Guesses] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    def wait(self, name: str, now: float | None = None) -> float:
        """Seconds until a login of a visitor may be looked at; more than `LONGEST_WAIT` where it is refused.

        Args:
            name: of `visitor`.
            now: seconds of a clock that only goes forward; the machine's own if None.
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
        """The visitor gave the right password."""
        if self._each.pop(name, None) is not None and name not in self._known:
            self._all.count = max(0, self._all.count - 1)
        self._known[name] = None
        self._known.move_to_end(name)
        _shorten(self._known)


def _shorten(table: OrderedDict) -> None:
    while len(table) > MOST_VISITORS:
        table.popitem(last=False)
