"""Records the selections of decoding requests: one trace per request (option `selection_trace_dir`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.swap_in import SwapIn
from vllm_hisparse.ops.base import Resolved
from vllm_hisparse.trace import Trace

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


@dataclass
class Recording:
    """Consecutive steps of one request.

    Attributes:
        first_position: newest position in the first step.
        steps: [layers, top_k] int32 selected positions of each step, -1 for none.
    """

    first_position: int
    steps: list[np.ndarray] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        return self.first_position + len(self.steps)


class SelectionRecorder:
    """Collects selections and, when a request has ended, writes them in a thread of its own.

    A request that is preempted, or continued by a session's next turn, is recorded in several traces, because a trace
    has consecutive steps.

    Args:
        directory: directory for the traces; made if missing.
        rank: data parallel rank of the engine; ranks may share a directory.
        model: name of the model.
        top_k: positions of a selection.
        row_bytes: bytes of one position's KV in one layer.
        layers: names of the layers with hot buffers, in order.

    Raises:
        HiSparseConfigError: the directory cannot be made.
    """

    def __init__(self, directory: Path, rank: int, model: str, top_k: int, row_bytes: int, layers: Sequence[str]):
        self.directory, self.rank = directory, rank
        self.model, self.top_k, self.row_bytes = model, top_k, row_bytes
        self.layers = tuple(short_name(layer) for layer in layers)
        self._recordings: dict[int, Recording] = {}  # by request index
        self._writer = ThreadPoolExecutor(1, "selection-traces")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._number = max((int(path.stem.rpartition("-")[2]) for path in self._existing()), default=0)
        except OSError as error:
            raise HiSparseConfigError(
                "selection_trace_dir", str(directory), f"a directory that can be written ({error})", "Choose another."
            ) from None

    def add_step(self, requests: list[int], positions: list[int], selected: np.ndarray) -> None:
        """Record one step.

        Args:
            requests: index of each decoding request.
            positions: newest position of each request.
            selected: [layers, requests, top_k] int32 positions, -1 for none.
        """
        for number, (request, position) in enumerate(zip(requests, positions, strict=True)):
            if request in self._recordings and self._recordings[request].next_position != position:
                self.end(request)
            self._recordings.setdefault(request, Recording(position)).steps.append(selected[:, number])

    def end(self, request_index: int) -> None:
        """Write the trace of a request that has ended."""
        recording = self._recordings.pop(request_index, None)
        if recording is not None:
            self._number += 1
            path = self.directory / f"{self.rank}-{self._number:06}.trace"
            self._writer.submit(self._write, recording, path)

    def close(self) -> None:
        """Write the remaining traces, and wait until all are written."""
        for request_index in list(self._recordings):
            self.end(request_index)
        self._writer.shutdown()

    def _existing(self) -> Iterator[Path]:
        """Traces of this rank from earlier runs."""
        return (path for path in self.directory.iterdir() if re.fullmatch(rf"{self.rank}-\d+\.trace", path.name))

    def _write(self, recording: Recording, path: Path) -> None:
        ranked = [(recording.first_position, np.stack(recording.steps, axis=1))]
        try:
            Trace.from_ranked(self.model, self.top_k, self.row_bytes, self.layers, (self.top_k,), ranked).write(path)
        except OSError as error:  # NOTE: a full disk must not end the engine.
            logger.error("HiSparse: a trace of selections is lost: %s", error)


class RecordingHotBuffer(MLAHotBuffer):
    """An `MLAHotBuffer` that records selections. Its tensors must be on the CPU.

    Args:
        shape, device, selects: as in `HotBuffer`.
        recorder: gets every step.
    """

    def __init__(
        self,
        shape: HotBufferShape,
        device: torch.device,
        recorder: SelectionRecorder,
        selects: Sequence[bool] | None = None,
    ):
        super().__init__(shape, device, selects)
        self.recorder = recorder
        self._selected = np.empty((shape.num_layers, 0, shape.top_k), np.int32)

    def swap_in_of(self, layer_index: int) -> SwapIn:
        return RecordingSwapIn(self, layer_index, super().swap_in_of(layer_index))

    def record(self, layer_index: int, selected_positions: torch.Tensor) -> None:
        """Record a layer's selection; the last layer's selection completes the step.

        Args:
            layer_index: index of the layer.
            selected_positions: [batch, top_k] int32.
        """
        if layer_index == 0:
            self._selected = np.empty((self.shape.num_layers, *selected_positions.shape), np.int32)
        self._selected[layer_index] = selected_positions.numpy()
        if layer_index == self.shape.num_layers - 1:
            decode = self.step.decode_of(layer_index)
            requests, newest = self.requests.find(decode.first_hot_block_ids), decode.seq_lens - 1
            known = requests < self.requests.num_requests
            self.recorder.add_step(requests[known].tolist(), newest[known].tolist(), self._selected[:, known.numpy()])

    def release(self, first_hot_block_id: int) -> None:
        self.recorder.end(self.requests.index_of(first_hot_block_id))
        super().release(first_hot_block_id)


@dataclass(frozen=True)
class RecordingSwapIn(SwapIn):
    """Records a layer's selection before the selection becomes hot.

    Attributes:
        hot_buffer: hot buffer that records the selection.
        layer_index: index of the layer.
        inner: swap-in that makes the selection hot.
    """

    hot_buffer: RecordingHotBuffer
    layer_index: int
    inner: SwapIn

    def __call__(self, selected_positions: torch.Tensor, requests: slice | None = None) -> Resolved:
        self.hot_buffer.record(self.layer_index, selected_positions)
        return self.inner(selected_positions, requests)


def short_name(layer: str) -> str:
    """Number of a layer in the model ("3" for "model.layers.3.self_attn.attn"); the whole name if it has no number."""
    number = re.search(r"\.(\d+)\.", layer)
    return number[1] if number else layer
