"""Modules that every engine imports: the fork server of the end-to-end tests does it once for all of them.

NOTE: nothing here may start a thread or register a plugin: engines are forked from this process, and each registers
its own.
"""

import gc
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import vllm.entrypoints.llm
import vllm.entrypoints.openai.api_server
import vllm.logger
import vllm.model_executor.models.registry
import vllm.triton_utils.dispatcher
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker
from vllm.config.logging import LoggingConfig
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.triton_utils import dispatcher

logging_config = LoggingConfig()  # hundreds of loggers, which every engine would set up anew
vllm.logger._configure_vllm_root_logger(logging_config)
vllm.logger._last_configured_logging_config = logging_config
get_quantization_config("fp8")  # imports every kind of quantization
# An engine imports its class of models anyway; a process of its own, which vLLM would ask, imports all of vLLM first.
vllm.model_executor.models.registry._run_in_subprocess = lambda function: function()

rebind_kernels = dispatcher._rebind_kernels


def rebind_kernels_in_vllm(overrides: Any) -> None:
    """Look for kernels of Triton in the modules that may have one: to look in all took a fifth of an engine's start."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("vllm")}
    with mock.patch.object(dispatcher, "sys", SimpleNamespace(modules=modules)):
        rebind_kernels(overrides)


dispatcher._rebind_kernels = rebind_kernels_in_vllm
gc.freeze()
# An engine that ends would look for garbage among all these modules, which takes as long as its start.
gc.unfreeze = lambda: None
