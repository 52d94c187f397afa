"""A trace survives its file; what is damaged or impossible is refused."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.trace import FIRST_LINE, RequestTrace, Trace, TraceError

COMMITTED = Path(__file__).parents[1] / "benchmarks" / "traces" / "code-dsa.trace"


def random_ranked(
    seed: int, num_layers: int, num_steps: int, num_ranks: int, first_position: int
) -> tuple[int, np.ndarray]:
    """Distinct positions up to the newest in random order, and -1 in random places."""
    random = np.random.default_rng(seed)
    positions = np.full((num_layers, num_steps, num_ranks), -1)
    for layer in range(num_layers):
        for step in range(num_steps):
            num_positions = first_position + step + 1
            count = random.integers(0, min(num_ranks, num_positions) + 1)
            chosen = random.choice(num_positions, count, replace=False)
            positions[layer, step, random.permutation(num_ranks)[:count]] = chosen
    return first_position, positions


@st.composite
def ranked_traces(draw: st.DrawFn) -> tuple[tuple[int, ...], int, list[tuple[int, np.ndarray]]]:
    group_ends = tuple(sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=4))))
    top_k, num_layers, requests = draw(st.sampled_from(group_ends)), draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(0, 3))):
        first_position = draw(st.sampled_from([0, 1, 7, 300, 70_000, 100_000]))
        steps, seed = draw(st.integers(0, 4)), draw(st.integers(0, 1 << 16))
        requests.append(random_ranked(seed, num_layers, steps, group_ends[-1], first_position))
    return group_ends, top_k, requests


def make(group_ends: tuple[int, ...], top_k: int, ranked: list[tuple[int, np.ndarray]], num_layers: int) -> Trace:
    return Trace.from_ranked("model", top_k, 1152, tuple(map(str, range(num_layers))), group_ends, ranked)


@pytest.mark.long
@given(ranked_traces())
def test_a_file_gives_back_what_was_recorded(case) -> None:
    group_ends, top_k, ranked = case
    num_layers = ranked[0][1].shape[0] if ranked else 2
    with TemporaryDirectory() as directory:
        path = Path(directory) / "some.trace"
        make(group_ends, top_k, ranked, num_layers).write(path)
        read = Trace.read(path)
    assert (read.model, read.top_k, read.row_bytes, read.group_ends) == ("model", top_k, 1152, group_ends)
    assert read.layers == tuple(map(str, range(num_layers)))
    assert len(read.requests) == len(ranked)
    for request, (first_position, positions) in zip(read.requests, ranked, strict=True):
        assert request.first_position == first_position
        start = 0
        for end in group_ends:
            for expected, found in zip(
                positions[..., start:end].reshape(-1, end - start),
                request.positions[..., start:end].reshape(-1, end - start),
                strict=True,
            ):
                wanted = sorted(expected[expected >= 0].tolist())
                assert found.tolist() == wanted + [-1] * (end - start - len(wanted))
            start = end


def test_levels() -> None:
    assert make((2, 3, 6), 3, [], 1).levels().tolist() == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([[[3, 2, 5, 6]]], "ascending"),
        ([[[-1, 2, 5, 6]]], "none at the end"),
        ([[[1, 2, 2, 6]]], "distinct"),
        ([[[1, 2, 3, 11]]], "outside"),
        ([[[-2, -1, 3, 4]]], "outside"),
        ([[[1, 2, 3]]], "shape"),
        ([[[1, 2, 3, 4]], [[1, 2, 3, 4]]], "shape"),
    ],
)
def test_impossible_selections_are_refused(positions: list, expected: str) -> None:
    with pytest.raises(TraceError, match=expected):
        Trace("model", 2, 1152, ("0",), (2, 4), (RequestTrace(10, np.array(positions, np.int32)),))


@pytest.mark.parametrize(
    "change", [{"top_k": 3}, {"top_k": 0}, {"row_bytes": 0}, {"group_ends": (4, 2)}, {"layers": ()}]
)
def test_impossible_headers_are_refused(change: dict) -> None:
    fields = {"model": "m", "top_k": 2, "row_bytes": 8, "layers": ("0",), "group_ends": (2, 4), "requests": ()}
    Trace(**fields)
    with pytest.raises(TraceError):
        Trace(**fields | change)


def write_small(path: Path) -> bytes:
    make((2, 4), 2, [random_ranked(0, 2, 3, 4, 9)], 2).write(path)
    return path.read_bytes()


@given(st.data())
def test_a_damaged_file_is_refused_or_read_as_a_valid_trace(data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "damaged.trace"
        content = bytearray(write_small(path))
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] ^= data.draw(st.integers(1, 255))
        else:
            del content[place:]
        path.write_bytes(content)
        try:
            Trace.read(path)
        except TraceError:
            return
        assert place > len(FIRST_LINE) and len(content) > place  # a digit or a letter of the header


@pytest.mark.parametrize(
    "change",
    [
        {"delta_bytes": 3},
        {"requests": [{"num_steps": 3}]},
        {"requests": [{"first_position": 9, "num_steps": 4}]},
        {"requests": [{"first_position": 9, "num_steps": 2}]},
        {"requests": [{"first_position": 9, "num_steps": 1 << 40}]},
        {"requests": [{"first_position": 9, "num_steps": -1}]},
        {"requests": [{"first_position": "9", "num_steps": 3}]},
        {"requests": [{"first_position": 0, "num_steps": 3}]},
        {"group_ends": []},
        {"group_ends": "ab"},
        {"top_k": "2"},
        {"top_k": 2.0},
        {"row_bytes": 16.0},
        {"requests": [{"first_position": 10**12, "num_steps": 3}]},
        {"layers": 2},
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, change: dict) -> None:
    first, header, body = write_small(tmp_path / "some.trace").split(b"\n", 2)
    changed = json.dumps(json.loads(header) | change).encode()
    (tmp_path / "some.trace").write_bytes(b"\n".join((first, changed, body)))
    with pytest.raises(TraceError):
        Trace.read(tmp_path / "some.trace")


def test_more_content_than_the_header_says_is_refused_without_unpacking_it(tmp_path: Path) -> None:
    first, header, _ = write_small(tmp_path / "some.trace").split(b"\n", 2)
    (tmp_path / "some.trace").write_bytes(b"\n".join((first, header, zlib.compress(bytes(1 << 24)))))
    with pytest.raises(TraceError, match="49 bytes of selections, expected 48"):
        Trace.read(tmp_path / "some.trace")


def test_selections_that_are_cut_off_are_named(tmp_path: Path) -> None:
    """All positions are there; the checksum of the stream is not."""
    content = write_small(tmp_path / "some.trace")
    (tmp_path / "some.trace").write_bytes(content[:-2])
    with pytest.raises(TraceError, match="got selections whose end is missing, expected the whole file"):
        Trace.read(tmp_path / "some.trace")


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Is a directory"):
        Trace.read(tmp_path)


def test_traces_of_one_model_are_joined() -> None:
    case = ((4,), 4, [random_ranked(seed, 2, 3, 4, 5) for seed in range(2)], 2)
    both = make(*case)
    parts = [make(*case[:2], [request], 2) for request in case[2]]
    joined = Trace.join(parts)
    assert replace(joined, requests=()) == replace(both, requests=())
    for request, expected in zip(joined.requests, both.requests, strict=True):
        assert request.first_position == expected.first_position
        assert np.array_equal(request.positions, expected.positions)


@pytest.mark.parametrize(
    ("change", "got", "expected"),
    [
        ({"model": "other"}, "model other", "model {0.model}"),
        ({"row_bytes": 3}, "row_bytes 3", "row_bytes {0.row_bytes}"),
        ({"model": "other", "layers": ("0", "7")}, "model other, layers (0, 7)", "model {0.model}, layers (0, 1)"),
    ],
)
def test_traces_of_two_models_are_not_joined(change: dict, got: str, expected: str) -> None:
    """The error has what differs, the name of the trace, and what to do."""
    trace = make((4,), 4, [random_ranked(0, 2, 3, 4, 5)], 2)
    traces = [trace, trace, replace(trace, **change)]
    for names, shown in (((), ("trace 3", "trace 1")), (("a.trace", "b.trace", "c.trace"), ("c.trace", "a.trace"))):
        with pytest.raises(TraceError) as error:
            Trace.join(traces, names)
        ending = f"expected {expected.format(trace)}, as in {shown[1]}: replay them apart"
        assert str(error.value) == f"trace: got {got} in {shown[0]}, {ending}"
    with pytest.raises(TraceError, match="no trace"):
        Trace.join([])


@pytest.mark.long
def test_the_committed_trace() -> None:
    trace = Trace.read(COMMITTED)
    assert (trace.top_k, trace.row_bytes, trace.group_ends) == (256, 1152, (256, 320, 384, 512))
    assert trace.layers == (*map(str, range(8)), "draft")
    assert [request.positions.shape for request in trace.requests] == [(9, 400, 512)] * 2
    assert COMMITTED.stat().st_size < 3 << 20


@pytest.mark.parametrize("num_tokens", [4096, 8192])
def test_the_committed_traces_of_engines(num_tokens: int) -> None:
    """Traces of engines begin after the prompt, or with its last token if that was a chunk of its own."""
    trace = Trace.read(COMMITTED.with_name(f"code-dsa-{num_tokens}.trace"))
    assert (trace.model, trace.top_k, trace.row_bytes, trace.group_ends) == ("code-dsa", 256, 1152, (256,))
    assert trace.layers == tuple(map(str, range(8)))
    for request in trace.requests:
        assert request.first_position in (num_tokens - 1, num_tokens)
        assert request.first_position + request.num_steps == num_tokens + 287
        assert (request.positions >= 0).all()
