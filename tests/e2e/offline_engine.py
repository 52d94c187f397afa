"""Runs one offline engine in a process of its own: `main` runs all phases, `serve` one at a time.

A job names engine arguments and phases; each phase is a batch of prompts run to completion, or a script of requests
that are aborted on the way. The result holds tokens, logprobs and what the pools looked like after each phase. `serve`
gets its phases one by one, so that one may follow from the replies to another.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forks import after_platform_update, begin, compile_drafting_once, fork_children


def sampling_params(phase: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    sampling = {"temperature": 0} | phase.get("sampling", {})
    return SamplingParams(max_tokens=phase["max_tokens"], ignore_eos=True, logprobs=2, **sampling)


def completion(output: Any) -> dict[str, Any]:
    best = output.outputs[0]
    logprobs = [step[token].logprob for step, token in zip(best.logprobs, best.token_ids, strict=True)]
    margins = []
    for step in best.logprobs:
        first, second, *_ = sorted((entry.logprob for entry in step.values()), reverse=True)
        margins.append(first - second)
    return {
        "tokens": list(best.token_ids),
        "margins": margins,
        "logprobs": logprobs,
        "num_cached_tokens": output.num_cached_tokens,
        "finish_reason": best.finish_reason,
    }


class RowCheck:
    """Compares hot rows with the host pool every few steps: what a slot says it holds must be there, byte by byte."""

    def __init__(self, worker: Any, every: int, corrupt: bool):
        self.num_steps, self.num_rows, self.num_wrong = 0, 0, 0
        take_stats = worker.take_stats  # called once, when a step is over

        def checked() -> Any:
            if worker.hot_buffer.step.by_class:
                self.num_steps += 1
                if corrupt and self.num_steps == every:
                    self.corrupt(worker)
                if self.num_steps % every == 0:
                    self.check(worker)
            return take_stats()

        worker.take_stats = checked

    def held_rows(self, worker: Any, layer: int) -> Iterator[tuple[Any, Any]]:
        """Flat hot row ids and flat host row ids of what each decoding request has hot in a layer."""
        import torch

        hot, residency = worker.impls[layer].hot, worker.hot_buffer.residency[layer]
        decode = worker.hot_buffer.step.decode_of(layer)
        first_new = decode.seq_lens - (1 if decode.query_lens is None else decode.query_lens)
        is_whole = worker.hot_buffer.heads.tokens_per_unit == 1  # what lies behind the newest token may be anything
        states = decode.seq_indices[decode.first_hot_block_ids.long()].where(decode.first_hot_block_ids >= 0, -1)
        for state, num_whole in zip(states.tolist(), first_new.tolist(), strict=True):
            if state < 0:
                continue
            num_rows = int(decode.num_hot_rows[state])
            slots = torch.arange(num_rows, device=hot.rows.device)[None]
            table = decode.hot_block_tables[state, None]
            is_equal = None if decode.has_equal_rows is None else decode.has_equal_rows[state, None]
            positions = residency.positions[hot.entries(table, slots, is_equal)[0]].cpu().long()
            held = (positions >= 0) & (is_whole | (positions < num_whole))
            row_ids, positions = hot.flat_row_ids(table, slots, is_equal)[0].cpu()[held], positions[held]
            blocks = decode.host_block_tables[state].cpu().long()[positions // decode.block_size]
            yield row_ids.to(hot.rows.device), blocks * decode.block_size + positions % decode.block_size

    def check(self, worker: Any) -> None:
        import torch

        layers = worker.hot_buffer.layers
        for layer, impl in enumerate(worker.impls):
            for row_ids, host_row_ids in self.held_rows(worker, layer):
                hot = impl.hot.rows[row_ids].cpu()
                # NOTE: a dense model's host blocks are on the CPU as vLLM's kernels order them.
                read, host_rows = getattr(worker.hot_buffer.ops, "read_host_rows", None), layers[layer].host
                host = read(host_rows, host_row_ids) if read else host_rows[host_row_ids]
                same = (hot.view(torch.uint8) == host.view(torch.uint8)).all(-1)
                self.num_rows += len(same)
                self.num_wrong += int((~same).sum())

    def corrupt(self, worker: Any) -> None:
        """Shift one hot row of one layer by one element: the check must find it."""
        rows, (row_ids, _) = worker.impls[0].hot.rows, next(self.held_rows(worker, 0))
        rows[row_ids[:1]] = rows[row_ids[:1]].roll(1, -1)


class FormCount:
    """Counts the CUDA graphs that vLLM replays for decode steps of at least 24 requests, by the form of the step.

    Args:
        min_copied_bytes: bytes of a layer from which on a step is to be divided.
    """

    def __init__(self, min_copied_bytes: float):
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        from vllm_hisparse.kv_manager.blocks import step_form

        self.replayed = {"divided": 0, "whole": 0}
        step_form.MIN_COPIED_BYTES, run = min_copied_bytes, CudaGraphManager.run_fullgraph

        def counted(manager: Any, desc: Any) -> Any:
            if desc.num_reqs >= 24:
                self.replayed["whole" if type(desc).__name__ == "WholeStep" else "divided"] += 1
            return run(manager, desc)

        CudaGraphManager.run_fullgraph = counted


class Recorder:
    """Adds up both halves' counters, and keeps the largest value of each gauge, over the engine's life."""

    def __init__(self, *halves: Any):
        self.counters: Counter[str] = Counter()
        self.peaks: dict[str, int] = {}
        self.halves = halves
        for half in halves:
            half.take_stats = self._recorded(half.take_stats)

    def flush(self) -> None:
        for half in self.halves:
            half.take_stats()

    def _recorded(self, take_stats: Any) -> Any:
        def record() -> Any:
            stats = take_stats()
            if stats is None:
                return None
            self.counters.update(stats.data["counters"])
            for name, value in stats.data["gauges"].items():
                self.peaks[name] = max(value, self.peaks.get(name, 0))
            return stats

        return record


def pools(core: Any) -> dict[str, Any]:
    """State of every pool after the requests have ended; raises when one is inconsistent."""
    manager = core.scheduler.kv_cache_manager
    connector = core.scheduler.connector.scheduler
    connector.tracker.check_integrity()
    host_pool = connector.host_pool
    return {
        "device_blocks_used": manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks(),
        "host_blocks_used": host_pool.num_used,
        "host_blocks_cached": host_pool.num_cached,
        "leftovers": len(connector.leftovers()),
    }


def with_images(prompt: list[int], images: list[list[int]]) -> dict[str, Any]:
    """A prompt as vLLM takes it, and its images, given by the arguments of `make_image`."""
    from image_models import make_image
    from PIL import Image

    data = {"image": [Image.fromarray(make_image(*image)) for image in images]}
    return {"prompt_token_ids": prompt} | ({"multi_modal_data": data} if images else {})


def run_phase(llm: Any, phase: dict[str, Any]) -> list[dict[str, Any]]:
    if "images" in phase:
        prompts = list(map(with_images, phase["prompts"], phase["images"]))
    else:
        prompts = [{"prompt_token_ids": prompt} for prompt in phase["prompts"]]
    if "weights" in phase:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": phase["weights"]})
    if phase.get("forgets"):
        reset_connector = phase["forgets"] != "device"
        assert llm.reset_prefix_cache(reset_connector=reset_connector), "the caches could not be emptied"
    if phase.get("last_token_alone"):
        return [complete_in_two_steps(llm, prompt, phase) for prompt in prompts]
    outputs = llm.generate(prompts, sampling_params(phase), use_tqdm=False)
    return [completion(output) for output in outputs]


def complete_in_two_steps(llm: Any, prompt: dict[str, list[int]], phase: dict[str, Any]) -> dict[str, Any]:
    """Compute a prompt without its last token in one step, as a decode instance receives it, and the last one in
    another."""
    scheduler_core(llm).scheduler.max_num_scheduled_tokens = max(len(prompt["prompt_token_ids"]) - 1, 1)
    return completion(llm.generate(prompt, sampling_params(phase), use_tqdm=False)[0])


def run_script(llm: Any, phase: dict[str, Any]) -> list[dict[str, Any]]:
    """Start each prompt after its own number of steps, abort each after another (None: never), finish the rest."""
    engine, num_prompts = llm.llm_engine, len(phase["prompts"])
    arrivals, aborts = phase.get("arrive_after", [0] * num_prompts), phase["abort_after"]
    finished, step = {}, 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for index in [index for index, steps in enumerate(arrivals) if steps == step]:
            engine.add_request(str(index), {"prompt_token_ids": phase["prompts"][index]}, sampling_params(phase))
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = completion(output)
        step += 1
        engine.abort_request([str(index) for index, steps in enumerate(aborts) if steps == step])
    return [finished.get(str(index), {"tokens": None}) for index in range(num_prompts)]


def scheduler_core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def drain(llm: Any) -> None:
    """Steps that are in flight, one more, so that the worker hears of the requests that ended, and as many as vLLM's
    own loop would take without requests, until the tiers have what they are to have."""
    core = scheduler_core(llm)
    while core.batch_queue:
        core.step_with_batch_queue()
    while True:
        step = core.scheduler.schedule()
        core.scheduler.update_from_output(step, core.model_executor.execute_model(step))
        if not core.scheduler.connector.has_pending_push_work():
            return
        time.sleep(0.001)


def num_hot_requests(worker: Any) -> int:
    """Requests that the hot buffer still knows; raises when it is inconsistent."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    hot_buffer = get_kv_transfer_group().worker.hot_buffer
    hot_buffer.check_integrity()
    return len(hot_buffer.requests)


def shared_memory_of(worker: Any) -> str | None:
    """Id that all ranks with the same host pool share; None where the pool is private."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "hisparse-host-pool" in line]
    return maps[0][4] if maps else None  # the inode


def hot_cache(hot: Any) -> Any:
    """The hot blocks of one layer without what lies between them."""
    num_blocks, width = -(-len(hot.rows) // hot.block_stride_rows), hot.rows.shape[1]
    size = (num_blocks, hot.rows_per_block, width)
    return hot.rows.as_strided(size, (hot.block_stride_rows * width, width, 1))


def poison_of(worker: Any, rows: Any) -> float:
    """A value that reads as NaN: quantised rows are bytes.

    vLLM's CPU kernel for dense models multiplies the rest of a block with weights of 0: there it is a large number.
    """
    if worker.config.dense_unit is not None:
        return 1e4 if rows.is_floating_point() else 0x7E  # the largest number of fp8
    return float("nan") if rows.is_floating_point() else 0x7F


def poison_rows(_: Any) -> None:
    """Fill a worker's KV, which nobody has written, with NaN: whoever reads it shows it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().worker
    hot_caches = [hot_cache(impl.hot) for impl in worker.impls]
    for rows in (*worker.store.main_kv.values(), *hot_caches):
        rows.fill_(poison_of(worker, rows))


def poison_again(scheduler: Any, worker: Any) -> None:
    """Poison host blocks whenever the pool hands them out."""
    take = scheduler.host_pool._take

    def take_poisoned() -> int:
        block_id = take()
        for rows in worker.store.main_kv.values():
            rows[block_id] = poison_of(worker, rows)
        return block_id

    scheduler.host_pool._take = take_poisoned


def record_engine(llm: Any, recorder: Recorder) -> dict[str, Any]:
    """Pools, counters and peaks after a phase."""
    drain(llm)
    recorder.flush()
    record: dict[str, Any] = {"pools": pools(scheduler_core(llm))}
    executor = scheduler_core(llm).model_executor
    record["worker_requests"] = sum(executor.collective_rpc(num_hot_requests))
    record["shared_memory"] = executor.collective_rpc(shared_memory_of)
    record["scheduler"] = type(scheduler_core(llm).scheduler).__name__
    return {**record, "counters": dict(recorder.counters), "peaks": dict(recorder.peaks)}


def count_drafts(llm: Any) -> dict[str, int]:
    """Tokens that were drafted and accepted so far; the engine must log statistics."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    names = {"drafted": "draft_tokens", "accepted": "accepted_tokens"}
    return {name: round(values[f"vllm:spec_decode_num_{metric}"]) for name, metric in names.items()}


def virtual_bytes() -> int:
    """Largest memory of this process, with memory that it has allocated and never used."""
    return int(re.search(r"^VmPeak:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def make_recorder(llm: Any) -> Recorder | None:
    """State of the scheduler half where the workers are in other processes; None without a connector, or when the
    scheduler is in another process, too."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    connector = scheduler_core(llm).scheduler.connector if hasattr(llm.llm_engine.engine_core, "engine_core") else None
    if connector is None:
        return None
    scheduler_core(llm).model_executor.collective_rpc(poison_rows)
    scheduler = connector.scheduler
    scheduler.take_due_stats = lambda: scheduler.take_stats()  # in every step: a gauge may peak in any
    if not has_kv_transfer_group():
        return Recorder(scheduler)
    halves = scheduler, get_kv_transfer_group().worker
    poison_again(*halves)
    return Recorder(*halves)


class Nothing:
    """A stream or an event of a device whose work is done when a call returns."""

    def __init__(self, *_: Any, **__: Any):
        self.wait_stream = self.record = self.synchronize = lambda *_: None


def schedule_asynchronously() -> None:
    """Have two batches in flight, which vLLM does everywhere but on the CPU."""
    import torch

    def turn_on(vllm_config: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True

    after_platform_update(turn_on)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = Nothing
    torch.cuda.stream = nullcontext


def in_4_bits(keys: Any) -> Any:
    from vllm_hisparse.ops.indexer_keys import dequantize, quantize

    values, scales = dequantize(*quantize(keys))
    return values.float() * scales[..., None]


def round_keys(is_rounded: Callable[[Any], bool] = lambda slots: True) -> None:
    """Have a full-KV engine select with keys that 4 bits can hold; on CUDA, in eager mode.

    Args:
        is_rounded: gets the slots of a step's new keys, [tokens] int64, and tells if these keys are rounded.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_hisparse.cpu import indexer_scores

        insert_on_cpu = indexer_scores.insert_keys

        def insert_keys(cache: Any, keys: Any, slots: Any) -> None:
            insert_on_cpu(cache, in_4_bits(keys) if is_rounded(slots) else keys, slots)

        indexer_scores.insert_keys = insert_keys
        return
    import torch
    from vllm import _custom_ops
    from vllm.models.deepseek_v32 import attention

    stock, insert = attention.fused_norm_rope, _custom_ops.indexer_k_quant_and_cache

    def insert_rounded(keys: Any, cache: Any, slots: Any, *args: Any) -> None:
        insert(in_4_bits(keys).to(keys.dtype) if is_rounded(slots) else keys, cache, slots, *args)

    def with_rounded_keys(*args: Any, indexer_k_cache: Any = None, index_k_out: Any = None, **kwargs: Any) -> Any:
        slots = kwargs.get("indexer_slot_mapping")
        if indexer_k_cache is None or not is_rounded(slots):
            return stock(*args, indexer_k_cache=indexer_k_cache, index_k_out=index_k_out, **kwargs)
        keys = torch.zeros_like(args[9])
        out = stock(*args, indexer_k_cache=None, index_k_out=keys, **kwargs)
        insert_rounded(keys[: len(slots)], indexer_k_cache, slots[: len(keys)], 128, "ue8m0")
        return out

    attention.fused_norm_rope, _custom_ops.indexer_k_quant_and_cache = with_rounded_keys, insert_rounded


def round_received_keys() -> None:
    """Have a full-KV engine do what a decode instance with keys in 4 bits does after a prefill instance.

    A step of several tokens is a prompt on the prefill instance: it has keys in 8 bits. A step of one token selects
    with keys in 4 bits: earlier ones are rounded when they are read. So the engine computes one request at a time.
    """
    from vllm.platforms import current_platform

    from vllm_hisparse.cpu import indexer_scores
    from vllm_hisparse.ops import indexer_keys

    decodes = False

    def is_decoded(slots: Any) -> bool:
        nonlocal decodes
        decodes = int((slots >= 0).sum()) == 1
        return decodes

    round_keys(is_decoded)
    if current_platform.is_cpu():
        load = indexer_scores.load_keys

        def load_keys(*args: Any) -> Any:
            return in_4_bits(load(*args)) if decodes else load(*args)

        indexer_scores.load_keys = load_keys
        return
    from vllm.model_executor.layers import sparse_attn_indexer

    stock = sparse_attn_indexer.fp8_fp4_paged_mqa_logits

    def of_rounded_keys(
        query: Any, cache: Any, weights: Any, lengths: Any, block_table: Any, *args: Any, **kwargs: Any
    ):
        elements, scales = indexer_scores.key_views(cache.squeeze(2), indexer_keys.HEAD_DIM)
        blocks = block_table[:, : -(-int(lengths.max()) // cache.shape[1])].flatten().long()
        keys = elements[blocks].float() * scales[blocks][..., None]
        # In place, because no later step reads this request's keys in 8 bits.
        elements[blocks], scales[blocks] = indexer_keys.dequantize(*indexer_keys.quantize(keys))
        return stock(query, cache, weights, lengths, block_table, *args, **kwargs)

    sparse_attn_indexer.fp8_fp4_paged_mqa_logits = of_rounded_keys


class OfflineEngine:
    """The engine of a job, with whatever watches it."""

    def __init__(self, job: dict[str, Any]):
        from vllm import LLM

        if job.get("async_scheduling"):
            schedule_asynchronously()
        if job.get("narrow_keys"):
            round_keys()
        if job.get("receives_keys"):
            round_received_keys()
        self.forms = FormCount(job["min_copied_bytes"]) if "min_copied_bytes" in job else None
        self.llm = LLM(**job["engine"])
        self.recorder = make_recorder(self.llm)
        self.check = RowCheck(self.recorder.halves[1], **job["row_check"]) if "row_check" in job else None

    def run(self, phase: dict[str, Any]) -> dict[str, Any]:
        """One phase's record."""
        run = run_script if "abort_after" in phase else run_phase
        start = time.perf_counter()
        record: dict[str, Any] = {"completions": run(self.llm, phase), "seconds": time.perf_counter() - start}
        record["virtual_bytes"] = virtual_bytes()
        if self.recorder is not None:
            record |= record_engine(self.llm, self.recorder)
        if self.llm.llm_engine.vllm_config.speculative_config is not None:
            record["drafts"] = count_drafts(self.llm)
        if self.forms is not None:
            record["replayed"] = dict(self.forms.replayed)
        if self.check is not None:
            record |= {"checked_rows": self.check.num_rows, "wrong_rows": self.check.num_wrong}
        return record


def main(job: dict[str, Any]) -> dict[str, Any]:
    engine = OfflineEngine(job)
    return {"phases": [engine.run(phase) for phase in job["phases"]]}


def serve(job: dict[str, Any], log_path: str, pipe: Connection) -> None:
    """Run phases from a pipe until None comes, in a forked process with a log of its own."""
    begin(log_path, job["environment"])
    sys.path[:0] = job.get("python_path", [])
    for library in job.get("libraries", []):
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # found by its name when a plugin needs it
    compile_drafting_once()
    if job.get("forks"):
        fork_children()
    engine = OfflineEngine(job)
    while (phase := pipe.recv()) is not None:
        pipe.send(engine.run(phase))
    engine.llm.llm_engine.engine_core.shutdown()
