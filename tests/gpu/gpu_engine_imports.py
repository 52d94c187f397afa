"""Modules that every engine on a GPU imports: the fork server of the GPU tests does it once for all engines of a run.

NOTE: nothing here may use a device: a process that is forked from one that has used CUDA cannot use it.
"""

import gc
import importlib

import torch

MODULES = (
    "offline_engine",
    "vllm.entrypoints.llm",
    "vllm.models.deepseek_v32",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.mla.flashmla_sparse",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm_hisparse.plugin",
)
for name in MODULES:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
gc.freeze()
