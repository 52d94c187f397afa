"""A trace is the record of the positions that the layers of a model selected in each step. This is its file format.

A file has three parts:

1. a line of ASCII: `vllm-hisparse trace 1`;
2. a line of JSON, the header: `model`, `top_k`, `row_bytes`, `layers` (names), `group_ends`, `delta_bytes` (2 or 4) and
`requests`, each `{"first_position": ..., "num_steps": ...}`;
3. the selections of all requests, compressed as one zlib stream.

**Groups.** The positions of a step are ranked, best first, and the ranks are divided into groups that end at
`group_ends`; `top_k` is one of these ends. With `[256, 320, 512]` and a top-k of 256, the first group is the selection,
the next group has the 64 best positions that were not selected, and the last group has the 192 after them. A trace with
selections only has one group, `[top_k]`. Ranks within a group are not kept: its positions are in ascending order.

**Deltas.** A position is stored as its distance from the position before it in its group; the first one is stored as
its distance from -1. A 0 therefore means "no position"; such entries are at the end of a group. A request is a tensor
[layers, steps, ranks] of unsigned integers of `delta_bytes` bytes: first the lowest byte of every element, then the
next byte of every element, and so on.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

FIRST_LINE = b"vllm-hisparse trace 1\n"
REMEDY = "record one with `vllm-hisparse trace record` or the option selection_trace_dir"
SHARED = ("model", "top_k", "row_bytes", "layers", "group_ends")  # attributes that joined traces have in common
COMPRESSION = 6  # level of zlib; level 9 takes 8 times as long for files that are 3% smaller
MAX_HEADER_BYTES = 1 << 20
MAX_POSITIONS = 1 << 31  # positions of a file; a header with a larger number counts as damaged
MAX_TOKENS = 1 << 24  # tokens of a request; the same


class TraceError(ValueError):
    """A trace, or its file, is not valid."""


@dataclass(frozen=True)
class RequestTrace:
    """Steps of one request.

    Attributes:
        first_position: newest position in step 0; in step s it is `first_position + s`.
        positions: [layers, steps, ranks] int32, ascending within a group; -1 for no position, at the end of a group.
    """

    first_position: int
    positions: np.ndarray

    @property
    def num_steps(self) -> int:
        return self.positions.shape[1]


@dataclass(frozen=True)
class Trace:
    """Selections of some requests; the constructor checks them.

    Attributes:
        model: name of the model.
        top_k: positions of a selection.
        row_bytes: bytes of one position's KV in one layer.
        layers: name of each layer.
        group_ends: ranks at which the groups of a step end, ascending; one of them is `top_k`.
        requests: steps of each request.
    """

    model: str
    top_k: int
    row_bytes: int
    layers: tuple[str, ...]
    group_ends: tuple[int, ...]
    requests: tuple[RequestTrace, ...]

    def __post_init__(self) -> None:
        ends = self.group_ends
        for name in ("top_k", "row_bytes"):
            value = getattr(self, name)
            _require(type(value) is int and value > 0, f"{name} {value!r}", "a whole number above 0")
        _require(list(ends) == sorted({end for end in ends if end > 0}), f"group_ends {ends}", "positive and ascending")
        _require(self.top_k in ends, f"group_ends {ends}", f"to include top_k, {self.top_k}")
        _require(bool(self.layers), "no layers", "at least one")
        for request in self.requests:
            self._check(request)

    @classmethod
    def from_ranked(
        cls,
        model: str,
        top_k: int,
        row_bytes: int,
        layers: tuple[str, ...],
        group_ends: tuple[int, ...],
        ranked: list[tuple[int, np.ndarray]],
    ) -> Trace:
        """Make a trace from ranked positions; their order within a group is dropped.

        Args:
            model, top_k, row_bytes, layers, group_ends: as in `Trace`.
            ranked: for each request, its `first_position`, and its positions, [layers, steps, ranks] ints, best first,
                -1 for none.
        """
        requests = []
        for first_position, positions in ranked:
            parts = np.split(positions.astype(np.int64), group_ends, axis=-1)[: len(group_ends)]
            ordered = [np.sort(np.where(part < 0, np.iinfo(np.int32).max, part), axis=-1) for part in parts]
            grouped = np.concatenate(ordered, axis=-1)
            grouped[grouped == np.iinfo(np.int32).max] = -1
            requests.append(RequestTrace(first_position, grouped.astype(np.int32)))
        return cls(model, top_k, row_bytes, layers, group_ends, tuple(requests))

    @classmethod
    def join(cls, traces: Sequence[Trace], names: Sequence[object] = ()) -> Trace:
        """Join several traces of one model into one; the order of requests stays.

        Args:
            traces: traces, at least one.
            names: name of each trace in errors, such as its file; default: its number.

        Raises:
            TraceError: `traces` is empty, or models, layers or groups differ.
        """
        _require(bool(traces), "no trace", "at least one")
        first, names = traces[0], names or [f"trace {number}" for number in range(1, len(traces) + 1)]
        for name, trace in zip(names, traces, strict=True):
            differ = [field for field in SHARED if getattr(trace, field) != getattr(first, field)]
            got, expected = (
                ", ".join(f"{field} {_shown(getattr(other, field))}" for field in differ) for other in (trace, first)
            )
            _require(not differ, f"{got} in {name}", f"{expected}, as in {names[0]}: replay them apart")
        return replace(first, requests=tuple(request for trace in traces for request in trace.requests))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file.

        Raises:
            TraceError: the file cannot be read, is damaged, or is not a trace.
        """
        try:
            with path.open("rb") as file:
                is_trace = file.readline(len(FIRST_LINE)) == FIRST_LINE
                _require(is_trace, str(path), f"a file that starts with {FIRST_LINE.decode().strip()!r}: {REMEDY}")
                header, body = _parse_header(file.readline(MAX_HEADER_BYTES)), file.read()
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror}") from None
        try:
            requests = _parse_requests(header, body)
            fields = {name: header[name] for name in ("model", "top_k", "row_bytes")}
            layers, group_ends = tuple(header["layers"]), tuple(header["group_ends"])
            return cls(**fields, layers=layers, group_ends=group_ends, requests=requests)
        except (KeyError, TypeError, IndexError) as error:
            raise TraceError(f"trace: the header lacks something or has a wrong type: {error!r}") from error

    def write(self, path: Path) -> None:
        """Write a file."""
        deltas = [_deltas(request.positions, self.group_ends) for request in self.requests]
        width = 2 if all(part.max(initial=0) < 1 << 16 for part in deltas) else 4
        planes = [part.astype(f"<u{width}").reshape(-1, 1).view(np.uint8).T.tobytes() for part in deltas]
        header = {
            "model": self.model,
            "top_k": self.top_k,
            "row_bytes": self.row_bytes,
            "layers": self.layers,
            "group_ends": self.group_ends,
            "delta_bytes": width,
            "requests": [
                {"first_position": request.first_position, "num_steps": request.num_steps} for request in self.requests
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            FIRST_LINE + json.dumps(header).encode() + b"\n" + zlib.compress(b"".join(planes), COMPRESSION)
        )

    def levels(self) -> np.ndarray:
        """Group of each rank: [ranks] int8."""
        return np.repeat(np.arange(len(self.group_ends)), np.diff(self.group_ends, prepend=0)).astype(np.int8)

    def _check(self, request: RequestTrace) -> None:
        positions, first = request.positions, request.first_position
        size, expected = positions.shape, (len(self.layers), "steps", self.group_ends[-1])
        _require(positions.ndim == 3 and size[::2] == expected[::2], f"positions of shape {size}", f"{expected}")
        _require(type(first) is int and first >= 0, f"first_position {first!r}", "a whole number, 0 or more")
        num_tokens = first + request.num_steps
        _require(num_tokens <= MAX_TOKENS, f"a request of {num_tokens} tokens", f"at most {MAX_TOKENS}")
        newest = first + np.arange(request.num_steps)[:, None]
        valid = ((positions >= -1) & (positions <= newest)).all()
        _require(bool(valid), f"a position outside [-1, {first} + step]", "none")
        for part in np.split(positions, self.group_ends[:-1], axis=-1):
            before, after = part[..., :-1], part[..., 1:]
            _require(bool(((after > before) | (after == -1)).all()), "a group out of order", "ascending positions")
            _require(bool(((before >= 0) | (after == -1)).all()), "a position after none", "none at the end of a group")
        ordered = np.sort(positions, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        _require(not twice.any(), "a position twice in a step", "distinct positions")


def _require(condition: bool, got: str, expected: str) -> None:
    if not condition:
        raise TraceError(f"trace: got {got}, expected {expected}")


def _shown(value: object) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def _parse_header(line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError as error:
        raise TraceError(f"trace: the header is not JSON: {error}") from error
    _require(isinstance(header, dict), f"a header of type {type(header).__name__}", "an object")
    return header


def _parse_requests(header: dict[str, Any], body: bytes) -> tuple[RequestTrace, ...]:
    width, group_ends = header["delta_bytes"], header["group_ends"]
    _require(width in (2, 4), f"delta_bytes {width!r}", "2 or 4")
    sizes = [(len(header["layers"]), request["num_steps"], group_ends[-1]) for request in header["requests"]]
    counts = [layers * steps * ranks for layers, steps, ranks in sizes]
    is_sane = all(isinstance(count, int) and count >= 0 for count in counts) and sum(counts) <= MAX_POSITIONS
    _require(is_sane, f"requests of sizes {sizes}", f"at most {MAX_POSITIONS} positions in all")
    planes = np.frombuffer(_decompress(body, sum(counts) * width), np.uint8)
    requests, start = [], 0
    for size, count, request in zip(sizes, counts, header["requests"], strict=True):
        deltas = planes[start : start + count * width].reshape(width, count).T.copy().view(f"<u{width}")
        requests.append(RequestTrace(request["first_position"], _positions(deltas.reshape(size), group_ends)))
        start += count * width
    return tuple(requests)


def _decompress(body: bytes, num_bytes: int) -> bytes:
    """Decompress exactly `num_bytes`, and never more, even if the stream has more."""
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(body, num_bytes + 1)
    except zlib.error as error:
        raise TraceError(f"trace: the selections are damaged: {error}") from error
    _require(len(content) == num_bytes, f"{len(content)} bytes of selections", f"{num_bytes}")
    _require(stream.eof, "selections whose end is missing", "the whole file")
    return content


def _deltas(positions: np.ndarray, group_ends: tuple[int, ...]) -> np.ndarray:
    """Turn positions into distances within their groups: both [layers, steps, ranks], the result int64."""
    parts = [np.diff(part, axis=-1, prepend=-1) for part in np.split(positions.astype(np.int64), group_ends[:-1], -1)]
    return np.where(positions < 0, 0, np.concatenate(parts, axis=-1))


def _positions(deltas: np.ndarray, group_ends: list[int]) -> np.ndarray:
    """Turn distances within groups into positions: both [layers, steps, ranks], the result int32."""
    parts = [part.astype(np.int64).cumsum(-1) - 1 for part in np.split(deltas, group_ends[:-1], axis=-1)]
    positions = np.where(deltas == 0, -1, np.concatenate(parts, axis=-1))
    return np.minimum(positions, np.iinfo(np.int32).max).astype(np.int32)
