"""Eviction policies for `replay`: they choose the slots of a buffer that are filled next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from vllm_hisparse.ops.limits import MAX_AGE, MAX_BONUS, USE_BONUS

NEVER = np.iinfo(np.int64).max  # time of the next use of a row that is not used again


@dataclass(frozen=True)
class Selection:
    """The selection of one layer of one request in a step. A row id names one position of this request and layer.

    Attributes:
        sequence: number of the layer of the request.
        newest: newest position. Its row is always hot, and is in none of the attributes below.
        rows: [n] int64 row ids of the selection.
        ranked: [m] int64 row ids of all known ranks, the selection included.
        levels: [m] int8 group of each row in `ranked`.
        next_uses: [n] int64 time at which each row in `rows` is selected again, or `NEVER`.
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
        num_slots: slots of the buffer; they are empty at the start.
        first_uses: [num_rows + 1] int64 time of each row's first use, or `NEVER`; the last entry is for empty slots.
        num_levels: number of groups of ranks.
        num_sequences: number of sequences that share the buffer and take turns in a step.
    """

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int, num_sequences: int = 1):
        self.num_slots, self.num_rows, self.num_sequences = num_slots, len(first_uses) - 1, num_sequences

    def seed(self, slots: np.ndarray) -> None:  # noqa: B027 (see `begin`)
        """Record slots that are filled with rows that no step has selected: [n] int64.

        These are the prompt's last rows, in their order, and later the newest row of a sequence that fits.
        """

    def begin(self, selection: Selection) -> None:  # noqa: B027 (few policies look at a selection)
        """Prepare for a selection; called once per step and layer, before `victims`."""

    @abstractmethod
    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        """Choose slots to fill, in the order in which they are filled.

        Args:
            rows: [num_slots] int64 row id in each slot, -1 in an empty slot.
            hits: [n] int64 slots that this step uses; they must not be chosen.
            num_victims: number of slots to choose, at most the number of slots that are not in `hits`.
        """

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:  # noqa: B027 (see `begin`)
        """Record the slots that this step used, and those that it filled, in the order of `victims`: [n] int64 each."""


def smallest(keys: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
    """Return the slots with the smallest keys, ascending, without hits: [num_victims] int64.

    Args:
        keys: [num_slots] int64, below `NEVER`; overwritten.
        hits: [n] int64 slots.
    """
    keys[hits] = NEVER
    found = np.argpartition(keys, num_victims - 1)[:num_victims]
    return found[keys[found].argsort()]


class FIFO(Policy):
    """Evicts the row whose slot was filled first."""

    name = "fifo"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int, num_sequences: int = 1):
        super().__init__(num_slots, first_uses, num_levels, num_sequences)
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
    """Evicts the least recently used row.

    Empty slots come first, then slots in the order of their last use (uses more than `MAX_AGE` steps ago are equal),
    then in the order of their numbers. Slots are filled in the order of their numbers.

    Attributes:
        stamps: [num_slots] int64 turn of each slot's last use; -1 where it was empty from the start.
        clock: number of the present turn.
        least_ages: ages up to this many steps below 0 are told apart, too.
    """

    name = "lru"
    least_ages = 0

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int, num_sequences: int = 1):
        super().__init__(num_slots, first_uses, num_levels, num_sequences)
        self.stamps, self.clock = np.full(num_slots, -1), -1

    def seed(self, slots: np.ndarray) -> None:
        self.stamps[slots] = self.clock + 1 + np.arange(-len(slots), 0)

    def begin(self, selection: Selection) -> None:
        self.clock += 1

    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        max_age = (MAX_AGE - self.least_ages) * self.num_sequences
        keys = np.where(rows < 0, -1, np.maximum(self.stamps - (self.clock - max_age), 0))
        return np.sort(smallest(keys * self.num_slots + np.arange(self.num_slots), hits, num_victims))

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:
        self.stamps[hits] = self.stamps[filled] = self.clock


class LRFU(LRU):
    """Evicts the row that expires first, as the plugin does (`SwapInOps.resolve`): a use moves a row's expiry
    `USE_BONUS` steps on, from the present step if it is earlier, to at most `MAX_BONUS` steps after the present one.

    It is a form of LRFU (least recently, frequently used), in integers. Stamps are expiries here.
    """

    name = "lrfu"
    least_ages = MAX_BONUS

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:
        bonus, most = USE_BONUS * self.num_sequences, MAX_BONUS * self.num_sequences
        expiries = np.maximum(self.stamps[hits], self.clock) + bonus
        self.stamps[hits] = np.minimum(expiries, self.clock + most)
        self.stamps[filled] = self.clock + bonus


class Clock(Policy):
    """A hand goes round the slots. It spares a slot that was used since its last visit, and evicts any other."""

    name = "clock"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int, num_sequences: int = 1):
        super().__init__(num_slots, first_uses, num_levels, num_sequences)
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
        else:  # the hand goes round again
            spared = order[self.was_used[order]]
            self.was_used[order] = False
            chosen = np.concatenate((order[unused], spared[: num_victims - len(unused)]))
        self.hand = (int(chosen[-1]) + 1) % self.num_slots
        return chosen

    def touch(self, hits: np.ndarray, filled: np.ndarray) -> None:
        self.was_used[hits] = True
        self.was_used[filled] = False


class Score(FIFO):
    """Evicts the row that the indexer ranks lowest in this step, as far as the trace has ranks.

    Among rows of equal rank, the least recently used one is evicted; among rows of the same step, filled ones before
    hits.
    """

    name = "score"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int, num_sequences: int = 1):
        super().__init__(num_slots, first_uses, num_levels, num_sequences)
        self.levels = np.full(self.num_rows + 1, num_levels, np.int64)  # by row id; a lower rank has a higher level
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
    """Evicts the row whose next use is farthest in the future. No policy can be better."""

    name = "belady"

    def __init__(self, num_slots: int, first_uses: np.ndarray, num_levels: int, num_sequences: int = 1):
        super().__init__(num_slots, first_uses, num_levels, num_sequences)
        self.next_uses = first_uses.copy()

    def begin(self, selection: Selection) -> None:
        self.next_uses[selection.rows] = selection.next_uses

    def victims(self, rows: np.ndarray, hits: np.ndarray, num_victims: int) -> np.ndarray:
        keys = -self.next_uses[rows]
        keys[hits] = NEVER
        unneeded = (keys == -NEVER).nonzero()[0]  # many, all alike
        return unneeded[:num_victims] if len(unneeded) >= num_victims else smallest(keys, hits, num_victims)


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LRFU, LRU, FIFO, Clock, Score, Belady)}
