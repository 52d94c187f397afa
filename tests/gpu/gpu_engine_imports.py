"""Modules that every engine on a GPU imports: the fork server of the GPU tests does it once for all engines of a run.

NOTE: nothing here may use a device: a process that is forked from one that has used CUDA cannot use it.
"""

import gc
import importlib

import torch

# NOTE: vLLM's workers, models and attention back ends look at the device when they are imported.
MODULES = ("offline_engine", "vllm.entrypoints.llm", "vllm.v1.engine.core")
for name in MODULES:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
# NOTE: vLLM's `gc.unfreeze` stays, unlike on the CPU: an engine that ends lets its weights, KV and graphs be collected.
gc.freeze()
