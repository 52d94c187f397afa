"""Ray's engine layer and our application on it import, whatever vLLM has moved."""

import importlib
from multiprocessing import get_context

import vllm.v1.engine.async_llm  # noqa: F401  # what takes long, once for all tests of this process
from vllm.platforms import current_platform

MODULES = (
    "ray.llm._internal.serve.engines.vllm.vllm_engine",
    "ray.llm._internal.serve.engines.vllm.vllm_models",
    "vllm_hisparse_ray.app",
)


def import_application() -> None:
    assert current_platform.device_type
    engine, *_ = map(importlib.import_module, MODULES)
    assert engine.FrontendArgs.__name__ == "FrontendArgs"


def test_a_process_of_the_application_starts() -> None:
    """NOTE: a fork, because Ray changes the environment and the logging of a process that imports it."""
    process = get_context("fork").Process(target=import_application)
    process.start()
    process.join(300)
    assert process.exitcode == 0
