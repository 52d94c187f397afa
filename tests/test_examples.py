"""Commands of the examples and of the documentation, in the parsers of the programs that get them.

tests/e2e/test_run_examples.py runs the examples that need no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner
from vllm.benchmarks import serve as bench
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_hisparse_ray.config import AppConfig
from vllm_router.launch_router import parse_router_args

from vllm_hisparse.cli.main import app
from vllm_hisparse.config import HiSparseConfig

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A program that writes its arguments down instead of doing anything.
STAND_IN = """\
#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" > "$CALLS/$$.part"
mv "$CALLS/$$.part" "$CALLS/$$.call"
exec sleep 60
"""


def run_script(script: str, directory: Path, num_programs: int, *arguments: str, **environment: str) -> list[list[str]]:
    """Programs that a script starts, with their arguments; they have ended, and so has the script."""
    for name in ("vllm", "vllm-router", "python"):
        (directory / name).write_text(STAND_IN)
        (directory / name).chmod(0o755)
    environment |= {"PATH": f"{directory}:{os.environ['PATH']}", "CALLS": str(directory)}
    process = subprocess.Popen(
        [EXAMPLES / script, *arguments], env={**os.environ, **environment}, start_new_session=True
    )
    try:
        while len(list(directory.glob("*.call"))) < num_programs:
            assert process.poll() is None, f"{script} ended with {process.returncode}"
            time.sleep(0.01)
        process.terminate()
        process.wait(10)
        assert not [path.stem for path in directory.glob("*.call") if Path("/proc", path.stem).exists()]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return sorted(path.read_text().split("\0")[:-1] for path in directory.glob("*.call"))


def parse_server(*arguments: str) -> argparse.Namespace:
    """Options of `vllm serve`, with the connector's own options checked."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    if args.kv_transfer_config.kv_connector == "HiSparseHostConnector":
        HiSparseConfig.from_extra_config(args.kv_transfer_config.kv_connector_extra_config)
    return args


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("single_instance.sh", {}),
        ("expert_parallel.sh", {"data_parallel_size": 8, "enable_expert_parallel": True}),
        ("own_algorithm.sh", {}),
    ],
)
def test_scripts_start_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, options: dict[str, Any], device: str
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # the algorithm of one of them
    environment = {"DEVICE": device, "HOST_POOL_GIB": "3", "PORT": "8123"}
    (command,) = run_script(script, tmp_path, 1, "some/model", "--max-model-len", "999", **environment)
    program = {"cuda": ["vllm", "serve"], "cpu": ["python", "-m", "vllm.entrypoints.openai.api_server"]}[device]
    assert command[: len(program)] == program
    args = parse_server(*command[len(program) :])
    assert (args.model_tag if device == "cuda" else args.model) == "some/model"
    assert args.max_model_len == 999, "options of the user win"
    assert args.port == 8123
    assert args.kv_transfer_config.kv_role == "kv_both"
    assert args.kv_transfer_config.kv_connector_extra_config["host_pool_gib"] == 3
    assert {name: getattr(args, name) for name in options} == options


@pytest.mark.parametrize("budget", [{}, {"TOP_K": "1024"}])
@pytest.mark.parametrize("script", ["single_instance.sh", "prefill_decode.sh", "expert_parallel.sh"])
def test_a_dense_model_gets_an_algorithm(tmp_path: Path, script: str, budget: dict[str, str]) -> None:
    num_programs = 3 if script == "prefill_decode.sh" else 1
    commands = run_script(script, tmp_path, num_programs, "some/model", ALGORITHM="quest", HOST_POOL_GIB="3", **budget)
    (extra_config,) = (
        json.loads(argument)["kv_connector_extra_config"]
        for command in commands
        for argument in command
        if "HiSparseHostConnector" in argument
    )
    assert extra_config == {"host_pool_gib": 3, "algorithm": "quest", **({"top_k": 1024} if budget else {})}


def test_prefill_decode_starts_two_servers_and_a_router(tmp_path: Path) -> None:
    prefill, decode, router = run_script(
        "prefill_decode.sh", tmp_path, 3, "some/model", PREFILL_PORT="8101", DECODE_PORT="8202", DECODE_GPUS="3"
    )
    if "kv_consumer" in prefill[-1]:
        prefill, decode = decode, prefill
    prefill_args, decode_args = parse_server(*prefill[2:]), parse_server(*decode[2:])
    assert prefill_args.kv_transfer_config.kv_role == "kv_producer"
    assert decode_args.kv_transfer_config.kv_role == "kv_consumer"
    assert (prefill_args.port, decode_args.port) == (8101, 8202)
    assert router[0] == "vllm-router"
    args = parse_router_args(router[1:])
    assert args.vllm_pd_disaggregation and args.kv_connector == "nixl"
    assert [url for url, *_ in args.prefill_urls] == ["http://127.0.0.1:8101"]
    assert args.decode_urls == ["http://127.0.0.1:8202"]


def test_benchmark_calls_vllms_load_generator(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    bench.add_cli_args(parser)
    (command,) = run_script("benchmark.sh", tmp_path, 1, "--random-input-len", "77", PORT="8123")
    assert command[:3] == ["vllm", "bench", "serve"]
    args = parser.parse_args(command[3:])
    assert (args.base_url, args.random_input_len) == ("http://127.0.0.1:8123", 77)


@pytest.mark.parametrize("script", ["single_instance.sh", "prefill_decode.sh", "expert_parallel.sh"])
def test_a_gpu_needs_a_model(script: str) -> None:
    result = subprocess.run([EXAMPLES / script], capture_output=True, text=True, timeout=30)
    assert result.returncode == 2 and "usage:" in result.stderr


def test_the_readme_names_every_script_and_files_that_can_be_used() -> None:
    text = (EXAMPLES / "README.md").read_text()
    scripts = {path.name for path in EXAMPLES.glob("*.sh")} - {"common.sh"}
    assert set(re.findall(r"`(?:DEVICE=cpu )?examples/(\w+\.sh)", text)) == scripts
    ray = re.findall(r"deploy/ray/\S+\.yaml", text)
    assert len(ray) == 2
    for path in ray:
        (application,) = yaml.safe_load((ROOT / path).read_text())["applications"]
        AppConfig.parse(application["args"])
    chart = ROOT / "deploy" / "helm" / "vllm-hisparse"
    values = re.findall(r"values-\w+\.yaml", text)
    assert len(values) == 2
    schema = json.loads((chart / "values.schema.json").read_text())
    for name in values:
        jsonschema.validate(merged(chart / "values.yaml", chart / name), schema)


def merged(*paths: Path) -> dict[str, Any]:
    """Values as helm merges files of them."""

    def merge(base: Any, over: Any) -> Any:
        if not (isinstance(base, dict) and isinstance(over, dict)):
            return over
        return {key: merge(base.get(key), over.get(key, base.get(key))) for key in {**base, **over}}

    base, over = (yaml.safe_load(path.read_text()) for path in paths)
    return merge(base, over)


def documented_servers() -> Iterator[tuple[str, str]]:
    """(document, arguments) of every `vllm serve` in a code block."""
    for document in DOCUMENTS:
        for block in re.findall(r"^```.*?\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
            for command in re.findall(r"vllm serve ((?:\\\n|'[^']*'|\"[^\"]*\"|[^\n&'\"])*)", block):
                yield document.name, command.replace("\\\n", " ")


@pytest.mark.parametrize(("document", "command"), list(documented_servers()))
def test_documented_servers_have_valid_options(document: str, command: str) -> None:
    arguments = shlex.split(command.replace("'$i'", "0").replace("$i", "0"), comments=True)
    parse_server(*arguments)


def test_documented_servers_are_found() -> None:
    found = {document for document, _ in documented_servers()}
    assert found >= {"README.md", "quickstart.md", "configuration.md", "deployment.md"}


def test_extras_that_documents_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for document in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        installed = re.findall(r"pip install '(?:vllm-hisparse|\.)\[([\w,]+)\]'", document.read_text())
        names = {name for each in installed for name in each.split(",")}
        assert {"cuda", "cli"} <= names <= extras.keys()


def test_the_quick_start_sends_a_request_that_vllm_takes() -> None:
    commands = (ROOT / "README.md").read_text().replace("\\\n", " ")
    (server,) = re.findall(r"^vllm serve (\S+)", commands, re.MULTILINE)
    (request,) = re.findall(r"^curl localhost:8000/v1/completions .* -d '(.*)'$", commands, re.MULTILINE)
    body = CompletionRequest.model_validate_json(request)
    assert (body.model, body.max_tokens) == (server, 32) and not body.model_extra


def test_the_readme_plans_a_deployment_that_the_planner_knows() -> None:
    (arguments,) = re.findall(r"`vllm-hisparse (plan [^`]*)`", (ROOT / "README.md").read_text())
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    assert "DeepSeek-V3.2 on 8 x H200" in result.output


def test_the_documented_load_is_one_that_vllm_can_generate() -> None:
    parser = argparse.ArgumentParser()
    bench.add_cli_args(parser)
    text = (ROOT / "docs" / "deployment.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"vllm bench serve (.*)", text)
    args = parser.parse_args(shlex.split(command.replace("$((4 * n))", "16").replace("$n", "4")))
    assert (args.num_prompts, args.max_concurrency, args.percentile_metrics) == (16, 4, "ttft,itl")


def test_the_documented_algorithm_is_the_example() -> None:
    documented = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)
    assert documented is not None
    assert (EXAMPLES / "mean_page.py").read_text().endswith(documented[1])
