"""Dockerfiles and the compose file, as far as they can be checked without an engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from vllm_hisparse.config import HiSparseConfig

DOCKER = Path(__file__).parent.parent.parent / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_is_pinned_and_unprivileged(path: Path):
    text = path.read_text()
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(stages) == 2
    assert all(re.search(r":\d+\.\d+\.\d+", image) for image in stages)
    assert re.findall(r"^USER (\S+)", text.split("FROM")[-1], re.MULTILINE) == ["10001"]
    assert "HEALTHCHECK" in text and "ENTRYPOINT" in text


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not on PATH: the Dockerfiles are not linted")
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(path: Path):
    result = subprocess.run(["hadolint", str(path)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is not on PATH: the compose file is only parsed"
)
def test_compose_config():
    command = ["docker-compose", "-f", str(DOCKER / "compose.yaml"), "config", "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_compose_pair_serves_one_model_with_both_connectors():
    connectors, options = {}, {}
    for role in ("prefill", "decode"):
        arguments = dict(word[2:].split("=", 1) for word in COMPOSE["services"][role]["command"] if "=" in word)
        connectors[role] = json.loads(arguments.pop("kv-transfer-config"))
        options[role] = arguments
    assert options["prefill"] == options["decode"]
    assert connectors["prefill"] == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    HiSparseConfig.from_extra_config(connectors["decode"]["kv_connector_extra_config"])


def test_compose_publishes_the_router_alone():
    assert [name for name, service in COMPOSE["services"].items() if "ports" in service] == ["router"]
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"]["router"]["ports"])
