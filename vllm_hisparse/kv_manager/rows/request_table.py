"""The running requests of a worker: an index for each, its hot blocks, its state blocks and its host blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch

from vllm_hisparse.kv_manager.rows.row_classes import RowClasses
from vllm_hisparse.ops.base import MovedRequests
from vllm_hisparse.ops.kv_heads import KVHeads

# id of the first hot block -> (index in the request's block table of the first changed block, block ids from there on)
BlockTableChanges = Mapping[int, tuple[int, Sequence[int]]]

NULL_BLOCK = 0  # block of vLLM's device pool that belongs to no request


@dataclass(frozen=True)
class HotBlockChanges:
    """Requests whose hot blocks have changed. Tensors are on the device.

    Attributes:
        seqs: [requests * num_heads] int64 sequence indices of the requests.
        added: [n] int64 blocks that a request did not have before.
        moved: the requests that have lost a block, or have another one in its place; once for each row class.
    """

    seqs: torch.Tensor
    added: torch.Tensor
    moved: tuple[MovedRequests, ...]


class RequestTable:
    """Finds a request's index by the id of its first hot block, on the host and on the device.

    Its tensors are static, so that a CUDA graph may read them; changes are enqueued on the current stream and never
    wait for the device.

    Args:
        num_requests: requests that can run at once.
        max_blocks: host blocks of the longest request.
        max_hot_blocks: hot blocks that a request can have.
        classes: the layers by their hot rows of a KV head in a block.
        num_device_blocks: blocks of vLLM's device pool.
        heads: numbering of KV heads' sequences and of their parts of blocks.
        device: device that reads the tables.
        state_columns: column in `state_block_tables` of each state block of the longest request.

    Attributes:
        num_requests: upper bound of request indices; as an index, it stands for no request.
        num_seqs: upper bound of sequence indices; as an index, it stands for no request.
        seq_indices: [num_device_blocks * head_stride] int32 sequence index at each part of a request's first hot block,
            -1 elsewhere.
        hot_block_tables: [num_seqs + 1, max_hot_blocks] int32 parts of hot blocks. Entries beyond a request's blocks,
            and the entries for no request, name the null block.
        num_hot_rows: [row classes, num_seqs + 1] int32 rows of these parts in a layer of each class.
        num_hot_blocks: [num_requests] int64 hot blocks of each request, on the host.
        has_equal_rows: [num_seqs + 1] int32, as in `DecodeMetadata`; None: no request can have equal rows.
        state_block_tables: [num_requests + 1, len(state_columns)] int32 device blocks with an algorithm's state.
            Entries beyond a request's blocks, and the entries for no request, name the null block.
        host_block_tables: [num_seqs + 1, max_blocks] int32 parts of host blocks, -1 beyond a request's blocks. Steps
            that vLLM runs without requests (profiling, padding) read the last row, which is for no request.
    """

    def __init__(
        self,
        num_requests: int,
        max_blocks: int,
        max_hot_blocks: int,
        classes: RowClasses,
        num_device_blocks: int,
        heads: KVHeads,
        device: torch.device,
        state_columns: Sequence[int] = (),
    ):
        self.heads, self.num_requests, self.num_seqs = heads, num_requests, num_requests * heads.num_heads
        self.classes = classes
        num_parts = num_device_blocks * heads.head_stride
        self.seq_indices = torch.full((num_parts,), -1, dtype=torch.int32, device=device)
        self.host_block_tables = torch.full((self.num_seqs + 1, max_blocks), -1, dtype=torch.int32, device=device)
        self.hot_block_tables = torch.zeros((self.num_seqs + 1, max_hot_blocks), dtype=torch.int32, device=device)
        self.num_hot_rows = torch.zeros((len(classes), self.num_seqs + 1), dtype=torch.int32, device=device)
        self.num_hot_blocks = np.zeros(num_requests, np.int64)
        self.state_block_tables = torch.zeros((num_requests + 1, len(state_columns)), dtype=torch.int32, device=device)
        self._state_columns = torch.tensor(state_columns, dtype=torch.int64)
        self.has_equal_rows: torch.Tensor | None = None
        if classes.equal_rows:
            self.has_equal_rows = torch.zeros(self.num_seqs + 1, dtype=torch.int32, device=device)
        self._has_equal_rows = np.zeros(num_requests, np.bool_)  # on the host
        self._rows_per_hot_block = np.array(classes.rows_per_block)[:, None]
        self.num_hot_rows[:, -1:] = torch.from_numpy(max_hot_blocks * self._rows_per_hot_block)
        # Ids of hot blocks, on the host; those beyond `num_hot_blocks` have no meaning.
        self._hot_blocks = np.zeros((num_requests, max_hot_blocks), np.int32)
        self._former_owners = np.full(num_device_blocks, -1, np.int32)  # used by `change_hot`; -1 between its calls
        self._all_seqs = torch.arange(self.num_seqs, dtype=torch.int32, device=device)
        self._pin_memory = device.type != "cpu"
        self._free_indices = list(reversed(range(num_requests)))
        self._index_by_first_hot_block: dict[int, int] = {}
        self._prefills: dict[tuple[int, int], list[int]] = {}  # first and last position -> request indices

    def __len__(self) -> int:
        """Number of running requests."""
        return len(self._index_by_first_hot_block)

    def add(self, first_hot_block_id: int) -> int:
        """Start a request without blocks; return its index.

        Raises:
            IndexError: `num_requests` requests run already.
        """
        index = self._index_by_first_hot_block[first_hot_block_id] = self._free_indices.pop()
        self.seq_indices[self.heads.device_parts(first_hot_block_id)] = self._all_seqs[self.heads.seqs(index)]
        return index

    def extend(self, changes: BlockTableChanges) -> None:
        """Append host blocks to requests' tables."""
        if changes:
            indices, columns, host_ids = map(torch.from_numpy, self._entries(changes))
            places = self._places_by_head(self.host_block_tables, indices, columns)
            self._write(self.host_block_tables, places, self.heads.host_parts(host_ids))

    def extend_state(self, changes: BlockTableChanges) -> None:
        """Append blocks of an algorithm's state to requests' tables."""
        if changes:
            indices, columns, block_ids = map(torch.from_numpy, self._entries(changes))
            places = indices * self.state_block_tables.shape[1] + self._state_columns[columns]
            self._write(self.state_block_tables, places, block_ids)

    def change_hot(
        self, changes: BlockTableChanges, equal_rows: Mapping[int, bool] = MappingProxyType({})
    ) -> HotBlockChanges:
        """Set requests' hot blocks, in one copy to the device.

        Args:
            changes: first hot block id -> change.
            equal_rows: first hot block id -> True if the request's hot blocks are divided equally among layers from now
                on, False if they are not; these requests are in `changes` with all of their blocks, and all of these
                count as added. Other requests' blocks are divided as before; a new request's are not divided equally.

        Raises:
            KeyError: no such request runs.
            ValueError: a change begins behind the end of a request's blocks.
        """
        indices = np.fromiter(map(self.index_of, changes), np.int64, len(changes))
        is_divided_anew = np.zeros(self.num_requests, np.bool_)
        for first_hot_block_id, is_equal in equal_rows.items():
            index = self.index_of(first_hot_block_id)
            assert changes[first_hot_block_id][0] == 0, "blocks that are divided anew are not sent again"
            self._has_equal_rows[index], is_divided_anew[index] = is_equal, True
        firsts, lengths, block_ids = _flatten(changes.values())
        earlier, later = self.num_hot_blocks[indices], firsts + lengths
        rows, columns = _spread(indices, firsts, lengths)
        # Blocks from the first changed one on, before the change. Earlier blocks stay, and a request has a block once.
        former_rows, former_columns = _spread(indices, firsts, earlier - firsts)
        former_ids = self._hot_blocks[former_rows, former_columns]
        self._former_owners[former_ids] = np.where(is_divided_anew[former_rows], -1, former_rows)
        added_ids = block_ids[self._former_owners[block_ids] != rows]
        self._former_owners[former_ids] = -1
        self._hot_blocks[rows, columns] = block_ids
        self.num_hot_blocks[indices] = later

        left_rows, left_columns = _spread(indices, later, np.maximum(earlier - later, 0))
        set_rows, set_columns = np.concatenate((rows, left_rows)), np.concatenate((columns, left_columns))
        set_ids = np.concatenate((block_ids, np.full_like(left_rows, NULL_BLOCK)))
        places = self._places_by_head(self.hot_block_tables, *map(torch.from_numpy, (set_rows, set_columns)))
        parts = self.heads.parts_of(torch.from_numpy(set_ids)).t()
        seqs = self.heads.seq_indices(torch.from_numpy(indices))
        is_equal = self._has_equal_rows[indices]
        rows_per_block = np.where(is_equal, self.classes.equal_rows, self._rows_per_hot_block)
        num_rows = torch.from_numpy(later * rows_per_block).repeat_interleave(self.heads.num_heads, 1)
        has_moved = firsts < earlier
        num_blocks = later[has_moved]
        num_classes = len(self.classes)
        of_moved = np.full((2 + num_classes, len(num_blocks)), -1)
        of_moved[:2] = indices[has_moved] * self.heads.num_heads, num_blocks
        of_seqs = torch.from_numpy(is_equal.astype(np.int64)).repeat_interleave(self.heads.num_heads)
        of_blocks = torch.from_numpy(added_ids), torch.from_numpy(of_moved)
        changed = self._upload(places, parts, seqs, num_rows, of_seqs, *of_blocks)
        places, parts, seqs, num_rows, of_seqs, added, moved_values = changed
        self.hot_block_tables.view(-1).index_copy_(0, places, parts.int())
        self.num_hot_rows.index_copy_(1, seqs, num_rows.view(num_classes, -1).int())
        if self.has_equal_rows is not None:
            self.has_equal_rows.index_copy_(0, seqs, of_seqs.int())
        moved_seqs, num_left, *latest = moved_values.view(2 + num_classes, -1)
        most_blocks = int(num_blocks.max(initial=0))
        moved = tuple(MovedRequests(moved_seqs, num_left, each, most_blocks) for each in latest)
        return HotBlockChanges(seqs, added, moved)

    def divides_equally(self, index: int) -> bool:
        """Return True if a request's hot blocks are divided equally among layers."""
        return bool(self._has_equal_rows[index])

    def hot_blocks_of(self, index: int) -> np.ndarray:
        """Hot block ids of a request: [n] int64."""
        return self._hot_blocks[index, : self.num_hot_blocks[index]].astype(np.int64)

    def seqs_of(self, index: int) -> torch.Tensor:
        """Sequence indices of a request: [num_heads] int64, on the device."""
        return self._all_seqs[self.heads.seqs(index)].long()

    def remove(self, first_hot_block_id: int) -> int:
        """Forget a request; return its former index."""
        index = self._index_by_first_hot_block.pop(first_hot_block_id)
        self.seq_indices[self.heads.device_parts(first_hot_block_id)] = -1
        self.host_block_tables[self.heads.seqs(index)] = -1
        self.hot_block_tables[self.heads.seqs(index)] = self.num_hot_rows[:, self.heads.seqs(index)] = 0
        self.state_block_tables[index] = NULL_BLOCK
        self.num_hot_blocks[index] = 0
        self._has_equal_rows[index] = False
        self._free_indices.append(index)
        return index

    def index_of(self, first_hot_block_id: int) -> int:
        """Index of a request, below `num_requests`.

        Raises:
            KeyError: no such request runs.
        """
        return self._index_by_first_hot_block[first_hot_block_id]

    def expect_prefills(self, prefills: Collection[tuple[int, int, int]]) -> None:
        """Set the requests that prefill in the next step.

        Args:
            prefills: (first_hot_block_id, first, last) of each request, which computes positions [first, last).
        """
        self._prefills = {}
        for first_hot_block_id, first, last in prefills:
            self._prefills.setdefault((first, last), []).append(self._index_by_first_hot_block[first_hot_block_id])

    def take_prefill(self, first: int, last: int) -> int | None:
        """Take the index of the request that prefills positions [first, last) in this step.

        Returns:
            The index; None at a second call, and if no request or several requests prefill these positions.
        """
        found = self._prefills.pop((first, last), [])
        return found[0] if len(found) == 1 else None

    def find(self, first_hot_block_ids: torch.Tensor) -> torch.Tensor:
        """Index of each request, [batch] int64; `num_requests` for an unknown block.

        Args:
            first_hot_block_ids: [batch] int32.
        """
        return self.heads.request_indices(self._find_seqs(self.heads.first_parts(first_hot_block_ids)))

    def find_seqs(self, first_hot_block_id: torch.Tensor) -> torch.Tensor:
        """Sequence index of each KV head of a request, [num_heads] int64; `num_seqs` for an unknown block.

        Args:
            first_hot_block_id: [1] int32.
        """
        return self._find_seqs(self.heads.parts_of(first_hot_block_id)[0])

    def host_block_table(self, request_index: int | torch.Tensor) -> torch.Tensor:
        """Host blocks of requests, -1 beyond a request's blocks.

        Args:
            request_index: one index, or [n] int64.

        Returns:
            [max_blocks] or [n, max_blocks] int32.
        """
        return self.heads.host_blocks(self.host_block_tables[request_index * self.heads.num_heads])

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the host to the device, without waiting."""
        return tensor.pin_memory().to(self.seq_indices.device, non_blocking=True) if self._pin_memory else tensor

    def check_integrity(self) -> None:
        """Check that every index is free or owned, and found by its first hot block. Waits for the device.

        Raises:
            AssertionError: the first violation.
        """
        indices = [*self._index_by_first_hot_block.values(), *self._free_indices]
        assert sorted(indices) == list(range(self.num_requests)), "an index is lost or owned twice"
        for first_hot_block_id, index in self._index_by_first_hot_block.items():
            found = self.seq_indices[self.heads.device_parts(first_hot_block_id)]
            assert torch.equal(found, self._all_seqs[self.heads.seqs(index)]), "a head has the sequence of another"
        assert (self.seq_indices >= 0).sum() == len(self) * self.heads.num_heads, (
            "a first hot block of no request is found"
        )
        for index in self._free_indices:
            assert (self.host_block_tables[self.heads.seqs(index)] == -1).all(), "a free index has host blocks"
            assert not self.hot_block_tables[self.heads.seqs(index)].any(), "a free index has hot blocks"
            assert not self.state_block_tables[index].any(), "a free index has blocks of an algorithm's state"

    def _entries(self, changes: BlockTableChanges) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Flatten changes into each block's request index, its column in the table, and its id; all [blocks] int64."""
        firsts, lengths, block_ids = _flatten(changes.values())
        indices = np.fromiter(map(self.index_of, changes), np.int64, len(changes))
        return *_spread(indices, firsts, lengths), block_ids

    def _places_by_head(self, table: torch.Tensor, indices: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Places of blocks in a flattened table that has a row per sequence: [num_heads, blocks] int64."""
        seqs = self.heads.seq_indices(indices).view(-1, self.heads.num_heads)
        return seqs.t() * table.shape[1] + columns

    def _write(self, table: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries of a table, in one copy to the device.

        Args:
            places: int64 indices into the flattened table, each index once.
            values: int64, in the shape of `places`.
        """
        places, values = self._upload(places, values)
        table.view(-1).index_copy_(0, places, values.int())

    def _upload(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy tensors of the host to the device, all together; they become flat.

        Args:
            tensors: int64 tensors of any shapes.
        """
        return self.to_device(torch.cat([each.flatten() for each in tensors])).split([each.numel() for each in tensors])

    def _find_seqs(self, parts: torch.Tensor) -> torch.Tensor:
        seqs = self.seq_indices[parts.long()].long()
        return torch.where(seqs < 0, self.num_seqs, seqs)


def _flatten(runs: Collection[tuple[int, Sequence[int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First column and number of blocks of each run, [runs] int64 each; ids of the blocks of all runs, [blocks] int64.

    Args:
        runs: column of each run's first block, and the ids of its blocks, which are in consecutive columns.
    """
    firsts = np.fromiter((first for first, _ in runs), np.int64, len(runs))
    lengths = np.fromiter((len(run) for _, run in runs), np.int64, len(runs))
    # NOTE: numpy and torch make arrays of lists slowly.
    block_ids = np.fromiter(chain.from_iterable(run for _, run in runs), np.int64, lengths.sum())
    return firsts, lengths, block_ids


def _spread(indices: np.ndarray, firsts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List the places of all runs: the index of the place's run, and its column; [places] int64 each.

    Args:
        indices, firsts, lengths: [runs] int64 index, first column and number of columns of each run.
    """
    # Place n of the list is `n - start` columns behind the first of its run, which is place `start` of the list.
    offsets = firsts - (lengths.cumsum() - lengths)
    return indices.repeat(lengths), np.arange(lengths.sum()) + offsets.repeat(lengths)
