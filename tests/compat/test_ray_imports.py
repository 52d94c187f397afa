"""Ray's engine layer and our application on it import, whatever vLLM has moved."""

import subprocess
import sys

IMPORTS = """
from vllm.platforms import current_platform
from ray.llm._internal.serve.engines.vllm import vllm_engine, vllm_models
import vllm_hisparse_ray.app
print(current_platform.is_cpu(), vllm_engine.FrontendArgs.__name__)
"""


def test_a_process_of_the_application_starts() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split()[-1] == "FrontendArgs"
