"""How many consecutive blocks does a prefill instance give to a prompt, and how does this change with its age?

    python -m benchmarks.import_pieces

A decode instance can read blocks in one piece that follow each other in the prefill instance's memory. Where layers are
outermost (vLLM's default layouts), these are runs of consecutive block ids. vLLM's own `KVCacheManager` hands out the
blocks here: prompts arrive one after the other, share the tokens of each step, keep their blocks until they have been
pulled, and then free them. The pool is always full. It starts in order, and every prompt cuts it further.

A row has the pieces of the last prompts before the pool had been filled `fills` times.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec
from vllm.v1.request import Request

from benchmarks.common import RESULTS, show, write_result
from vllm_hisparse.layout import BLOCK_SIZE

STEP_TOKENS = 8192
SHORTEST, LONGEST = 4096, 32768  # tokens of a prompt
NUM_PULLED = 3  # prompts whose blocks wait to be pulled
LAST_PROMPTS = 40  # that a row describes
FILLS = (1, 3, 10, 30, 100, 300)

app = typer.Typer(add_completion=False)


def fast_hash(value: Any) -> bytes:
    return hash(value).to_bytes(8, "little", signed=True)


@dataclass
class Prompt:
    request: Request
    num_computed: int


class PrefillInstance:
    """A pool of blocks, and the prompts that use it.

    Args:
        num_blocks: blocks of the pool.
        num_together: prompts that share the tokens of a step.
        continued_share: share of the prompts that continue an earlier one, whose blocks they find while these are kept.
        seed: seed of lengths and choices.
    """

    def __init__(self, num_blocks: int, num_together: int, continued_share: float, seed: int = 0):
        spec = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=656, dtype=torch.uint8)
        tensor = KVCacheTensor(size=num_blocks, layers=["layer"], layer_stride=0, block_stride=0)
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self._kv = KVCacheManager(config, LONGEST + BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, fast_hash)
        self._random, self._num_together, self._continued_share = random.Random(seed), num_together, continued_share
        self._running: list[Prompt] = []
        self._unpulled: deque[Request] = deque()
        self._earlier: deque[list[int]] = deque(maxlen=64)
        self._num_prompts = 0
        self.num_new_blocks = 0

    def step(self) -> list[list[int]]:
        """Compute a step; returns the block ids of each prompt that has ended."""
        while len(self._running) < self._num_together:
            self._running.append(self._arrive())
        ended, share = [], STEP_TOKENS // len(self._running)
        for prompt in list(self._running):
            request = prompt.request
            num_new = min(share, request.num_tokens - prompt.num_computed)
            while (blocks := self._kv.allocate_slots(request, num_new)) is None:
                self._kv.free(self._unpulled.popleft())
            self.num_new_blocks += len(blocks.blocks[0])
            prompt.num_computed = request.num_computed_tokens = prompt.num_computed + num_new
            if prompt.num_computed == request.num_tokens:
                self._running.remove(prompt)
                self._unpulled.append(request)
                ended.append(self._kv.get_block_ids(request.request_id)[0])
        while len(self._unpulled) > NUM_PULLED:
            self._kv.free(self._unpulled.popleft())
        return ended

    def _arrive(self) -> Prompt:
        self._num_prompts += 1
        text = self._text()
        self._earlier.append(text)
        request = Request(str(self._num_prompts), text, SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        blocks, num_cached, *_ = self._kv.get_computed_blocks(request)
        if num_cached:
            while self._kv.allocate_slots(request, 1, num_cached, blocks) is None:
                self._kv.free(self._unpulled.popleft())
            request.num_computed_tokens = num_cached
        return Prompt(request, num_cached)

    def _text(self) -> list[int]:
        if self._earlier and self._random.random() < self._continued_share:
            text = self._random.choice(self._earlier)
            return (text + [self._num_prompts] * self._random.randint(64, 4096))[:LONGEST]
        return [self._num_prompts] * self._random.randint(SHORTEST, LONGEST)


def piece_sizes(block_ids: list[int]) -> np.ndarray:
    """Blocks of each run of consecutive ids, in any order of the ids."""
    ids = np.unique(block_ids)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    return np.diff(starts, append=len(ids))


def measure(num_blocks: int, num_together: int, continued_share: float, max_s: float) -> list[dict[str, Any]]:
    """Return a row for each age that is reached in time."""
    instance, start, rows = PrefillInstance(num_blocks, num_together, continued_share), time.process_time(), []
    last: deque[np.ndarray] = deque(maxlen=LAST_PROMPTS)
    num_prompts = 0
    for fills in FILLS:
        while instance.num_new_blocks < fills * num_blocks:
            if time.process_time() - start > max_s:
                return rows
            ended = instance.step()
            num_prompts += len(ended)
            last.extend(map(piece_sizes, ended))
        sizes = np.concatenate(last)
        rows.append(
            {
                "pool_blocks": num_blocks,
                "together": num_together,
                "continued": continued_share,
                "fills": fills,
                "prompts": num_prompts,
                "blocks_per_prompt": round(float(sizes.sum()) / len(last), 1),
                "pieces_per_prompt": round(len(sizes) / len(last), 1),
                "mean_piece": round(float(sizes.mean()), 2),
                "mean_piece_of_a_byte": round(float((sizes**2).sum() / sizes.sum()), 2),
            }
        )
    return rows


@app.command()
def run(
    ctx: typer.Context,
    max_s: Annotated[float, typer.Option(help="CPU seconds of a case")] = 30.0,
    output: Annotated[Path, typer.Option(help="result file")] = RESULTS / "cpu" / "import_pieces.json",
) -> None:
    """Measure pools of two sizes, with one prompt and four prompts at a time, and with conversations."""
    init_none_hash(fast_hash)
    rows = []
    for num_blocks in (4096, 16384):
        for num_together, continued_share in ((1, 0.0), (4, 0.0), (4, 0.5)):
            rows += measure(num_blocks, num_together, continued_share, max_s)
    show("Blocks of a piece", rows)
    write_result(output, ctx, "benchmarks.import_pieces", rows)


if __name__ == "__main__":
    app()
