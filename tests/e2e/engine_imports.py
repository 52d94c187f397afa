"""Modules that every engine imports: the fork server of the end-to-end tests does it once for all of them.

NOTE: nothing here may start a thread or register a plugin: engines are forked from this process, and each registers
its own.
"""

import gc

import vllm.entrypoints.llm
import vllm.entrypoints.openai.api_server
import vllm.logger
import vllm.triton_utils.dispatcher
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker
from vllm.config.logging import LoggingConfig

logging_config = LoggingConfig()  # hundreds of loggers, which every engine would set up anew
vllm.logger._configure_vllm_root_logger(logging_config)
vllm.logger._last_configured_logging_config = logging_config
gc.freeze()
