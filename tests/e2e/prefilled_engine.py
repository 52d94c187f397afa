"""Engines of `benchmarks.full_depth` and `benchmarks.prefill` on the CPU platform, in forked processes."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from forks import begin

CASES = ("500x3:model", "mixedx600:model", "900x2+12:model")
JOB = {
    "quantization": None,
    "kv_dtype": "bfloat16",
    "device_kv_gib": 0.03,
    "host_pool_gib": 0.25,
    "host_pool_memory": "auto",
    "device_buffer_size": 512,
    "elastic": True,
    "admission": "off",
    "indexer_key_dtype": "auto",
    "row_shares": None,
    "drafts": 0,
    "tensor_parallel": 1,
    "data_parallel": 1,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "graph_sizes": [3],
    "forces_selections": False,
}


def measure(system: str, model: str, log_path: str, pipe: Connection, **options: Any) -> None:
    """Send the rows of all cases, how many requests are left, and the kind of the host pool's memory.

    Args:
        system: of `benchmarks.full_depth`.
        model: directory of the model.
        log_path: gets the process's log.
        pipe: gets the result.
        options: other values of `JOB`.
    """
    begin(log_path, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from vllm import LLM

    from benchmarks.full_depth import Case, Loaded, System, engine_args

    job: dict[str, Any] = {**JOB, "model": model, **options}
    args = engine_args(System(system), job) | {"dtype": "float32", "enforce_eager": True}
    for name in ("compilation_config", "kernel_config"):
        del args[name]
    loaded = Loaded(LLM(**args), settle=6, steps=8, mixed_s=1.4, profiled=0)
    rows = [loaded.measure(Case.parse(text)) for text in CASES]
    pipe.send((rows, len(loaded.scheduler.requests), loaded.host_memory))


def time_prompts(system: str, model: str, log_path: str, pipe: Connection) -> None:
    """Send what `benchmarks.prefill` measures of prompts of four chunks, alone and beside two other requests, and how
    many requests are left. Profiles lack what needs a device."""
    begin(log_path, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from unittest import mock

    import torch
    from vllm import LLM

    from benchmarks.full_depth import System
    from benchmarks.kernel_profile import KernelProfile
    from benchmarks.prefill import Prompts, engine_args

    job: dict[str, Any] = {**JOB, "model": model, "chunk": 256, "max_model_len": 3072, "device_kv_gib": 0.1}
    args = engine_args(System(system), job) | {"dtype": "float32", "enforce_eager": True}
    for name in ("compilation_config", "kernel_config"):
        del args[name]
    llm = LLM(**args)
    prompts = Prompts(llm, is_profiled=True)
    device = mock.patch.multiple(torch.cuda, get_sync_debug_mode=mock.DEFAULT, set_sync_debug_mode=mock.DEFAULT)
    kernels = mock.patch.multiple(
        KernelProfile, start_kernel_profile=mock.DEFAULT, stop_kernel_names=lambda *_: ({}, {})
    )
    with device, kernels:
        rows = [prompts.measure(1000, decoding, repeats=2) for decoding in (0, 2)]
    pipe.send((rows, len(llm.llm_engine.engine_core.engine_core.scheduler.requests)))
