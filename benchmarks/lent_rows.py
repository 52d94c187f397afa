"""How many rows requests miss with lent memory in equal shares, and with as many requests as possible hot as a whole.

    python -m benchmarks.lent_rows

Requests have the committed traces of a model's own tokens, scaled to 61 layers of DeepSeek-V3.2's sizes with fp8 KV, as
in `benchmarks.full_depth`. Buffers are LRU, and have settled.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from benchmarks.common import RESULTS, show, write_result
from benchmarks.full_depth import TRACE_FILES, TRACES
from vllm_hisparse.cli.replay_layers import LayerMisses
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.ops.indexer_keys import KEY_BYTES, WIDE_KEY_BYTES
from vllm_hisparse.trace import Trace

TOP_K, NUM_LAYERS, ROW_BYTES = 2048, 61, 656
DEVICE_BUFFER_SIZE = 4096
KEYS = {"auto": WIDE_KEY_BYTES, "fp4": KEY_BYTES}
WARM_UP_STEPS = 120  # nearly all buffers are full by then

app = typer.Typer(add_completion=False)


def hot_spec(key_bytes: int) -> HotBufferSpec:
    """Return the spec of the hot buffers of 61 layers."""
    layout = KVLayout(ROW_BYTES, key_bytes, NUM_LAYERS, NUM_LAYERS)
    full = MLAAttentionSpec(block_size=layout.block_size, num_kv_heads=1, head_size=ROW_BYTES, dtype=torch.uint8)
    return HotBufferSpec.from_mla_spec(full, layout, DEVICE_BUFFER_SIZE, elastic=True)


def compare(misses: LayerMisses, spec: HotBufferSpec, tokens: int, requests: int, device_gib: float) -> dict[str, Any]:
    """Divide the same memory in both ways among requests of the same length.

    Args:
        misses: misses of a trace.
        spec: spec of the hot buffers.
        tokens: length of each request.
        requests: number of requests.
        device_gib: device memory for KV.

    Returns:
        Hot rows in each layer and missed rows of a mean request; empty if the requests do not fit, or are all hot.
    """
    rows_per_block = spec.layout.rows_per_hot_block
    own, needed = spec.num_request_blocks(tokens), spec.num_request_blocks(tokens, is_whole=True)
    spare = int(device_gib * 2**30) // spec.layout.device_block_bytes - 1 - requests * own
    num_whole = spare // (needed - own)
    if not 0 <= num_whole < requests:
        return {}
    others = requests - num_whole

    def missed(blocks: float) -> float:
        """Missed rows of a request that is lent so many blocks."""
        size = (DEVICE_BUFFER_SIZE + blocks * rows_per_block) / TOP_K
        return misses.equal(size, WARM_UP_STEPS) * TOP_K / misses.top_k

    share, rest = spare / requests, (spare - num_whole * (needed - own)) / others
    equal, whole_first = missed(share), others / requests * missed(rest)
    return {
        "hot_rows": DEVICE_BUFFER_SIZE + int(share) * rows_per_block,
        "missed_rows": equal,
        "whole_requests": num_whole,
        "missed_rows_whole_first": whole_first,
        "ratio": equal / whole_first,
    }


@app.command()
def main(
    ctx: typer.Context,
    device_gib: Annotated[float, typer.Option(help="device memory for KV")] = 24.0,
    output: Annotated[Path, typer.Option(help="result file")] = RESULTS / "lent_rows.json",
) -> None:
    """Compare both divisions for the cases of `benchmarks.full_depth` with traces."""
    rows = []
    for (context, file), (key_dtype, key_bytes) in product(TRACE_FILES.items(), KEYS.items()):
        misses = LayerMisses.of(Trace.read(TRACES / file))
        for requests in (28, 56):
            found = compare(misses, hot_spec(key_bytes), context, requests, device_gib)
            if found:
                case = {"trace": file, "context": context, "requests": requests, "indexer_key_dtype": key_dtype}
                rows.append(case | found)
    write_result(output, ctx, "benchmarks.lent_rows", rows)
    show("Lent rows", rows)


if __name__ == "__main__":
    app()
