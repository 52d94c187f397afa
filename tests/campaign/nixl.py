"""The prefill instance and NIXL: blocks are written at any time after a pull was posted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import KVConnectorOutput

from .adapter import block_pairs
from .checks import check
from .configuration import BLOCK_SIZE
from .rank import Memory, Rank
from .texts import BEYOND_PROMPT, ZEROED, Row, Text

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta


class Prefill:
    """A prefill instance that has computed whatever it is asked for and never forgets."""

    engine_id, host, port = "prefill", "127.0.0.1", 5600

    def __init__(self) -> None:
        self.blocks: dict[int, list[Row]] = {}
        self._block_ids = count()

    def compute(self, request_id: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """The instance's answer for a prompt: its `kv_transfer_params`."""
        rows: list[Row] = [*Text(token_ids).rows]
        rows += [BEYOND_PROMPT] * (-len(rows) % BLOCK_SIZE)
        block_ids = [next(self._block_ids) for _ in range(0, len(rows), BLOCK_SIZE)]
        for index, block_id in enumerate(block_ids):
            self.blocks[block_id] = rows[index * BLOCK_SIZE :][:BLOCK_SIZE]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(token_ids),
        }

    def answers(self, meta: ReqMeta) -> bool:
        """True if a pull reaches this instance.

        Raises:
            Finding: it asks for a rank that is not there, and vLLM's listener on this side would end.
        """
        remote = meta.remote
        if (remote.host, remote.port) != (self.host, self.port):
            return False
        ranks = (meta.tp_size, meta.dcp_size, meta.pp_size)
        check(ranks == (1, 1, 1), f"the prefill instance is asked for ranks that it does not have: {ranks}")
        return remote.engine_id == self.engine_id


@dataclass
class _Write:
    memory: Memory
    block_id: int
    rows: Sequence[Row]


@dataclass
class _Pull:
    """The pull of one rank for one request."""

    request_id: str
    fails: bool
    writes: list[_Write] = field(default_factory=list)


class Nixl:
    """The NIXL workers of one engine.

    Args:
        rng: decides when what is written and which pulls fail.
        prefill: prefill instance whose blocks are read.
        ranks: the engine's ranks.
        shares_host_pool: whether rank 0 alone pulls into the host pool.
        failure_share: share of transfers that fail.
    """

    def __init__(
        self,
        rng: random.Random,
        prefill: Prefill,
        ranks: Sequence[Rank],
        shares_host_pool: bool,
        failure_share: float,
    ):
        self.rng, self.prefill, self.ranks, self.shares_host_pool = rng, prefill, ranks, shares_host_pool
        self.failure_share = failure_share
        self.num_transfers = self.num_failures = 0
        self._pulls: list[list[_Pull]] = [[] for _ in ranks]

    @property
    def is_busy(self) -> bool:
        return any(self._pulls)

    def post(self, metadata: NixlConnectorMetadata | None) -> None:
        """Post the pulls that a step's metadata asks for; a request that has everything only lets the prefill go."""
        for request_id, meta in metadata.reqs_to_recv.items() if metadata is not None else ():
            if not meta.awaiting_kvs and not any(meta.local_block_ids):
                continue
            is_reachable = self.prefill.answers(meta)
            fails = not is_reachable or self.rng.random() < self.failure_share
            self.num_transfers += 1
            self.num_failures += fails
            failing = self.rng.randrange(len(self.ranks))
            for rank, pulls in zip(self.ranks, self._pulls, strict=True):
                pull = _Pull(request_id, not is_reachable or (fails and rank.index == failing))
                pull.writes = list(self._writes(rank, meta)) if is_reachable else []
                self.rng.shuffle(pull.writes)
                if pull.fails:
                    del pull.writes[self.rng.randint(0, len(pull.writes)) :]
                pulls.append(pull)

    def write_some(self, share: float) -> None:
        for pull in (pull for pulls in self._pulls for pull in pulls):
            while pull.writes and self.rng.random() < share:
                write = pull.writes.pop()
                write.memory.write(write.block_id, write.rows)

    def poll(self) -> list[KVConnectorOutput]:
        """Reports of every rank in this step: pulls that ended, and which of them failed."""
        results = []
        for pulls in self._pulls:
            done = [pull for pull in pulls if not pull.writes]
            pulls[:] = [pull for pull in pulls if pull.writes]
            finished, failed = {pull.request_id for pull in done}, {pull.request_id for pull in done if pull.fails}
            results.append(KVConnectorOutput(finished_recving=finished or None, failed_recving=failed))
        return results

    def _writes(self, rank: Rank, meta: ReqMeta) -> Iterator[_Write]:
        memories = (rank.host.rows, rank.host.keys if rank.layout.receives_on_host else rank.keys)
        for memory, (pairs, uncovered) in zip(memories, block_pairs(meta), strict=False):
            if memory is not rank.keys and self.shares_host_pool and rank.index:
                continue
            for local_id, remote_id in pairs:
                yield _Write(memory, local_id, self.prefill.blocks.get(remote_id, [BEYOND_PROMPT] * BLOCK_SIZE))
            for local_id in uncovered:
                yield _Write(memory, local_id, [ZEROED] * BLOCK_SIZE)
