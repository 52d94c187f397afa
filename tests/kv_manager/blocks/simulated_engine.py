"""An engine that takes no time: steps last as long as those that were measured at full depth on an H200.

61 layers of DeepSeek-V3.2's sizes, fp8 KV in 24 GiB of device memory, `device_buffer_size` 4096. Requests share the
device memory as `lending.divide` divides it, and miss what LRU buffers of these sizes miss. Workers report counts and
ages as real ones do: every 16 steps, some steps late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vllm_hisparse.kv_manager.blocks.admission import AdmissionControl, Demand
from vllm_hisparse.kv_manager.blocks.lending import divide
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.usage import SIZES, Usage
from vllm_hisparse.layout import KVLayout

TOP_K, NUM_LAYERS, ROW_BYTES = 2048, 61, 656
STEPS_PER_REPORT, STEPS_LATE = 16, 3
MissedShare = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (hot rows, tokens) -> share of a selection


def hot_spec() -> HotBufferSpec:
    layout = KVLayout(ROW_BYTES, 132, NUM_LAYERS, NUM_LAYERS)
    full = MLAAttentionSpec(
        block_size=layout.block_size, num_kv_heads=1, head_size=576, dtype=torch.uint8, state_content_bytes=ROW_BYTES
    )
    return HotBufferSpec.from_mla_spec(full, layout, 2 * TOP_K, elastic=True)


def independent(kept: float) -> MissedShare:
    """A share `kept` of a selection stays; the rest moves to positions that are independent of all before."""

    def missed(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return np.where(rows >= tokens, 0.0, (1 - kept) * np.clip((tokens - rows) / (tokens - TOP_K), 0, 1))

    return missed


def traced(steepness: float = 0.75, first: float = 0.4) -> MissedShare:
    """Misses that fall with a power of the rows, to zero if all are hot, as in recorded traces: in a sequence of 33
    top-k, 22% with 2 top-k, 12% with 4, 6% with 8.
    """

    def missed(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        last = np.maximum(tokens / TOP_K, 1.0) ** -steepness
        share = first * (np.maximum(rows / TOP_K, 1.0) ** -steepness - last) / np.maximum(1 - last, 1e-9)
        return np.where(rows >= tokens, 0.0, share)

    return missed


@dataclass(frozen=True)
class Costs:
    """Time of a step in milliseconds, from `benchmarks/results/h200/full_depth.json` and its notes.

    Attributes:
        fixed: weights and launches: one request of 16K takes 19.8 ms.
        per_request: 16 requests of 32K take 23.9 ms, 43 of 12K 33.5 ms; 56 of 32K, but for copies, 35 ms.
        per_mb: copies that a step waits for: 589 MB of 56 requests of 32K make 35 ms 46 ms in microbatches, 847 MB of
            56 of 34K 52 ms; without, 100 of 12K wait for 4.6 GB 90 ms.
    """

    fixed: float = 19.5
    per_request: float = 0.3
    per_mb: float = 0.0195

    def seconds(self, num_requests: float, missed_rows: float) -> float:
        """Args: requests of the step; rows that they miss in a layer, summed over the requests."""
        copied_mb = missed_rows * NUM_LAYERS * ROW_BYTES / 1e6
        return (self.fixed + self.per_request * num_requests + self.per_mb * copied_mb) / 1e3


@dataclass
class SimulatedRequest:
    name: str
    tokens: int
    steps_left: float
    touched: float = 0.0  # rows that it has used so far, in a layer
    rows: float = 0.0


@dataclass
class SimulatedEngine:
    """Steps of an engine, and their times.

    Attributes:
        missed: locality of the selections.
        costs: of a step.
        device_gib: device memory for KV.
        noise: relative standard deviation of a step's time.
        control: None: requests start as long as there is room.
    """

    missed: MissedShare
    costs: Costs = field(default_factory=Costs)
    device_gib: float = 24.0
    noise: float = 0.01
    seed: int = 0
    is_controlled: bool = True
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        self.spec = hot_spec()
        self.num_request_blocks = lru_cache(None)(self.spec.num_request_blocks)  # asked for every request in every step
        self.num_blocks = int(self.device_gib * 2**30) // self.spec.layout.device_block_bytes - 1
        self.now, self.rng = 0.0, np.random.default_rng(self.seed)
        self.control = AdmissionControl(TOP_K, ROW_BYTES, self.max_num_seqs, 1, lambda: self.now)
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.num_steps = self.num_added = self.num_tokens = self.num_held_steps = 0
        self.hits = self.misses = 0.0
        self.reports: deque[tuple[int, Usage]] = deque()
        self.history: list[tuple[int, int | None, float]] = []  # of each step: running, limit, seconds

    # For tests

    def add(self, tokens: int, num_steps: float = float("inf"), count: int = 1) -> None:
        for _ in range(count):
            self.waiting.append(SimulatedRequest(f"r{self.num_added:05}", tokens, num_steps))
            self.num_added += 1

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def rate(self, last_steps: int) -> float:
        """Tokens per second over the last steps."""
        last = self.history[-last_steps:]
        return sum(running for running, _, _ in last) / sum(seconds for _, _, seconds in last)

    def steady_rate(self, tokens: int, number: int) -> float:
        """Tokens per second of so many requests of the same length that have run for long."""
        lengths = [SimulatedRequest(f"r{index:05}", tokens, 0) for index in range(number)]
        self._divide(lengths)
        shares = self.missed(np.array([each.rows for each in lengths]), np.array([float(tokens)] * number))
        return number / self.costs.seconds(number, float(shares.sum()) * TOP_K)

    def best_rate(self, tokens: int, available: int) -> tuple[float, int]:
        """The highest steady rate of up to `available` requests that have room, and with how many."""
        most = min(available, self.num_blocks // self.num_request_blocks(tokens))
        return max((self.steady_rate(tokens, number), number) for number in range(1, most + 1))

    # The engine

    def step(self) -> None:
        self._admit()
        if not self.running:
            return
        self._divide(self.running)
        running = list(self.running)
        self.control.step_scheduled({each.name: 1 for each in running})
        rows, tokens = (np.array([getattr(each, name) for each in running], float) for name in ("rows", "tokens"))
        reach = np.minimum(rows, [max(each.touched, TOP_K * (each.touched > 0)) for each in running])
        shares = np.where(reach > 0, self.missed(np.minimum(reach, tokens), tokens), 1.0)
        for each, share in zip(running, shares, strict=True):
            each.touched = min(each.touched + share * TOP_K, each.tokens)
            each.tokens += 1
            each.steps_left -= 1
        seconds = self.costs.seconds(len(running), float(shares.sum()) * TOP_K)
        seconds *= 1 + self.noise * float(self.rng.standard_normal())
        self.now += seconds
        self.num_steps += 1
        self.num_tokens += len(running)
        self.misses += float(shares.sum()) * TOP_K * NUM_LAYERS
        self.hits += float((1 - shares).sum()) * TOP_K * NUM_LAYERS
        self.history.append((len(running), self.control.limit, seconds))
        self.control.step_processed()
        self._report()
        self.running = [each for each in running if each.steps_left > 0]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            lengths = [each.tokens for each in [*self.running, self.waiting[0]]]
            if sum(self.num_request_blocks(length) for length in lengths) > self.num_blocks:
                return
            whole = sum(self.num_request_blocks(length, is_whole=True) for length in lengths)
            is_hot = whole <= self.num_blocks
            if self.is_controlled and self.control.holds_back(len(self.running), lambda is_hot=is_hot: is_hot):
                assert not is_hot and self.running
                self.num_held_steps += 1
                return
            self.running.append(self.waiting.popleft())

    def _divide(self, requests: list[SimulatedRequest]) -> None:
        least = {each.name: self.num_request_blocks(each.tokens) for each in requests}
        wanted = {
            each.name: self.num_request_blocks(each.tokens, is_whole=True) - least[each.name] for each in requests
        }
        lent = divide(wanted, self.num_blocks - sum(least.values()))
        for each in requests:
            blocks = self.spec.num_blocks(each.tokens) + lent[each.name]
            is_whole = lent[each.name] == wanted[each.name]
            each.rows = each.tokens if is_whole else min(blocks * self.spec.layout.rows_per_hot_block, each.tokens)

    def _report(self) -> None:
        if self.num_steps % STEPS_PER_REPORT == 0:
            request = self.running[int(self.rng.integers(len(self.running)))]
            covered = min(request.rows, request.touched) / TOP_K
            sizes = np.array(SIZES)
            curve = self.missed(sizes * TOP_K, np.full(len(sizes), float(request.tokens)))
            curve = curve * (1 + 0.02 * self.rng.standard_normal(len(sizes)))
            curve[sizes > covered] = np.nan
            usage = Usage(self.num_steps, int(self.hits), int(self.misses), None if covered < 1 else {0: tuple(curve)})
            self.hits = self.misses = 0.0
            self.reports.append((self.num_steps + STEPS_LATE, usage))
        while self.reports and self.reports[0][0] <= self.num_steps:
            usage = self.reports.popleft()[1]
            lengths = [each.tokens for each in self.running]
            self.control.measured(usage, Demand.of(self.spec, lengths, self.num_blocks) if lengths else None)
