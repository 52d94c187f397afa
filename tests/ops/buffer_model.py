"""`resolve` for one request, in plain Python."""

from __future__ import annotations

from vllm_hisparse.ops.limits import MAX_AGE, MAX_BONUS, USE_BONUS


class BufferModel:
    """The hot buffer of one request in one layer.

    Attributes:
        positions, expiries: of every slot; -1 where a slot is empty.
    """

    def __init__(self, num_rows: int, query_len: int = 1):
        self.query_len = query_len
        self.positions, self.expiries = [-1] * num_rows, [0] * num_rows

    def fits(self, first: int) -> bool:
        return first + self.query_len <= len(self.positions)

    def slot_of_new(self, position: int, first: int) -> int:
        return position if self.fits(first) else len(self.positions) - self.query_len + position - first

    def resolve(self, selected: list[int], first: int, num_new: int = 1) -> tuple[dict[int, int], list[int]]:
        """Slots by selected position, and the positions missed.

        Args:
            selected: positions, or what is none.
            first: the first new position.
            num_new: new positions.
        """
        wanted = list(dict.fromkeys(position for position in selected if 0 <= position < first))
        choose = self._fitting if self.fits(first) else self._evicting
        slots, missed = choose(wanted, first)
        new = range(first, first + num_new)
        if self.fits(first):
            for position in new:
                self._fill(position, position, first)
        return slots | {position: self.slot_of_new(position, first) for position in new}, missed

    def _fitting(self, wanted: list[int], first: int) -> tuple[dict[int, int], list[int]]:
        missed = [position for position in wanted if self.positions[position] != position]
        for position in wanted:
            if position in missed:
                self._fill(position, position, first + USE_BONUS)
            else:
                self._use(position, first)
        return {position: position for position in wanted}, missed

    def _evicting(self, wanted: list[int], first: int) -> tuple[dict[int, int], list[int]]:
        usable = range(len(self.positions) - self.query_len)
        hot = {self.positions[slot]: slot for slot in reversed(usable) if 0 <= self.positions[slot] < first}
        for slot in usable:  # a position that is hot twice
            if self.positions[slot] in wanted and hot[self.positions[slot]] != slot:
                self.positions[slot] = -1
        used = [hot[position] for position in wanted if position in hot]
        missed = [position for position in wanted if position not in hot]
        others = [slot for slot in usable if slot not in used]
        victims = sorted(others, key=lambda slot: (-self._age(slot, first), slot))[: len(missed)]
        for slot in range(len(usable), len(self.positions)):
            self.positions[slot] = -1
        for slot in used:
            self._use(slot, first)
        slots = {position: hot[position] for position in wanted if position in hot}
        for slot, position in zip(sorted(victims), missed, strict=True):
            self._fill(slot, position, first + USE_BONUS)
            slots[position] = slot
        return slots, missed

    def _age(self, slot: int, first: int) -> int:
        is_empty = not 0 <= self.positions[slot] < first
        return MAX_AGE + 1 if is_empty else max(0, min(first + MAX_BONUS - self.expiries[slot], MAX_AGE))

    def _use(self, slot: int, first: int) -> None:
        left = max(self.expiries[slot] - first, 0)
        self.expiries[slot] = first + min(left + USE_BONUS, MAX_BONUS)

    def _fill(self, slot: int, position: int, expiry: int) -> None:
        self.positions[slot], self.expiries[slot] = position, expiry
