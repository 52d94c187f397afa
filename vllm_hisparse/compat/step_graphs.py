"""CUDA graphs of decode steps in Model Runner V2: a step that may run in two forms gets a graph of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RELEASES = ">=0.32"
VLLM = (
    "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._capture_descs",
    "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._max_full_descs_to_capture",
    "vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.capture",
    "vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.run_fullgraph",
)


class StepForms(Protocol):
    """Two forms in which a model's decode steps may run; both compute the same.

    Attributes:
        runs_whole: True if the layers run a step in the second form.
    """

    runs_whole: bool

    def has_two(self, num_requests: int, num_tokens: int) -> bool:
        """Return True if a step in which `num_requests` requests decode `num_tokens` tokens may run in either form.

        The result may be True for steps that are never divided, and for more of them before the model has storage.
        """


def capture_both_forms(find: Callable[[VllmConfig], StepForms | None]) -> None:
    """Let vLLM capture a second graph of every decode step that has two forms, and replay the one of the present form.

    Both graphs use the same inputs, outputs and memory pool. The second ones count when vLLM measures, before the model
    has storage, how much device memory graphs take. A second call in a process changes nothing.

    Args:
        find: returns the forms of an engine's model; None if it has one form.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

    capture, run = ModelCudaGraphManager.capture, ModelCudaGraphManager.run_fullgraph
    if hasattr(capture, "captures_both"):
        return

    class WholeStep(BatchExecutionDescriptor):
        """Key of the second form's graph in vLLM's `graphs`; never equal to the key of the first form's graph."""

        @classmethod
        def of(cls, desc: Any) -> WholeStep:
            return cls(**{field.name: getattr(desc, field.name) for field in fields(desc)})

    @wraps(capture)
    def capture_both(self: Any, *args: Any, **kwargs: Any) -> None:
        forms, descs = find(self.vllm_config), self._capture_descs
        if forms is None:
            capture(self, *args, **kwargs)
            return
        forms.runs_whole = False  # graphs may be captured again after steps have run
        capture(self, *args, **kwargs)
        full = descs.get(CUDAGraphMode.FULL, [])
        whole = [WholeStep.of(desc) for desc in full if forms.has_two(desc.num_reqs, desc.num_tokens)]
        if self._max_full_descs_to_capture is not None:
            # NOTE: vLLM has captured a few graphs to measure them, and extrapolates their memory to the length of this
            # list (the first graph's, and for each further graph the second one's). Therefore the list gets the graphs
            # of whole steps, too.
            self._capture_descs = descs | {CUDAGraphMode.FULL: full + whole}
        elif whole:
            self._capture_descs, forms.runs_whole = {CUDAGraphMode.FULL: whole}, True
            try:
                capture(self, *args, **kwargs | {"progress_bar_desc": "Capturing CUDA graphs of whole steps"})
            finally:
                self._capture_descs, forms.runs_whole = descs, False

    @wraps(run)
    def run_present_form(self: Any, desc: Any) -> Any:
        whole = WholeStep.of(desc)
        forms = find(self.vllm_config) if whole in self.graphs else None
        return run(self, desc if forms is None or not forms.runs_whole else whole)

    capture_both.captures_both = True
    ModelCudaGraphManager.capture, ModelCudaGraphManager.run_fullgraph = capture_both, run_present_form
