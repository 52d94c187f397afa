"""The line that the decode engine logs about a finished request.

This module does not import vLLM, because the demo reads the lines back.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True)
class RequestLine:
    """One finished request.

    Attributes:
        request_id: the engine's id of the request.
        prompt_tokens: tokens of the prompt, earlier turns included.
        hits, misses: selected rows that were hot when a decode step selected them, and rows that were not; summed over
            layers.
        transfer_bytes_to_host, transfer_bytes_to_device: bytes received from a prefill instance.
    """

    request_id: str
    prompt_tokens: int
    hits: int
    misses: int
    transfer_bytes_to_host: int
    transfer_bytes_to_device: int

    def __str__(self) -> str:
        request_id, *numbers = astuple(self)
        counts = ", ".join(f"{name}={number}" for name, number in zip(_NUMBERS, numbers, strict=True))
        return f"{_PREFIX} {request_id}: {counts}"

    @classmethod
    def find_all(cls, log: str) -> list[RequestLine]:
        """Find all such lines of a log, in order."""
        return [cls(request_id, *map(int, numbers)) for request_id, *numbers in _PATTERN.findall(log)]


_PREFIX = "HiSparse request"
_NUMBERS = [field.name for field in fields(RequestLine)[1:]]
_PATTERN = re.compile(rf"{_PREFIX} (\S+): " + ", ".join(rf"{name}=(\d+)" for name in _NUMBERS))
