"""The running requests of a worker: an index for each, its hot blocks, its state blocks and its host blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from vllm_hisparse.ops.kv_heads import KVHeads

# id of the first hot block -> (index in the request's block table of the first changed block, block ids from there on)
BlockTableChanges = Mapping[int, tuple[int, Sequence[int]]]

NULL_BLOCK = 0  # block of vLLM's device pool that belongs to no request


class RequestTable:
    """Finds a request's index by the id of its first hot block, on the host and on the device.

    Its tensors are static, so that a CUDA graph may read them; changes are enqueued on the current stream and never
    wait for the device.

    Args:
        num_requests: requests that can run at once.
        max_blocks: host blocks of the longest request.
        max_hot_blocks: hot blocks that a request can have.
        rows_per_hot_block: hot rows of a KV head in a block.
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
        num_hot_rows: [num_seqs + 1] int32 rows of these parts.
        hot_blocks: hot block ids by request index.
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
        rows_per_hot_block: int,
        num_device_blocks: int,
        heads: KVHeads,
        device: torch.device,
        state_columns: Sequence[int] = (),
    ):
        self.heads, self.num_requests, self.num_seqs = heads, num_requests, num_requests * heads.num_heads
        num_parts = num_device_blocks * heads.head_stride
        self.seq_indices = torch.full((num_parts,), -1, dtype=torch.int32, device=device)
        self.host_block_tables = torch.full((self.num_seqs + 1, max_blocks), -1, dtype=torch.int32, device=device)
        self.hot_block_tables = torch.zeros((self.num_seqs + 1, max_hot_blocks), dtype=torch.int32, device=device)
        self.num_hot_rows = torch.zeros(self.num_seqs + 1, dtype=torch.int32, device=device)
        self.hot_blocks: list[list[int]] = [[] for _ in range(num_requests)]
        self.state_block_tables = torch.zeros((num_requests + 1, len(state_columns)), dtype=torch.int32, device=device)
        self._state_columns = torch.tensor(state_columns, dtype=torch.int64)
        self.num_hot_rows[-1] = max_hot_blocks * rows_per_hot_block
        self._rows_per_hot_block = rows_per_hot_block
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
            indices, columns, host_ids = self._entries(changes)
            places = self._places_by_head(self.host_block_tables, indices, columns)
            self._write(self.host_block_tables, places, self.heads.host_parts(host_ids))

    def extend_state(self, changes: BlockTableChanges) -> None:
        """Append blocks of an algorithm's state to requests' tables."""
        if changes:
            indices, columns, block_ids = self._entries(changes)
            places = indices * self.state_block_tables.shape[1] + self._state_columns[columns]
            self._write(self.state_block_tables, places, block_ids)

    def change_hot(self, changes: BlockTableChanges) -> list[int]:
        """Set requests' hot blocks; return the blocks that a request did not have before."""
        if not changes:
            return []
        added, num_rows, runs = [], [], {}
        for first_hot_block_id, (first, block_ids) in changes.items():
            blocks = self.hot_blocks[self.index_of(first_hot_block_id)]
            earlier = dict.fromkeys(blocks)
            blocks[first:] = block_ids
            added += [block_id for block_id in block_ids if block_id not in earlier]
            num_rows.append(len(blocks) * self._rows_per_hot_block)
            runs[first_hot_block_id] = first, [*block_ids, *[NULL_BLOCK] * (len(earlier) - len(blocks))]
        indices, columns, changed_ids = self._entries(runs)
        places = self._places_by_head(self.hot_block_tables, indices, columns)
        self._write(self.hot_block_tables, places, self.heads.parts_of(changed_ids).t())
        seqs = self.heads.seq_indices(
            torch.tensor([self.index_of(first_hot_block_id) for first_hot_block_id in changes])
        )
        self._write(self.num_hot_rows, seqs, torch.tensor(num_rows).repeat_interleave(self.heads.num_heads))
        return added

    def remove(self, first_hot_block_id: int) -> int:
        """Forget a request; return its former index."""
        index = self._index_by_first_hot_block.pop(first_hot_block_id)
        self.seq_indices[self.heads.device_parts(first_hot_block_id)] = -1
        self.host_block_tables[self.heads.seqs(index)] = -1
        self.hot_block_tables[self.heads.seqs(index)] = self.num_hot_rows[self.heads.seqs(index)] = 0
        self.state_block_tables[index] = NULL_BLOCK
        self.hot_blocks[index] = []
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

    def _entries(self, changes: BlockTableChanges) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Flatten changes into each block's request index, its column in the table, and its id; all [blocks] int64."""
        return _flatten([self.index_of(first_hot_block_id) for first_hot_block_id in changes], changes.values())

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
        places, values = self.to_device(torch.stack((places.flatten(), values.flatten())))
        table.view(-1).index_copy_(0, places, values.int())

    def _find_seqs(self, parts: torch.Tensor) -> torch.Tensor:
        seqs = self.seq_indices[parts.long()].long()
        return torch.where(seqs < 0, self.num_seqs, seqs)


def _flatten(
    indices: Sequence[int], runs: Collection[tuple[int, Sequence[int]]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the blocks of all runs: the index of the block's run, its column, its id; all [blocks] int64.

    Args:
        indices: index of each run.
        runs: column of each run's first block, and the ids of its blocks, which are in consecutive columns.
    """
    lengths = torch.tensor([len(run) for _, run in runs])
    # Block n of the list is `n - start` columns behind the first block of its run, which is block `start` of the list.
    offsets = torch.tensor([first for first, _ in runs]) - (lengths.cumsum(0) - lengths)
    columns = torch.arange(int(lengths.sum())) + offsets.repeat_interleave(lengths)
    block_ids = torch.tensor([block_id for _, run in runs for block_id in run], dtype=torch.int64)
    return torch.tensor(indices).repeat_interleave(lengths), columns, block_ids
