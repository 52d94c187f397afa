"""What every engine imports: the fork server of the end-to-end tests does it once for all of them.

NOTE: nothing here may start a thread or register a plugin: engines are forked from this process, and each registers
its own.
"""

import gc

import vllm.entrypoints.llm
import vllm.entrypoints.openai.api_server
import vllm.triton_utils.dispatcher
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

import vllm_hisparse.attention.mla.cpu
import vllm_hisparse.attention.mla.wrapper_cpu
import vllm_hisparse.connector.connector  # noqa: F401

gc.freeze()
