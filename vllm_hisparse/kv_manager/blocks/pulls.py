"""Requests whose KV is being pulled from prefill instances, some of which may hang."""

from __future__ import annotations

import time
from collections import defaultdict

HUNG_S = 60.0  # seconds without KV from an instance, after which its pulls count as hung


class Pulls:
    """Requests whose KV is being pulled.

    A pull from an instance that hangs does not end. An instance is taken to hang if KV is being pulled from it, and
    none has come for `HUNG_S`. Slow pulls of several requests may end nearly at the same time, so this time is long.
    """

    def __init__(self) -> None:
        self._instances: dict[str, str] = {}  # request id -> prefill instance
        self._requests: dict[str, set[str]] = defaultdict(set)  # prefill instance -> request ids
        self._quiet_since: dict[str, float] = {}  # prefill instance -> when the last KV came, or the first pull began

    def __len__(self) -> int:
        return len(self._instances)

    def begin(self, request_id: str, instance: str) -> None:
        """Record that a pull of a request's KV begins.

        Args:
            request_id: id of the request.
            instance: engine id of the prefill instance.
        """
        if instance not in self._requests:
            self._quiet_since[instance] = time.monotonic()
        self._instances[request_id] = instance
        self._requests[instance].add(request_id)

    def came(self, request_id: str) -> bool:
        """Record that a request's KV has come, or cannot come; return False if it was not being pulled."""
        instance = self.forget(request_id)
        if instance in self._requests:
            self._quiet_since[instance] = time.monotonic()
        return instance is not None

    def forget(self, request_id: str) -> str | None:
        """Forget a request that has ended; return the instance from which its KV was being pulled, if it was."""
        instance = self._instances.pop(request_id, None)
        if instance is not None:
            self._requests[instance].remove(request_id)
            if not self._requests[instance]:
                del self._requests[instance], self._quiet_since[instance]
        return instance

    def num_hung(self) -> int:
        """Return the number of requests whose KV is being pulled from instances that hang."""
        if not self._instances:
            return 0
        latest = time.monotonic() - HUNG_S
        return sum(len(ids) for instance, ids in self._requests.items() if self._quiet_since[instance] <= latest)
