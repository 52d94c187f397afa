"""Eviction policies for `replay`: which slots of a buffer are filled next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from vllm_hisparse.ops.limits import MAX_AGE

NEVER = np.iinfo(np.int64).max  # time of a use that does not come


@dataclass(frozen=True)
class Selection:
    """The selection of one layer of one request in a step. A row id stands for one position in it.

    Attributes:
        sequence: number of the layer of the request.
        newest: newest position; its row is hot in any case and in none of the following.
        rows: [n] int64 row ids of the selection.
        ranked: [m] int64 row ids of every rank that is known, the selection included.
        levels: [m] int8 group of each in `ranked`.
        next_uses: [n] int64 time at which each in `rows` is selected again, or `NEVER`.
    """

    sequence: int
    newest: int
    rows: np.ndarray
    ranked: np.ndarray
    levels: np.ndarray
    next_uses: np.ndarray


class Policy(ABC):
    """Chooses victims in one buffer.

    Args:
        num_slots: of the buffer. Slots are empty at first.
        first_uses: [num_rows + 1] int64 time of each row's first use, or `NEVER`; the last entry is of an empty slot.
        num_levels: groups of ranks.

    Attributes:
        num_sequences: that share the buffer and take turns in a step.
    """

    num_sequences = 1

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int):
        self.num_slots, self.num_rows = num_slots, len(first_uses) - 1

    def seed(self, slots: np.ndarray) -> None:  # noqa: B027 (see `begin`)
        """Slots that are filled before the first step, in this order: [n] int64."""

    def begin(self, selection: Selection) -> None:  # noqa: B027 (few policies look at a selection)
        """Called once per step and layer, before `victims`."""

    @abstractmethod
    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        """Slots to fill, in the order in which they are filled.

        Args:
            rows: [num_slots] int64 row id in each slot, -1 in an empty one.
            hits: [n] int64 slots that this step uses, which must stay.
            num_victims: slots to choose; at least so many are not in `hits`.
        """

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:  # noqa: B027 (see `begin`)
        """Slots used and slots filled in this step, the latter as `victims` gave them: [n] int64 each."""


def smallest(keys: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
    """[num_victims] int64 slots of the smallest keys, ascending, except hits.

    Args:
        keys: [num_slots] int64, below `NEVER`; overwritten.
        hits: [n] int64 slots.
    """
    keys[hits] = NEVER
    found = np.argpartition(keys, num_victims - 1)[:num_victims]
    return found[keys[found].argsort()]


class FIFO(Policy):
    """Evicts what was filled first."""

    name = "fifo"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int):
        super().__init__(num_slots, first_uses, num_levels)
        self.stamps, self.clock = np.arange(num_slots), num_slots

    def seed(self, slots: np.ndarray) -> None:
        self._stamp(slots)

    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        return smallest(self.stamps.copy(), hits, num_victims)

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:
        self._stamp(filled)

    def _stamp(self, slots: np.ndarray) -> None:
        self.stamps[slots] = np.arange(self.clock, self.clock + len(slots))
        self.clock += len(slots)


class LRU(Policy):
    """Evicts what was used least recently, as the plugin does (`SwapInOps.resolve`): empty slots first, then by the
    step of the last use, steps beyond `MAX_AGE` alike, then by number. Slots are filled in the order of their numbers.
    """

    name = "lru"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int):
        super().__init__(num_slots, first_uses, num_levels)
        self.stamps, self.clock = np.full(num_slots, -1), -1

    def seed(self, slots: np.ndarray) -> None:
        self.stamps[slots] = np.arange(-len(slots), 0)

    def begin(self, selection: Selection) -> None:
        self.clock += 1

    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        max_age = MAX_AGE * self.num_sequences
        keys = np.where(rows < 0, -1, np.maximum(self.stamps - (self.clock - max_age), 0))
        return np.sort(smallest(keys * self.num_slots + np.arange(self.num_slots), hits, num_victims))

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:
        self.stamps[hits] = self.stamps[filled] = self.clock


class Clock(Policy):
    """A hand goes round the slots, spares the one it meets if it was used since, and evicts it the next time."""

    name = "clock"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int):
        super().__init__(num_slots, first_uses, num_levels)
        self.was_used, self.hand = np.zeros(num_slots, bool), 0

    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        order = np.roll(np.arange(self.num_slots), -self.hand)
        stays = np.zeros(self.num_slots, bool)
        stays[hits] = True
        order = order[~stays[order]]
        unused = (~self.was_used[order]).nonzero()[0]
        if len(unused) >= num_victims:
            chosen = order[unused[:num_victims]]
            self.was_used[order[: unused[num_victims - 1]]] = False
        else:  # the hand goes round once more
            spared = order[self.was_used[order]]
            self.was_used[order] = False
            chosen = np.concatenate((order[unused], spared[: num_victims - len(unused)]))
        self.hand = (int(chosen[-1]) + 1) % self.num_slots
        return chosen

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:
        self.was_used[hits] = True
        self.was_used[filled] = False


class Score(FIFO):
    """Evicts what the indexer now ranks lowest, as far as the trace knows ranks; among equals, what was used least
    recently, and of one step's rows those that were filled before hits."""

    name = "score"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int):
        super().__init__(num_slots, first_uses, num_levels)
        self.levels = np.full(self.num_rows + 1, num_levels, np.int64)  # by row id; lowest ranks have the highest level
        self.levels[-1] = num_levels + 1  # an empty slot goes first
        self.worst = num_levels
        self.ranked: dict[int, np.ndarray] = {}  # rows that have a better level, by sequence

    def begin(self, selection: Selection) -> None:
        self.levels[self.ranked.get(selection.sequence, selection.rows[:0])] = self.worst
        self.levels[selection.ranked] = selection.levels
        self.ranked[selection.sequence] = selection.ranked

    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        return smallest(self.stamps - (self.levels[rows] << 48), hits, num_victims)

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:
        self._stamp(filled)
        self._stamp(hits[self.stamps[hits].argsort()])


class Belady(Policy):
    """Evicts what is used again last, which no policy can beat; it knows the future."""

    name = "belady"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int):
        super().__init__(num_slots, first_uses, num_levels)
        self.next_uses = first_uses.copy()

    def begin(self, selection: Selection) -> None:
        self.next_uses[selection.rows] = selection.next_uses

    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        keys = -self.next_uses[rows]
        keys[hits] = NEVER
        unneeded = (keys == -NEVER).nonzero()[0]  # many, all alike
        return unneeded[:num_victims] if len(unneeded) >= num_victims else smallest(keys, hits, num_victims)


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LRU, FIFO, Clock, Score, Belady)}
