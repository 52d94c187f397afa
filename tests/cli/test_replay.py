"""Replayed buffers against the plugin's reference op, plain models of each policy, and an exhaustive search."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_hisparse.cli import replay_policies
from vllm_hisparse.cli.main import app
from vllm_hisparse.cli.replay import describe, replays, result_table
from vllm_hisparse.cli.replay_buffers import PrivateBuffer, Replay, first_uses, private_misses, sequences
from vllm_hisparse.cli.replay_policies import LRFU, LRU, POLICIES, Selection
from vllm_hisparse.ops import torch_ops
from vllm_hisparse.ops.base import DecodeMetadata, HotRows, Residency, Resolved
from vllm_hisparse.ops.limits import MAX_AGE
from vllm_hisparse.ops.torch_ops import TorchSwapInOps
from vllm_hisparse.trace import Trace


def random_trace(
    seed: int,
    top_k: int,
    num_steps: int,
    first_position: int,
    num_layers: int = 1,
    num_requests: int = 1,
    sticky: float = 0.5,
) -> Trace:
    """Ranks that drift: every step, noise is added to the scores of the positions; ranks up to 2x top-k are known."""
    random, ranked = np.random.default_rng(seed), []
    for _ in range(num_requests):
        scores = random.random((num_layers, first_position + num_steps))
        positions = np.full((num_layers, num_steps, 2 * top_k), -1)
        for step in range(num_steps):
            scores = sticky * scores + (1 - sticky) * random.random(scores.shape)
            order = (-scores[:, : first_position + step + 1]).argsort(1)[:, : 2 * top_k]
            positions[:, step, : order.shape[1]] = order
        ranked.append((first_position, positions))
    names = tuple(map(str, range(num_layers)))
    return Trace.from_ranked("random", top_k, 16, names, (top_k, 2 * top_k), ranked)


traces = st.builds(
    random_trace,
    seed=st.integers(0, 1 << 16),
    top_k=st.integers(1, 5),
    num_steps=st.integers(1, 25),
    first_position=st.sampled_from([0, 1, 3, 9, 20]),
    num_layers=st.integers(1, 2),
    num_requests=st.integers(1, 2),
    sticky=st.sampled_from([0.2, 0.6, 0.9]),
)


def misses(trace: Trace, policy: str, scope: str, num_slots: int) -> np.ndarray:
    return Replay.run(trace, sequences(trace), policy, scope, num_slots).missed


class ReferenceOp:
    """One request in `TorchSwapInOps.resolve`, seeded as `HotBuffer.seed` does."""

    def __init__(self, num_slots: int, top_k: int, prompt_tokens: int):
        last = torch.arange(max(prompt_tokens - num_slots, 0), prompt_tokens, dtype=torch.int32)
        self.residency = Residency.allocate(num_slots + 1, torch.device("cpu"))
        self.residency.entries[(last % num_slots).long()] = last[:, None]
        self.counts = torch.zeros(1, 2, dtype=torch.int64)
        self.hot = HotRows.from_cache(torch.zeros(1, num_slots + 1, 1))
        self.out, self.top_k = Resolved.allocate(1, top_k, torch.device("cpu")), top_k

    def step(self, selected: np.ndarray, newest: int) -> list[int]:
        """The positions that are missed."""
        one = torch.zeros(1, dtype=torch.int32)
        host_block_table = torch.arange(64, dtype=torch.int32)[None]  # a host row has its position as id
        num_hot_rows, seq_lens = torch.tensor([[len(self.residency.positions)], [newest + 1]], dtype=torch.int32)
        decode = DecodeMetadata(one, one, seq_lens, one[None], num_hot_rows, host_block_table, 1)
        given = torch.from_numpy(selected.astype(np.int32))[None]
        TorchSwapInOps().resolve(self.residency, decode, given, self.hot, self.counts, self.out)
        return self.out.miss_host_row_ids[0, : int(self.out.num_misses[0])].tolist()


@pytest.mark.long
@pytest.mark.parametrize("max_age", [MAX_AGE, 52])
@given(traces, st.integers(0, 12))
def test_lrfu_is_that_of_the_plugin(max_age: int, trace: Trace, extra_slots: int) -> None:
    """The same rows missed in every step, the same rows in the same slots, and the same expiries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "MAX_AGE", max_age)
        patch.setattr(replay_policies, "MAX_AGE", max_age)
        compare_with_the_plugin(trace, trace.top_k + extra_slots)


def compare_with_the_plugin(trace: Trace, num_slots: int) -> None:
    for sequence, steps in enumerate(sequences(trace)):
        request = trace.requests[sequence // len(trace.layers)]
        positions = request.positions[sequence % len(trace.layers)]
        num_rows = steps[-1].newest + 1 + num_slots
        policy = LRFU(num_slots, first_uses(steps, num_rows), 2)
        buffer = PrivateBuffer(num_slots, num_rows, policy)
        buffer.seed(request.first_position)
        reference = ReferenceOp(num_slots, trace.top_k, request.first_position)
        for step, selection in enumerate(steps):
            expected = reference.step(positions[step, : trace.top_k], selection.newest)
            assert buffer.select(selection).tolist() == expected
            held, expiries = reference.residency.entries[:num_slots].numpy().T
            assert buffer.rows.tolist() == held.tolist()
            assert (policy.stamps + request.first_position)[held >= 0].tolist() == expiries[held >= 0].tolist()


def plain_lru(hot: dict[int, dict], row: int) -> float:
    return hot[row]["used"]


def plain_fifo(hot: dict[int, dict], row: int) -> float:
    return hot[row]["filled"]


def plain_lrfu(steps: list[Selection], num_slots: int) -> list[int]:
    """Misses of LRFU, row by row, all cold at first. A row is evicted by the step until which it may stay, and by its
    slot; rows that are missed take the lowest slots that become free."""
    slots: list[tuple[int, int] | None] = [None] * num_slots  # (row, step until which it may stay)
    found = []
    for now, selection in enumerate(steps):
        wanted, held = selection.rows.tolist(), {slot[0]: index for index, slot in enumerate(slots) if slot}
        missed = [row for row in wanted if row not in held]
        free = [index for index, slot in enumerate(slots) if slot is None or slot[0] not in wanted]
        free.sort(key=lambda index: -1 if slots[index] is None else slots[index][1])
        for index, row in zip(sorted(free[: len(missed)]), missed, strict=True):
            slots[index] = row, now + 8
        for row in set(wanted) & set(held):
            stays = max(slots[held[row]][1], now) + 8
            slots[held[row]] = row, min(stays, now + 48)
        found.append(len(missed))
    return found


def plain_misses(
    steps: list[Selection], num_slots: int, key: Callable[[dict[int, dict], int], float], ranks: bool = False
) -> list[int]:
    """Misses of a policy that evicts the row with the smallest key, one by one; all rows start cold, none fits."""
    hot: dict[int, dict] = {}
    found, clock = [], 0
    for selection in steps:
        levels = dict(zip(selection.ranked.tolist(), selection.levels.tolist(), strict=True))
        wanted = selection.rows.tolist()
        hits = sorted((row for row in wanted if row in hot), key=lambda row: hot[row]["used"])
        missed = [row for row in wanted if row not in hot]
        for row in missed:
            if len(hot) == num_slots:
                others = [other for other in hot if other not in wanted]
                level = {other: levels.get(other, 9) if ranks else 0 for other in others}
                del hot[min(others, key=lambda other: (-level[other], key(hot, other)))]
            clock += 1
            hot[row] = {"used": clock, "filled": clock}
        for row in hits:
            clock += 1
            hot[row]["used"] = clock
        found.append(len(missed))
    return found


def plain_clock(steps: list[Selection], num_slots: int) -> list[int]:
    slots: list[int | None] = [None] * num_slots
    used, hand, found = [False] * num_slots, 0, []
    for selection in steps:
        wanted = selection.rows.tolist()
        missed = [row for row in wanted if row not in slots]
        hits = [slots.index(row) for row in wanted if row in slots]
        taken: list[int] = []
        while len(taken) < len(missed):
            if hand not in hits and hand not in taken:
                if used[hand]:
                    used[hand] = False
                else:
                    taken.append(hand)
            hand = (hand + 1) % num_slots
        for slot, row in zip(taken, missed, strict=True):
            slots[slot], used[slot] = row, False
        for slot in hits:
            used[slot] = True
        found.append(len(missed))
    return found


def cold_misses(steps: list[Selection], policy: str, num_slots: int) -> list[int]:
    """Misses of a buffer that is empty at first and never large enough for the sequence."""
    num_rows = steps[-1].newest + 1
    buffer = PrivateBuffer(num_slots, num_rows, POLICIES[policy](num_slots, first_uses(steps, num_rows), 2))
    return [len(buffer.select(selection)) for selection in steps]


@pytest.mark.long
@given(st.integers(0, 1 << 16), st.integers(1, 4), st.integers(0, 6), st.sampled_from([0.2, 0.6, 0.9]))
def test_policies_are_those_of_plain_models(seed: int, top_k: int, extra_slots: int, sticky: float) -> None:
    num_slots = top_k + extra_slots
    steps = sequences(random_trace(seed, top_k, 30, 12, sticky=sticky))[0]
    assert cold_misses(steps, "fifo", num_slots) == plain_misses(steps, num_slots, plain_fifo)
    assert cold_misses(steps, "score", num_slots) == plain_misses(steps, num_slots, plain_lru, ranks=True)
    assert cold_misses(steps, "clock", num_slots) == plain_clock(steps, num_slots)
    assert cold_misses(steps, "lrfu", num_slots) == plain_lrfu(steps, num_slots)


def fewest_misses(steps: list[Selection], num_slots: int) -> int:
    """Return the fewest misses over all choices of rows to keep."""

    @cache
    def best(step: int, hot: frozenset[int]) -> int:
        if step == len(steps):
            return 0
        wanted = frozenset(steps[step].rows.tolist())
        spare, room = hot - wanted, num_slots - len(wanted)
        kept = combinations(sorted(spare), min(room, len(spare)))
        return len(wanted - hot) + min(best(step + 1, wanted | frozenset(rows)) for rows in kept)

    return best(0, frozenset())


@settings(max_examples=30)
@given(st.integers(0, 1 << 16), st.integers(1, 3), st.integers(0, 2))
def test_belady_is_the_optimum(seed: int, top_k: int, extra_slots: int) -> None:
    steps = sequences(random_trace(seed, top_k, 8, 9))[0]
    assert sum(cold_misses(steps, "belady", top_k + extra_slots)) == fewest_misses(steps, top_k + extra_slots)


@pytest.mark.long
@given(traces, st.integers(0, 12), st.sampled_from(["buffers", "pool"]))
def test_no_policy_beats_belady(trace: Trace, extra_slots: int, scope: str) -> None:
    num_slots = trace.top_k + extra_slots
    least = misses(trace, "belady", scope, num_slots)
    for policy in POLICIES:
        others = misses(trace, policy, scope, num_slots)
        assert others.sum() >= least.sum()
        if scope == "buffers":
            assert (others.sum(2) >= least.sum(2)).all()


@given(st.integers(0, 1 << 16), st.sampled_from([*POLICIES]))
def test_a_pool_of_one_sequence_is_its_buffer(seed: int, policy: str) -> None:
    trace = random_trace(seed, 3, 20, 12)
    assert (misses(trace, policy, "pool", 5) == misses(trace, policy, "buffers", 5)).all()


def test_a_pool_gives_room_to_those_that_need_it() -> None:
    """One layer selects two rows in turns, the other always the same one."""
    positions = np.array([[[step % 2], [5]] for step in range(12)]).transpose(1, 0, 2)
    trace = Trace.from_ranked("two", 1, 16, ("0", "1"), (1,), [(8, positions)])
    assert misses(trace, "lru", "buffers", 1)[0, :, 2:].sum(1).tolist() == [10, 0]
    assert misses(trace, "belady", "pool", 2)[0, :, 2:].sum() == 0


def test_counts_and_rates() -> None:
    """Four steps at positions 4 to 7; the newest position counts as neither hit nor miss."""
    positions = np.array([[[0, 1], [0, 5], [6, 0], [1, 2]]])
    trace = Trace.from_ranked("small", 2, 16, ("0",), (2,), [(4, positions)])
    replay = Replay.run(trace, sequences(trace), "lru", "buffers", 2)
    assert replay.selected.tolist() == [[[2, 1, 1, 2]]]
    assert replay.missed.tolist() == [[[2, 0, 0, 1]]]  # the prompt leaves 2 and 3 hot
    assert replay.hit_rates(0).tolist() == [0.5] and replay.hit_rates(1).tolist() == [0.75]
    assert replay.missed_per_step(0) == 0.75


def test_missed_rows_are_named() -> None:
    positions = np.array([[[0, 1], [0, 2]]])
    trace = Trace.from_ranked("small", 2, 16, ("0",), (2,), [(8, positions)])
    found = list(private_misses(sequences(trace), LRU, 2, 1))
    assert [(sequence, step, rows.tolist()) for sequence, step, rows in found] == [(0, 0, [0, 1]), (0, 1, [2])]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    random_trace(3, 8, 40, 100, num_layers=2, num_requests=2, sticky=0.9).write(tmp_path / "some.trace")
    return tmp_path / "some.trace"


def run(*arguments: str):
    return CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": "160"})


@pytest.mark.long
def test_the_command_shows_a_table_and_writes_a_plot(trace_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plots" / "replay.png"
    options = ["--warm-up", "0", "--size", "2", "--row-bytes", "1000", "--layers", "61", "--link-gb-s", "1"]
    result = run(str(trace_file), *options, "--plot", str(picture))
    assert result.exit_code == 0, result.output
    lines = re.findall(
        r"^ *(buffers|pool) +(\w+) +16 \(2x\) +([\d.]+)% .* ([\d.]+) +([\d.]+) +([\d.]+) *$", result.output, re.M
    )
    assert [(scope, policy) for scope, policy, *_ in lines] == [(s, p) for s in ("buffers", "pool") for p in POLICIES]
    missed = misses(Trace.read(trace_file), "lrfu", "buffers", 16).mean()
    assert float(lines[0][3]) == pytest.approx(missed, abs=0.05)
    assert float(lines[0][4]) == pytest.approx(missed * 61 * 1000 / 1e6, abs=0.005)
    assert float(lines[0][5]) == pytest.approx(missed * 61 * 1000 / 1e6, abs=0.0005)
    assert picture.stat().st_size > 0


@pytest.mark.parametrize("columns", ["40", "80"])
def test_figures_are_whole_where_lines_are_short(trace_file: Path, columns: str) -> None:
    options = ["--warm-up", "0", "--size", "2.3", "--requests", "1000000"]
    shown = CliRunner().invoke(app, ["replay", str(trace_file), *options], env={"COLUMNS": columns})
    assert shown.exit_code == 0, shown.output
    assert "…" not in shown.output and shown.output.count("18 (2.25x)") == 2 * len(POLICIES)
    layers = CliRunner().invoke(app, ["replay", str(trace_file), "--by-layer"], env={"COLUMNS": columns})
    assert layers.exit_code == 0, layers.output
    assert "…" not in layers.output and "controller" in layers.output


def test_a_size_is_shown_in_short(trace_file: Path) -> None:
    """A buffer of 589 rows with a top-k of 256 has 2.30078 times the top-k."""
    trace = Trace.read(trace_file)
    row = describe(replays(trace, ["lru"], [2.0], ["buffers"])[0], trace, 0, 1, 1.0)
    for size, expected in ((589 / 256, "589 (2.3x)"), (2.0, "589 (2x)"), (1024.0, "589 (1024x)")):
        table = result_table([{**row, "hot_rows": 589, "size": size}], "title")
        assert list(table.columns[2].cells) == [expected]


@pytest.mark.long
def test_several_traces_are_replayed_together(trace_file: Path, tmp_path: Path) -> None:
    """One shared pool needs all requests; the rows of both files are those of one file with both requests."""
    trace = Trace.read(trace_file)
    parts = []
    for number, request in enumerate(trace.requests):
        parts.append(tmp_path / f"{number}.trace")
        replace(trace, requests=(request,)).write(parts[-1])
    options = ["--warm-up", "0", "--policy", "lru"]
    together = run(*map(str, parts), *options)
    assert together.exit_code == 0, together.output
    assert together.output == run(str(trace_file), *options).output
    assert together.output != run(str(parts[0]), *options).output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--policy", "mru"], "lrfu, lru, fifo"),
        (["--warm-up", "40"], "fewer than the 40 steps"),
        (["--size", "0.5"], "--size"),
        (["--size", "inf"], "--size"),
        (["--size", "nan"], "--size"),
        (["--size", "1e9"], "--size"),
        (["--link-gb-s", "inf"], "got inf, expected a finite number"),
        (["--by-layer", "--plot", "some.png"], "which draws nothing"),
        (["--least-share", "0.54"], "Invalid value for --least-share: got 0.54, but not --by-layer, without which it"),
        (["--by-layer", "--policy", "lru"], "Invalid value for --policy: got lru, and --by-layer, which ignores it"),
        (["--by-layer", "--pool"], "Invalid value for --pool: got --pool, and --by-layer, which ignores it"),
        (["--by-layer", "--no-pool"], "Invalid value for --no-pool: got --no-pool, and --by-layer, which ignores"),
        (["--by-layer", "--layers", "2"], "Invalid value for --layers: got 2, and --by-layer, which ignores it"),
        (["--by-layer", "--requests", "1"], "Invalid value for --requests: got 1, and --by-layer, which ignores it"),
        (["--by-layer", "--row-bytes", "9"], "Invalid value for --row-bytes: got 9, and --by-layer, which ignores it"),
        (["--by-layer", "--link-gb-s", "50"], "Invalid value for --link-gb-s: got 50.0, and --by-layer, which ignores"),
        (["--plot", "plot.foo"], "expected a name that ends with one of"),
        (["--plot", "/dev/null/plot.png"], "Not a directory"),
    ],
)
def test_wrong_options_are_refused(trace_file: Path, options: list[str], expected: str) -> None:
    result = run(str(trace_file), *options)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("layers", "steps", "expected"),
    [(("draft",), 40, "got the layer draft alone"), (("0",), 0, "got no requests, expected at least one")],
)
def test_traces_without_anything_to_replay(tmp_path: Path, layers: tuple[str, ...], steps: int, expected: str) -> None:
    requests = [(50, np.tile(np.arange(4), (1, steps, 1)))] if steps else []
    Trace.from_ranked("m", 4, 16, layers, (4,), requests).write(tmp_path / "some.trace")
    result = run(str(tmp_path / "some.trace"), "--by-layer")
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.trace").write_text(json.dumps({}))
    result = run(str(tmp_path / "no.trace"))
    assert result.exit_code == 2
    output = " ".join(result.output.replace("│", " ").split())
    assert "expected a file that starts with 'vllm-hisparse trace 1': record one with `vllm-hisparse trace" in output


def test_files_of_two_models_are_refused(trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace(Trace.read(trace_file), model="other", row_bytes=7).write(Path("other.trace"))
    result = run("some.trace", "other.trace")
    assert result.exit_code == 2
    output = " ".join(result.output.replace("│", " ").split())
    assert (
        "got model other, row_bytes 7 in other.trace, expected model random, row_bytes 16, as in some.trace" in output
    )
    assert "replay them apart" in output
