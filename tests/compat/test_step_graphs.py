"""vLLM's manager of CUDA graphs, with graphs that note what they hold: which are captured, and which are replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from vllm_hisparse.compat.step_graphs import capture_both_forms

SIZES = (56, 40, 8)  # requests of the captured steps, in vLLM's order
CAPTURED = [(8, False), (40, False), (40, True), (56, False), (56, True)]  # and whether they run as a whole


class Forms:
    """Steps of at least 24 requests have two forms."""

    def __init__(self) -> None:
        self.runs_whole = False

    def has_two(self, num_requests: int, num_tokens: int) -> bool:
        return num_requests == num_tokens >= 24


class Graph:
    """A CUDA graph of one step, which fills the output with the number of its requests, and notes replays."""

    captured: Graph | None = None  # the graph that is being captured
    replayed: list[tuple[int, bool]]  # requests of the graphs, and whether they run the step as a whole

    def replay(self) -> None:
        Graph.replayed.append(self.step)


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forms]:
    """The forms that the manager finds."""
    found = Forms()
    for name in ("capture", "run_fullgraph"):
        function = getattr(ModelCudaGraphManager, name)
        monkeypatch.setattr(ModelCudaGraphManager, name, getattr(function, "__wrapped__", function))
    capture_both_forms(lambda vllm_config: vllm_config.forms)
    capture_both_forms(lambda _: pytest.fail("registered twice"))
    yield found


def make_manager(monkeypatch: pytest.MonkeyPatch, forms: Forms | None) -> Any:
    """vLLM's manager, which captures decode steps of `SIZES`."""

    @contextmanager
    def capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
        Graph.captured = graph
        yield
        Graph.captured = None

    def inputs(num_requests: int, *_: Any, **__: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"num_requests": num_requests}, {}

    Graph.replayed = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for name in ("graph_capture", "capture_pool", "set_forward_context"):
        monkeypatch.setattr(cudagraph_utils, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(cudagraph_utils, "prepare_inputs_to_capture", inputs)
    monkeypatch.setattr(cudagraph_utils, "current_stream", lambda: None)
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    mode = CUDAGraphMode.FULL_DECODE_ONLY
    descs = [BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, 1) for size in SIZES]
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1), forms=forms)
    attributes = {"use_aux_hidden_state_outputs": False, "hidden_states": None, "aux_hidden_states": []}
    attributes |= {"vllm_config": config, "cudagraph_mode": mode, "_capture_descs": {CUDAGraphMode.FULL: descs}}
    attributes |= {"use_breakable_cg": False, "is_first_pp_rank": True, "is_last_pp_rank": True, "graphs": {}}
    attributes |= {"_max_full_descs_to_capture": None, "_capture_mem_samples": None, "pool": None, "device": None}
    attributes |= {"ubatch_runner": None, "max_num_reqs": max(SIZES)}
    manager = object.__new__(ModelCudaGraphManager)
    manager.__dict__.update(attributes)
    return manager


def capture(manager: Any, forms: Forms | None, can_run_whole: bool = True) -> None:
    def model(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        runs_whole = forms is not None and forms.runs_whole
        if runs_whole and not can_run_whole:
            raise RuntimeError("no memory")
        if Graph.captured is not None:
            Graph.captured.step = len(input_ids), runs_whole
        return torch.zeros(len(input_ids), 1)

    state = SimpleNamespace(prepare_dummy_inputs=lambda *_: {})
    names = "input_ids", "positions", "is_padding"
    buffers = SimpleNamespace(**{name: torch.zeros(max(SIZES)) for name in names})
    manager.capture(model, state, buffers, None, SimpleNamespace(cp_size=1), [], None)


def test_steps_with_two_forms_get_two_graphs(monkeypatch: pytest.MonkeyPatch, forms: Forms) -> None:
    manager = make_manager(monkeypatch, forms)
    captured = list(manager._capture_descs[CUDAGraphMode.FULL])
    capture(manager, forms)
    assert sorted(graph.step for graph in manager.graphs.values()) == CAPTURED
    assert manager._capture_descs == {CUDAGraphMode.FULL: captured} and not forms.runs_whole
    for forms.runs_whole in (False, True):
        for desc in captured:
            assert manager.run_fullgraph(desc).shape == (desc.num_tokens, 1)
    assert Graph.replayed == [(56, False), (40, False), (8, False), (56, True), (40, True), (8, False)]
    assert manager.captured_token_counts() == [8, 40, 56]


def test_graphs_that_vllm_drops_are_captured_again(monkeypatch: pytest.MonkeyPatch, forms: Forms) -> None:
    manager = make_manager(monkeypatch, forms)
    capture(manager, forms)
    manager.breakable_cg_runner = None
    manager.release_graphs()
    assert not manager.graphs
    forms.runs_whole = True  # as the last step has left it
    capture(manager, forms)
    assert sorted(graph.step for graph in manager.graphs.values()) == CAPTURED


def test_graphs_that_are_not_captured_yet_count_in_the_memory_that_vllm_measures(
    monkeypatch: pytest.MonkeyPatch, forms: Forms
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    free = iter(range(10**9, 0, -(5 << 20)))  # a graph takes 5 MiB
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (next(free), 10**9))
    manager = make_manager(monkeypatch, forms)
    manager._max_full_descs_to_capture, manager._capture_mem_samples = 2, []
    capture(manager, forms)
    assert [graph.step for graph in manager.graphs.values()] == [(56, False), (40, False)]
    num_graphs = len(manager._capture_descs[CUDAGraphMode.FULL])
    measured = cudagraph_utils._extrapolate_full_graph_memory(manager._capture_mem_samples, num_graphs)
    assert measured == 5 * (5 << 20)


def test_a_model_with_one_form_gets_one_graph(monkeypatch: pytest.MonkeyPatch, forms: Forms) -> None:
    del forms
    manager = make_manager(monkeypatch, None)
    capture(manager, None)
    assert [graph.step for graph in manager.graphs.values()] == [(size, False) for size in SIZES]
    manager.run_fullgraph(next(iter(manager.graphs)))
    assert Graph.replayed == [(56, False)]


def test_a_capture_that_fails_leaves_the_first_form(monkeypatch: pytest.MonkeyPatch, forms: Forms) -> None:
    manager = make_manager(monkeypatch, forms)
    descs = manager._capture_descs
    with pytest.raises(RuntimeError, match="no memory"):
        capture(manager, forms, can_run_whole=False)
    assert manager._capture_descs is descs and not forms.runs_whole
