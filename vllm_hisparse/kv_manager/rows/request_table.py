"""The running requests of a worker: an index for each, its hot blocks, its state blocks and its host blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from vllm_hisparse.ops.kv_heads import KVHeads

# handle -> first block of a run in its table, and the ids of the run's blocks
TableChanges = Mapping[int, tuple[int, Sequence[int]]]

NULL_BLOCK = 0  # of vLLM's device pool; no request's


class RequestTable:
    """Finds a request's index by its handle, the first of its hot blocks, on the host and on the device.

    Its tensors are static, so that a CUDA graph may read them; changes are enqueued on the current stream and never
    wait for the device.

    Args:
        num_requests: requests that can run at once.
        max_blocks: host blocks of the longest request.
        max_hot_blocks: hot blocks that a request can have.
        rows_per_hot_block: hot rows of a head in a block.
        num_device_blocks: blocks of vLLM's device pool.
        heads: how heads' sequences and parts of blocks are numbered.
        device: where the tables are read.
        state_columns: of each state block that the longest request has, its place in `state_tables`.

    Attributes:
        num_requests: request indices are below it; it stands for no request.
        num_seqs: sequence indices are below it; it stands for no request.
        seq_indices: [num_device_blocks * head_stride] int32 sequence index at each part of a handle, -1 elsewhere.
        hot_tables: [num_seqs + 1, max_hot_blocks] int32 parts of hot blocks; of no request, and beyond a request's
            blocks, the null block's.
        num_hot_rows: [num_seqs + 1] int32 rows of these parts.
        hot_blocks: of each request index.
        state_tables: [num_requests + 1, len(state_columns)] int32 device blocks with an algorithm's state; of no
            request, and beyond a request's blocks, the null block.
        host_tables: [num_seqs + 1, max_blocks] int32 parts of host blocks, -1 beyond. The last entry is of no
            request: steps that vLLM runs without requests (profiling, padding) read it.
    """

    def __init__(
        self,
        num_requests: int,
        max_blocks: int,
        max_hot_blocks: int,
        rows_per_hot_block: int,
        num_device_blocks: int,
        heads: KVHeads,
        device: torch.device,
        state_columns: Sequence[int] = (),
    ):
        self.heads, self.num_requests, self.num_seqs = heads, num_requests, num_requests * heads.num_heads
        num_parts = num_device_blocks * heads.head_stride
        self.seq_indices = torch.full((num_parts,), -1, dtype=torch.int32, device=device)
        self.host_tables = torch.full((self.num_seqs + 1, max_blocks), -1, dtype=torch.int32, device=device)
        self.hot_tables = torch.zeros((self.num_seqs + 1, max_hot_blocks), dtype=torch.int32, device=device)
        self.num_hot_rows = torch.zeros(self.num_seqs + 1, dtype=torch.int32, device=device)
        self.hot_blocks: list[list[int]] = [[] for _ in range(num_requests)]
        self.state_tables = torch.zeros((num_requests + 1, len(state_columns)), dtype=torch.int32, device=device)
        self._state_columns = torch.tensor(state_columns, dtype=torch.int64)
        self.num_hot_rows[-1] = max_hot_blocks * rows_per_hot_block
        self._rows_per_hot_block = rows_per_hot_block
        self._all_seqs = torch.arange(self.num_seqs, dtype=torch.int32, device=device)
        self._pin_memory = device.type != "cpu"
        self._free_indices = list(reversed(range(num_requests)))
        self._index_by_handle: dict[int, int] = {}
        self._prefills: dict[tuple[int, int], list[int]] = {}  # first and last position -> request indices

    def __len__(self) -> int:
        """Requests that run."""
        return len(self._index_by_handle)

    def add(self, handle: int) -> int:
        """Start a request without blocks; returns its index.

        Raises:
            IndexError: `num_requests` run already.
        """
        index = self._index_by_handle[handle] = self._free_indices.pop()
        self.seq_indices[self.heads.device_parts(handle)] = self._all_seqs[self.heads.seqs(index)]
        return index

    def extend(self, changes: TableChanges) -> None:
        """Set requests' host blocks."""
        if changes:
            indices, columns, host_ids = self._entries(changes)
            places = self._places_by_head(self.host_tables, indices, columns)
            self._write(self.host_tables, places, self.heads.host_parts(host_ids))

    def extend_state(self, changes: TableChanges) -> None:
        """Append blocks of an algorithm's state to requests' tables."""
        if changes:
            indices, columns, block_ids = self._entries(changes)
            places = indices * self.state_tables.shape[1] + self._state_columns[columns]
            self._write(self.state_tables, places, block_ids)

    def change_hot(self, changes: TableChanges) -> list[int]:
        """Set requests' hot blocks; returns those that their requests did not have."""
        if not changes:
            return []
        added, num_rows, runs = [], [], {}
        for handle, (first, block_ids) in changes.items():
            blocks = self.hot_blocks[self.index_of(handle)]
            earlier = dict.fromkeys(blocks)
            blocks[first:] = block_ids
            added += [block_id for block_id in block_ids if block_id not in earlier]
            num_rows.append(len(blocks) * self._rows_per_hot_block)
            runs[handle] = first, [*block_ids, *[NULL_BLOCK] * (len(earlier) - len(blocks))]
        indices, columns, block_ids = self._entries(runs)
        places = self._places_by_head(self.hot_tables, indices, columns)
        self._write(self.hot_tables, places, self.heads.parts_of(block_ids).t())
        seqs = self.heads.seq_indices(torch.tensor([self.index_of(handle) for handle in changes]))
        self._write(self.num_hot_rows, seqs, torch.tensor(num_rows).repeat_interleave(self.heads.num_heads))
        return added

    def remove(self, handle: int) -> int:
        """Forget a request; returns the index that it had."""
        index = self._index_by_handle.pop(handle)
        self.seq_indices[self.heads.device_parts(handle)] = -1
        self.host_tables[self.heads.seqs(index)] = -1
        self.hot_tables[self.heads.seqs(index)] = self.num_hot_rows[self.heads.seqs(index)] = 0
        self.state_tables[index] = NULL_BLOCK
        self.hot_blocks[index] = []
        self._free_indices.append(index)
        return index

    def index_of(self, handle: int) -> int:
        """Index of a request, below `num_requests`.

        Raises:
            KeyError: no such request runs.
        """
        return self._index_by_handle[handle]

    def expect_prefills(self, prefills: Collection[tuple[int, int, int]]) -> None:
        """Say which requests prefill in the next step.

        Args:
            prefills: handle of each, and its positions, half-open.
        """
        self._prefills = {}
        for handle, first, last in prefills:
            self._prefills.setdefault((first, last), []).append(self._index_by_handle[handle])

    def take_prefill(self, first: int, last: int) -> int | None:
        """Index of the request that prefills positions [first, last) in this step, once; None if none or several do."""
        found = self._prefills.pop((first, last), [])
        return found[0] if len(found) == 1 else None

    def find(self, handles: torch.Tensor) -> torch.Tensor:
        """Index of each request, [batch] int64; `num_requests` where there is none.

        Args:
            handles: [batch] int32 first hot blocks.
        """
        return self.heads.request_indices(self._find_seqs(self.heads.first_parts(handles)))

    def find_seqs(self, handle: torch.Tensor) -> torch.Tensor:
        """State index of each head of a request, [num_heads] int64; `num_seqs` where there is none.

        Args:
            handle: [1] int32 first hot block.
        """
        return self._find_seqs(self.heads.parts_of(handle)[0])

    def host_table(self, request_index: int | torch.Tensor) -> torch.Tensor:
        """Host blocks of requests, -1 beyond.

        Args:
            request_index: one, or [n] int64.

        Returns:
            [max_blocks] or [n, max_blocks] int32.
        """
        return self.heads.host_blocks(self.host_tables[request_index * self.heads.num_heads])

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host on the device, without waiting."""
        return tensor.pin_memory().to(self.seq_indices.device, non_blocking=True) if self._pin_memory else tensor

    def check_integrity(self) -> None:
        """Check that every index is free or owned, and found by its handle. Waits for the device.

        Raises:
            AssertionError: the first violation.
        """
        indices = [*self._index_by_handle.values(), *self._free_indices]
        assert sorted(indices) == list(range(self.num_requests)), "an index is lost or owned twice"
        for handle, index in self._index_by_handle.items():
            found = self.seq_indices[self.heads.device_parts(handle)]
            assert torch.equal(found, self._all_seqs[self.heads.seqs(index)]), "a head has the sequence of another"
        assert (self.seq_indices >= 0).sum() == len(self) * self.heads.num_heads, "a handle of no request is found"
        for index in self._free_indices:
            assert (self.host_tables[self.heads.seqs(index)] == -1).all(), "a free index has host blocks"
            assert not self.hot_tables[self.heads.seqs(index)].any(), "a free index has hot blocks"
            assert not self.state_tables[index].any(), "a free index has blocks of an algorithm's state"

    def _entries(self, changes: TableChanges) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Request index, place in its request's table, and id of each block of changes; all [blocks] int64."""
        return _flatten([self.index_of(handle) for handle in changes], changes.values())

    def _places_by_head(self, table: torch.Tensor, indices: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Where blocks go in a flat table by sequence index: [num_heads, blocks] int64."""
        seqs = self.heads.seq_indices(indices).view(-1, self.heads.num_heads)
        return seqs.t() * table.shape[1] + columns

    def _write(self, table: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries of a table, in one copy to the device.

        Args:
            places: int64, in the flat table; each once.
            values: int64, in the shape of `places`.
        """
        places, values = self.to_device(torch.stack((places.flatten(), values.flatten())))
        table.view(-1).index_copy_(0, places, values.int())

    def _find_seqs(self, parts: torch.Tensor) -> torch.Tensor:
        seqs = self.seq_indices[parts.long()].long()
        return torch.where(seqs < 0, self.num_seqs, seqs)


def _flatten(
    indices: Sequence[int], runs: Collection[tuple[int, Sequence[int]]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The runs' blocks one after the other: index of the run, place, id; all [blocks] int64.

    Args:
        indices: of each run.
        runs: place of the first block, and ids of all.
    """
    lengths = torch.tensor([len(run) for _, run in runs])
    # The n-th of all blocks is `n - start` blocks behind the first one of its run.
    offsets = torch.tensor([first for first, _ in runs]) - (lengths.cumsum(0) - lengths)
    columns = torch.arange(int(lengths.sum())) + offsets.repeat_interleave(lengths)
    block_ids = torch.tensor([block_id for _, run in runs for block_id in run], dtype=torch.int64)
    return torch.tensor(indices).repeat_interleave(lengths), columns, block_ids
