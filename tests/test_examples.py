"""Examples start what they say, and the algorithm of the documentation is the one in the folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from vllm_hisparse.config import HiSparseConfig

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_single_instance_starts_a_server_with_the_connector(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")  # prints its arguments instead of running them
    python.chmod(0o755)
    command = [EXAMPLES / "single_instance.sh", "some/model", "--max-model-len", "99"]
    environment = {**os.environ, "PYTHON": str(python), "HOST_POOL_GIB": "3"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    *arguments, connector, _ = output.split("\0")
    assert arguments[:6] == ["-m", "vllm.entrypoints.openai.api_server", "--model", *map(str, command[1:])]
    assert json.loads(connector) == {
        "kv_connector": "HiSparseHostConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": 3},
    }


@pytest.mark.parametrize("script", ["single_instance.sh", "prefill_decode.sh"])
def test_scripts_name_known_options(script: str) -> None:
    (options,) = re.findall(r'"kv_connector_extra_config": \{([^}]*)\}', (EXAMPLES / script).read_text())
    assert set(re.findall(r'"(\w+)":', options)) <= set(HiSparseConfig.model_fields)


def test_the_documented_algorithm_is_the_example() -> None:
    documented = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)
    assert documented is not None
    assert (EXAMPLES / "mean_page.py").read_text().endswith(documented[1])
