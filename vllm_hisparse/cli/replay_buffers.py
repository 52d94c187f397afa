"""Simulates hot buffers over a trace, and counts the selected rows that are hot and those that are copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from vllm_hisparse.cli.replay_policies import NEVER, POLICIES, Policy, Selection
from vllm_hisparse.trace import Trace


class Buffer:
    """Rows in slots. A step copies missing selected rows to the slots of the victims that a policy chooses.

    Attributes:
        rows: [num_slots] int64 row id in each slot, -1 in an empty one.
        slot_of: [num_rows] int64 slot of each row, or -1.
    """

    def __init__(self, num_slots: int, num_rows: int, policy: Policy):
        self.policy = policy
        self.rows, self.slot_of = np.full(num_slots, -1), np.full(num_rows, -1)

    def select(self, selection: Selection) -> np.ndarray:
        """Make a selection hot; return the row ids that were missing: [misses] int64."""
        slots = self.slot_of[selection.rows]
        missed, hits = selection.rows[slots < 0], slots[slots >= 0]
        self.policy.begin(selection)
        filled = self.policy.victims(self.rows, hits, len(missed)) if len(missed) else hits[:0]
        self.place(missed, filled)
        self.policy.touch(hits, filled)
        return missed

    def place(self, rows: np.ndarray, slots: np.ndarray) -> None:
        """Put rows into slots, [n] int64 each; the rows that were there are lost."""
        old = self.rows[slots]
        self.slot_of[old[old >= 0]] = -1
        self.rows[slots], self.slot_of[rows] = rows, slots


class PrivateBuffer(Buffer):
    """The hot buffer of one request in one layer, as the plugin keeps it; a row id is a position.

    While the sequence fits, position p is in slot p, and nothing is evicted; the newest row may have a slot beyond
    those of the buffer. At the start, as many of the prompt's last rows as fit are hot (`HotBuffer.seeds`).
    """

    def seed(self, prompt_tokens: int) -> None:
        """Make the last rows of a prompt of `prompt_tokens` hot."""
        num_slots = len(self.rows)
        positions = np.arange(max(prompt_tokens - num_slots, 0), prompt_tokens)
        self.place(positions, positions % num_slots)
        self.policy.seed(positions % num_slots)

    def select(self, selection: Selection) -> np.ndarray:
        if selection.newest > len(self.rows):
            return super().select(selection)
        slots = self.slot_of[selection.rows]
        missed, hits = selection.rows[slots < 0], slots[slots >= 0]
        newest = np.arange(selection.newest, min(selection.newest + 1, len(self.rows)))
        self.policy.begin(selection)
        self.place(missed, missed)
        self.place(newest, newest)
        self.policy.touch(hits, missed)
        self.policy.seed(newest)
        return missed


def sequences(trace: Trace) -> list[list[Selection]]:
    """Return the steps of every layer of every request.

    The sequence of a request's layer has number `request * num_layers + layer`. Its row ids are positions.
    """
    found: list[list[Selection]] = []
    for request in trace.requests:
        for positions in request.positions:
            found.append(_selections(trace, positions, request.first_position, len(found)))
    return found


def _selections(trace: Trace, positions: np.ndarray, first_position: int, sequence: int) -> list[Selection]:
    """Return the steps of one layer of one request.

    Args:
        positions: [steps, ranks] int32 positions, best first.
        first_position, sequence: as in `RequestTrace` and `Selection`.
    """
    levels, next_use = trace.levels(), np.full(first_position + len(positions), NEVER)
    found = []
    for step in reversed(range(len(positions))):
        newest = first_position + step
        known = (positions[step] >= 0) & (positions[step] < newest)
        ranked = positions[step][known].astype(np.int64)
        rows = ranked[: known[: trace.top_k].sum()]
        found.append(Selection(sequence, newest, rows, ranked, levels[known], next_use[rows]))
        next_use[rows] = step
    return found[::-1]


def first_uses(steps: list[Selection], num_rows: int) -> np.ndarray:
    """Return the time at which each row is first selected, or `NEVER`: [num_rows + 1] int64; the last is for no row.

    Args:
        steps: steps of a sequence; a time is the index of a step.
        num_rows: upper bound of row ids.
    """
    found = np.full(num_rows + 1, NEVER)
    for time in reversed(range(len(steps))):
        found[steps[time].rows] = time
    return found


def private_misses(
    traced: list[list[Selection]], policy: type[Policy], num_slots: int, num_levels: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield sequence, step and missed row ids of every step, if every sequence has a buffer of its own.

    Args:
        traced: result of `sequences`.
        policy: policy of the buffers.
        num_slots: slots of each buffer.
        num_levels: number of groups of ranks.
    """
    for sequence, steps in enumerate(traced):
        num_rows = max(steps[-1].newest + 1, num_slots)
        buffer = PrivateBuffer(num_slots, num_rows, policy(num_slots, first_uses(steps, num_rows), num_levels))
        buffer.seed(steps[0].newest)
        for step, selection in enumerate(steps):
            yield sequence, step, buffer.select(selection)


def pooled_misses(
    traced: list[list[Selection]], policy: type[Policy], num_slots: int, num_levels: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the same as `private_misses`, if all sequences share one pool with `num_slots` slots for each of them.

    In a step, the sequences take turns. At the start, the last rows of each prompt are hot, equally many of each.
    """
    num_positions = max(steps[-1].newest for steps in traced) + 1
    num_rows, pool_slots = num_positions * len(traced), num_slots * len(traced)
    turns = [
        (sequence, step, steps[step])
        for step in range(max(map(len, traced)))
        for sequence, steps in enumerate(traced)
        if step < len(steps)
    ]
    shifted = [_shift(selection, sequence * num_positions) for sequence, _, selection in turns]
    uses = _next_turns(shifted, num_rows)
    pool = Buffer(pool_slots, num_rows, policy(pool_slots, first_uses(shifted, num_rows), num_levels, len(traced)))
    for sequence, steps in enumerate(traced):
        last = np.arange(max(steps[0].newest - num_slots, 0), steps[0].newest)
        slots = sequence * num_slots + last % num_slots
        pool.place(sequence * num_positions + last, slots)
        pool.policy.seed(slots)
    for (sequence, step, _), selection, next_uses in zip(turns, shifted, uses, strict=True):
        yield sequence, step, pool.select(replace(selection, next_uses=next_uses)) - sequence * num_positions


def _shift(selection: Selection, offset: int) -> Selection:
    """Return the selection with `offset` added to its row ids."""
    return replace(selection, rows=selection.rows + offset, ranked=selection.ranked + offset)


def _next_turns(turns: list[Selection], num_rows: int) -> list[np.ndarray]:
    """Return for each turn the next turn in which each of its rows is selected, or `NEVER`."""
    next_use, found = np.full(num_rows, NEVER), []
    for turn in reversed(range(len(turns))):
        found.append(next_use[turns[turn].rows])
        next_use[turns[turn].rows] = turn
    return found[::-1]


SCOPES = {"buffers": private_misses, "pool": pooled_misses}


@dataclass(frozen=True)
class Replay:
    """Counts of one replay.

    Attributes:
        policy: name of the policy.
        scope: `buffers`: one for each request and layer; `pool`: one for all, with the same memory in total.
        num_slots: hot rows per request and layer.
        selected, missed: [requests, layers, steps] int64 number of rows; 0 if a request has no such step.
    """

    policy: str
    scope: str
    num_slots: int
    selected: np.ndarray
    missed: np.ndarray

    @classmethod
    def run(cls, trace: Trace, traced: list[list[Selection]], policy: str, scope: str, num_slots: int) -> Replay:
        """Simulate buffers over a trace.

        Args:
            trace: selections.
            traced: result of `sequences(trace)`.
            policy, scope, num_slots: as in the attributes.
        """
        selected = np.zeros((len(traced), max(map(len, traced))), np.int64)
        missed = np.zeros_like(selected)
        misses = SCOPES[scope](traced, POLICIES[policy], num_slots, len(trace.group_ends))
        for sequence, step, rows in misses:
            selected[sequence, step], missed[sequence, step] = len(traced[sequence][step].rows), len(rows)
        size = (len(trace.requests), len(trace.layers), -1)
        return cls(policy, scope, num_slots, selected.reshape(size), missed.reshape(size))

    def hit_rates(self, first_step: int) -> np.ndarray:
        """Return the share of selected rows that are hot, from a step on: [layers] float64; 1 without selections."""
        selected, missed = (part[:, :, first_step:].sum((0, 2)) for part in (self.selected, self.missed))
        return 1 - missed / np.maximum(selected, 1)

    def missed_per_step(self, first_step: int) -> float:
        """Return the mean number of rows that a request misses in one layer and step, from a step on."""
        ran = self.selected[:, :, first_step:] > 0
        return float(self.missed[:, :, first_step:].sum() / max(ran.sum(), 1))
