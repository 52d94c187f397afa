"""Leases: the time for which a prefill instance certainly keeps a prompt's KV.

vLLM's prefill side frees a prompt's blocks when their lease ends, whether they have been pulled or not, and does not
tell the decode side. A lease lasts `kv_lease_duration` from the end of the prefill. Each heartbeat that arrives while
it lasts makes it last at least two thirds of that time from then on. Nothing is acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vllm_hisparse.kv_manager.metadata import LeaseTerms

DEFAULT_LEASE_S = 30  # the default of vLLM's NIXL connector
# Largest margin before the end of a lease: a heartbeat takes time to reach the prefill instance, and two clocks differ.
MARGIN_S = 1.0


@dataclass
class _Pull:
    """A pull that has begun and not yet ended. Times are as in `Leases`.

    Attributes:
        key: engine id and request id of the prefill side.
        latest_start: time at which the lease had begun already.
        lease_s: duration of the lease in seconds.
        stated_end: end of the lease without heartbeats, as the prefill instance has stated it; None: not stated.
    """

    key: tuple[str, str]
    latest_start: float
    lease_s: float
    stated_end: float | None = None


class Leases:
    """The leases of one rank's pulls. All times are this process's `time.perf_counter`, in seconds."""

    def __init__(self) -> None:
        self._heartbeats: dict[tuple[str, str], list[float]] = {}
        self._pulls: dict[str, _Pull] = {}

    def heartbeats_sent(self, engine_id: str, remote_request_ids: Collection[str], sent_at: float) -> None:
        """Record heartbeats that have been sent to all ranks of a prefill instance, at `sent_at` or later."""
        for name in remote_request_ids:
            self._heartbeats.setdefault((engine_id, name), []).append(sent_at)

    def keep(self, waiting: Mapping[str, Collection[str]]) -> None:
        """Forget the heartbeats of all transfers except `waiting`: engine id -> request ids of the prefill side."""
        keys = {(engine_id, name) for engine_id, names in waiting.items() for name in names}
        self._heartbeats = {key: times for key, times in self._heartbeats.items() if key in keys}

    def begin(self, request_id: str, engine_id: str, remote_request_id: str, terms: LeaseTerms) -> None:
        """Record that a request is about to pull."""
        latest_start = time.perf_counter() - terms.age_s
        self._pulls[request_id] = _Pull((engine_id, remote_request_id), latest_start, terms.lease_s)

    def state_end(self, request_id: str, end: float) -> None:
        """Record when a pull's lease ends unless heartbeats renew it, as the prefill instance has stated it."""
        self._pulls[request_id].stated_end = end

    def is_over(self, request_id: str) -> bool:
        """Return True if the lease of a pull may have ended; False for a request that does not pull."""
        pull = self._pulls.get(request_id)
        if pull is None:
            return False
        margin = min(MARGIN_S, pull.lease_s / 10)
        # NOTE: if the prefill instance states no end, the lease is assumed to have begun when the request arrived.
        end = pull.latest_start + pull.lease_s if pull.stated_end is None else pull.stated_end
        for sent_at in self._heartbeats.get(pull.key, ()):
            if sent_at < end - margin:
                end = max(end, sent_at + pull.lease_s * 2 // 3)
        return time.perf_counter() >= end - margin

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when nothing is pulled, but is not; an empty dict if all is well."""
        return {"pulls": self._pulls} if self._pulls else {}

    def end(self, request_id: str) -> None:
        """Forget a request whose pull has ended or will not begin."""
        self._pulls.pop(request_id, None)
