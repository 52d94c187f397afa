"""`vllm-hisparse trace record`: records the selections of a DSA model that continues texts, as one trace."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_hisparse.cli.output_files import check_new_file
from vllm_hisparse.config import CONNECTOR_NAME
from vllm_hisparse.trace import Trace

if TYPE_CHECKING:
    from vllm import LLM

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}


def record_command(
    text: Annotated[list[Path], typer.Argument(help="Files, a prompt each.", exists=True, dir_okay=False)],
    model: Annotated[str, typer.Option(help="DSA model.")],
    output: Annotated[Path, typer.Option(help="File to write (.trace).")],
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each text.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="First tokens of each text that are the prompt.")] = 8192,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of sampling; 0 is greedy, and models then repeat.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    host_pool_gib: Annotated[float, typer.Option(min=0.01, help="Host memory for KV.")] = 4.0,
    kv_cache_mib: Annotated[int, typer.Option(min=1, help="Memory for hot buffers and indexer keys.")] = 1024,
) -> None:
    """Let a DSA model continue some texts and record which positions it selects, on vLLM's CPU platform.

    A running server records with the option `selection_trace_dir`.
    """
    check_new_file(output, "--output")
    os.environ.update({**ENVIRONMENT, **os.environ})
    check_model(model)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    sizes = {"max_model_len": prompt_tokens + max_tokens, "kv_cache_memory_bytes": kv_cache_mib << 20}
    with tempfile.TemporaryDirectory() as directory:
        connector = {
            "kv_connector": CONNECTOR_NAME,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_pool_gib": host_pool_gib, "selection_trace_dir": directory},
        }
        llm = start_engine(model, seed, kv_transfer_config=connector, **sizes)
        try:
            generate(llm, [path.read_text() for path in text], prompt_tokens, sampling)
        finally:
            llm.llm_engine.engine_core.shutdown()
        traces = [Trace.read(path) for path in sorted(Path(directory).iterdir())]
    Trace.join(traces).write(output)
    num_steps = sum(request.num_steps for trace in traces for request in trace.requests)
    typer.echo(f"{output}: {num_steps} steps of {len(traces)} requests, {output.stat().st_size / 1e6:.2f} MB")


def check_model(model: str) -> None:
    """Refuse a model without a configuration, before an engine starts.

    Raises:
        BadParameter: it has none.
    """
    from transformers.utils import cached_file

    reason = "it has no config.json"
    try:
        if (Path(model) / "config.json").is_file() or (not Path(model).exists() and cached_file(model, "config.json")):
            return
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
    if os.environ["HF_HUB_OFFLINE"] not in ("", "0"):
        reason += "; HF_HUB_OFFLINE is set, so a model of the Hub must be in the cache"
    message = f"got {model}, expected a directory with config.json, or the name of a model on the Hugging Face Hub"
    raise typer.BadParameter(f"{message}: {reason}", param_hint="--model")


def start_engine(model: str, seed: int, **options: Any) -> LLM:
    """Start an engine with the connector.

    NOTE: the seed is an option of the engine, because vLLM's CPU platform fails if a request with a seed of its own has
    a prompt that is computed in chunks.
    """
    from vllm import LLM

    return LLM(model, seed=seed, enforce_eager=True, **options)


def generate(llm: LLM, texts: list[str], prompt_tokens: int, sampling: dict[str, Any]) -> None:
    """Continue the beginnings of the texts."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    tokenizer = llm.get_tokenizer()
    prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(text)[:prompt_tokens]) for text in texts]
    llm.generate(prompts, SamplingParams(**sampling))
