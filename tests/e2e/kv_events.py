"""A router's view of an engine's prefix cache, from the events that the engine publishes."""

from __future__ import annotations

from typing import Any, Self

import msgspec
import zmq
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, EventBatch, ZmqEventPublisher

from tools.harness.processes import LOOPBACK

TIMEOUT_MS = 30_000


class Events(EventBatch):
    events: list[BlockStored | BlockRemoved]


class CachedPrefixes:
    """Blocks of the host pool by their parents and tokens, except those with extra keys, such as salts."""

    def __init__(self) -> None:
        self._by_tokens: dict[tuple[Any, tuple[int, ...]], Any] = {}
        self._by_hash: dict[Any, tuple[Any, tuple[int, ...]]] = {}

    @classmethod
    def replay(cls, port: int) -> Self:
        """Ask an engine for all events since its start.

        Args:
            port: port of its `replay_endpoint`.
        """
        found, decoder = cls(), msgspec.msgpack.Decoder(Events)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            socket.connect(f"tcp://{LOOPBACK}:{port}")
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                *_, number, payload = socket.recv_multipart()
                if number == ZmqEventPublisher.END_SEQ:
                    return found
                for event in decoder.decode(payload).events:
                    found.follow(event)

    def follow(self, event: BlockStored | BlockRemoved) -> None:
        assert event.medium == MEDIUM_CPU
        if isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            for index, block_hash in enumerate(event.block_hashes):
                if event.extra_keys and event.extra_keys[index]:
                    return  # the next blocks follow this one
                key = parent, tuple(event.token_ids[index * size : (index + 1) * size])
                self._by_tokens[key], self._by_hash[block_hash] = block_hash, key
                parent = block_hash
        else:
            for block_hash in event.block_hashes:
                if block_hash in self._by_hash:
                    del self._by_tokens[self._by_hash.pop(block_hash)]

    def num_tokens(self, prompt: list[int], block_size: int) -> int:
        """Return the number of leading tokens of a prompt that the host pool holds."""
        parent = None
        for start in range(0, len(prompt), block_size):
            parent = self._by_tokens.get((parent, tuple(prompt[start : start + block_size])))
            if parent is None:
                return start
        return len(prompt)
