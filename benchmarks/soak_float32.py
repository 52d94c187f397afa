"""Ask full KV in float32 which token it chooses where a soak on a GPU has found a wrong one.

    python -m benchmarks.soak_float32

On a GPU, KV has 8 bits, so full KV errs, too. The model of such a soak is run on the CPU platform, with full KV and all
numbers in float32, up to each token that the soak calls wrong. A row tells how much less likely two tokens are there
than the best one, in logprobs: the soak's token (`got`), and the one that full KV on the GPU chose (`expected`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, show, track, write_result
from benchmarks.soak import Device, judge_args, model_of

NUM_BEST = 20  # tokens whose logprobs are asked for
# Arguments of full KV that are the same as on the GPU.
SAME_ARGS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "hf_overrides", "enable_prefix_caching")
RESULT = RESULTS / "cpu" / "soak_float32.json"

app = typer.Typer(add_completion=False)


def distances(logprobs: dict[int, Any]) -> dict[int, float]:
    """Return how much less likely each token is than the best one.

    Args:
        logprobs: token -> vLLM's `Logprob` of one step.
    """
    best = max(each.logprob for each in logprobs.values())
    return {token: round(best - each.logprob, 3) for token, each in logprobs.items()}


@app.command()
def run(
    ctx: typer.Context,
    soak: Annotated[Path, typer.Option(help="Result file of a soak on a GPU.")] = RESULTS / "h200" / "soak.json",
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULT,
) -> None:
    """Ask full KV in float32 about the wrong tokens of a soak; minutes for each."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    (row,) = json.loads(soak.read_text())["rows"]
    full_kv = judge_args(Device.gpu)
    sizes = {name: full_kv[name] for name in SAME_ARGS} | {"kv_cache_memory_bytes": 1 << 30}
    llm = LLM(str(model_of(Device.gpu)), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, **sizes)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=NUM_BEST, detokenize=False)
    rows = []
    for index in track(len(row["wrong"]), "tokens"):
        answer = row["wrong"][index]
        prompt = answer["tokens"] + answer["reply"][: answer["position"]]
        (reply,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        found = distances(reply.outputs[0].logprobs[0])
        got, expected = answer["got"], answer["expected"]
        place = {"number": answer["number"], "position": answer["position"], "prompt_tokens": answer["prompt_tokens"]}
        tokens = {"got": got, "got_distance": found.get(got), "expected": expected}
        rows.append(place | tokens | {"expected_distance": found.get(expected), "gpu_distance": answer["margin"]})
    write_result(output, ctx, "benchmarks.soak_float32", rows)
    show("wrong tokens of a soak, in float32", rows)


if __name__ == "__main__":
    app()
