"""Addresses of the decode instances whose host pools may hold a prefix."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from vllm.logger import init_logger

RESOLVE_S = 15.0  # seconds between two resolutions of a name, because replicas come and go

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


class Peers:
    """Resolves names of peers in the background, and leaves out this instance itself.

    A name that cannot be resolved keeps its addresses, because a resolver may fail while the peers are well. Peers that
    are gone do not answer, so they are soon asked rarely.

    Args:
        names: host:port of each peer; a name may stand for several addresses.
        own: host and port of this instance.
    """

    def __init__(self, names: Sequence[str], own: tuple[str, int]):
        self.names, self.own = names, own
        self._known: dict[tuple[str, int], list[tuple[str, int]]] = {}  # host and port -> addresses
        self._unknown: set[tuple[str, int]] = set()  # hosts and ports that a warning has named
        self._resolved_at = 0.0
        self._addresses: list[tuple[str, int]] = []
        self._thread: threading.Thread | None = None
        self._update()

    def addresses(self) -> list[tuple[str, int]]:
        """Return host and port of each peer that has been resolved so far. Never waits."""
        is_old = time.monotonic() - self._resolved_at > RESOLVE_S
        if is_old and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._update, name="hisparse_tier_peers", daemon=True)
            self._thread.start()
        return self._addresses

    def _update(self) -> None:
        found: dict[tuple[str, int], None] = {}
        for name in self.names:
            host, _, port = name.rpartition(":")
            found |= dict.fromkeys(self._resolve(host, int(port)))
        own = {self.own, *self._resolve(*self.own)}
        self._addresses = [address for address in found if address not in own]
        self._resolved_at = time.monotonic()

    def _resolve(self, host: str, port: int) -> list[tuple[str, int]]:
        """Return the addresses that a name stands for, or has stood for if it cannot be resolved now."""
        name = host, port
        try:
            infos = socket.getaddrinfo(*name, socket.AF_INET, socket.SOCK_STREAM)
            self._known[name] = [(str(address[0]), int(address[1])) for *_, address in infos]
            self._unknown.discard(name)
        except OSError as error:
            if name not in self._unknown:
                kind = "This instance" if name == self.own else "Peer"
                logger.warning("%s %s:%d is not known: %s", kind, host, port, error)
            self._unknown.add(name)
        return self._known.get(name, [])
