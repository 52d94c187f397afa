"""Numbers that the README and docs/performance.md claim are those of committed result files."""

from __future__ import annotations

import json
import re
import statistics
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from vllm_hisparse.attention.mla.microbatch_sizes import LEAST_REQUESTS, MANAGED_LEAST_REQUESTS
from vllm_hisparse.cli.plan.memory import KVMemory, System
from vllm_hisparse.cli.plan.models import ModelShape

ROOT = Path(__file__).parents[1]
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
README = (ROOT / "README.md").read_text()


def rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a result file on H200s whose columns have the wanted values."""
    found = json.loads((ROOT / "benchmarks" / "results" / "h200" / f"{name}.json").read_text())["rows"]
    return [row for row in found if all(row[column] == value for column, value in wanted.items())]


def cell(name: str, column: str, **wanted: Any) -> float:
    (row,) = rows(name, **wanted)
    return row[column]


def results(path: str) -> list[dict[str, Any]]:
    """Rows of any result file, such as "h100/doctor"."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{path}.json").read_text())["rows"]


def note_of(path: str) -> str:
    return json.loads((ROOT / "benchmarks" / "results" / f"{path}.json").read_text())["note"]


def section(heading: str) -> str:
    """A section of docs/performance.md, up to the next heading; its lines are joined by blanks, but not its tables'."""
    begin = PERFORMANCE.index(f"\n{heading}")
    text = PERFORMANCE[begin + 1 :].partition("\n#")[0]
    return re.sub(r"(?<=[^|\n])\n(?=[^|\n*])", " ", text)


def table(heading: str) -> list[list[str]]:
    """Cells of the table of a section, without its head."""
    lines = re.findall(r"^\| (.*) \|$", section(heading), re.MULTILINE)
    return [line.split(" | ") for line in lines[1:]]


def beside(columns: int) -> list[list[str]]:
    """Lines of one of the three tables beside the peers. Two compare with SGLang: with both systems' full KV (six
    columns), and without it (four)."""
    return [cells for cells in table("## Beside the peers") if len(cells) == columns and cells[0] != "case"]


def whole(value: float) -> str:
    return f"{int(value + 0.5):,}"


def rounded(value: float, digits: int) -> str:
    """A measured number. NOTE: halves are rounded as they are written, 1.335 to 1.34, not as binary numbers."""
    return f"{Decimal(str(value)):,.{digits}f}"


def spread(values: list[float], digits: int) -> str:
    return f"{rounded(min(values), digits)} to {rounded(max(values), digits)}"


def ratio(name: str, column: str = "tokens_per_s", *, over: str = "full", **wanted: Any) -> float:
    return cell(name, column, system="ours", **wanted) / cell(name, column, system=over, **wanted)


@pytest.mark.parametrize(
    ("result", "case", "label"),
    [
        ("full_depth", {"context": 32768, "requests": 56}, "56 requests of 32K"),
        ("full_depth", {"context": 65536, "requests": 28}, "28 requests of 64K"),
        ("full_depth", {"context": 67832, "requests": 28}, "28 requests of 66K, recorded trace"),
        ("full_depth_shared", {"context": 32768, "requests": 56}, "56 requests of 32K, indexers shared as in GLM-5.2"),
        ("full_depth", {"context": "mixed"}, "short and long prompts mixed, 900 per minute"),
    ],
)
def test_rows_of_the_table_at_full_depth(result: str, case: dict[str, Any], label: str) -> None:
    section = PERFORMANCE[PERFORMANCE.index("## More requests than full KV can hold") :]
    line = re.search(rf"^\| {re.escape(label)} \|.*$", section, re.MULTILINE)
    assert line is not None
    *speeds, claimed = re.findall(r"([\d,.]+) (?:tokens/s|\|)", line[0].replace(label, ""))
    expected = [cell(result, "tokens_per_s", system=system, **case) for system in ("full", "ours")]
    assert [speed.replace(",", "") for speed in speeds] == [f"{speed:.0f}" for speed in expected]
    assert claimed == f"{expected[1] / expected[0]:.2f}"
    if "running" in line[0]:
        running = [str(cell(result, "running_max", system=system, **case)) for system in ("full", "ours")]
        assert re.findall(r"(\d+) running", line[0]) == running


@pytest.mark.parametrize(
    ("result", "case", "label"),
    [
        ("full_depth", {"context": 32768, "requests": 56}, "56 requests of 32K"),
        ("full_depth", {"context": 65536, "requests": 28}, "28 requests of 64K"),
        ("full_depth", {"context": 35064, "requests": 56}, "56 requests of 34K, recorded trace"),
        ("full_depth", {"context": 67832, "requests": 28}, "28 requests of 66K, recorded trace"),
        ("mtp", {"context": 32768, "requests": 56, "drafts": 1}, "56 requests of 32K, one draft"),
        ("mtp", {"context": 65536, "requests": 28, "drafts": 1}, "28 requests of 64K, one draft"),
    ],
)
def test_beside_the_peers(result: str, case: dict[str, Any], label: str) -> None:
    full, native, ours = (cell(result, "tokens_per_s", system=name, **case) for name in ("full", "vllm_native", "ours"))
    cells = " | ".join(f"{int(speed + 0.5):,}" for speed in (full, native, ours))
    assert f"| {label} | {cells} | {ours / native:.2f} |" in PERFORMANCE


def test_beside_vllms_own_hisparse_with_a_draft_and_033() -> None:
    name, expected, ratios = "full_depth_drafts_native", [], []
    for label, case in list(CASES.items())[:2]:
        (ours,), (native,) = (rows(name, system=system, **case) for system in ("ours", "vllm_native"))
        ratios.append(ours["tokens_per_s"] / native["tokens_per_s"])
        cells = [whole(row["tokens_per_s"]) for row in (native, ours)]
        label = f"{label}, one draft, vLLM 0.33, the plugin's keys in 4 bits"
        expected.append([label, "–", *cells, f"{ratios[-1]:.2f}"])
        assert ours["drafts"] == native["drafts"] == 1 and ours["host_memory"] == "managed"
        assert (ours["indexer_key_dtype"], native["indexer_key_dtype"]) == ("fp4", "auto")
        assert ours["settle"] == native["settle"] == 300 and ours["steps"] == native["steps"] == 48
    assert beside(5)[-2:] == expected
    text = section("## Beside the peers")
    assert f"Host pools had {pool_gib(name)} GiB" in text and "Steps were timed after 300 others" in text
    running = {
        (file, system): cell(file, "running_max", system=system, drafts=1, **CASES["56 requests of 32K"])
        for file in ("mtp", name)
        for system in ("ours", "vllm_native")
    }
    assert running["mtp", "vllm_native"] == running[name, "vllm_native"] and running["mtp", "ours"] == 56
    claim = f"vLLM's own HiSparse ran {running[name, 'vllm_native']} of the 56 requests of 32K in both measurements; "
    assert f"{claim}the plugin ran all of them with vLLM 0.32, and {running[name, 'ours']} with 0.33" in text
    with_drafts = [float(cells[-1]) for cells in beside(5) if "draft" in cells[0]]
    comparison = " ".join((ROOT / "docs" / "comparison.md").read_text().split())
    assert f"with one draft, it is {spread(with_drafts, 2)} times that of vLLM's own" in comparison


def test_beside_sglang() -> None:
    expected, own, its = [], [], []
    for label, case in CASES.items():
        full, ours = (cell("full_depth_whole_steps", "tokens_per_s", system=name, **case) for name in ("full", "ours"))
        names = "sglang_full", "sglang"
        other_full, other = (cell("full_depth_peers", "tokens_per_s", system=name, **case) for name in names)
        cells = [whole(speed) for speed in (full, ours, other_full, other)]
        expected.append([label, *cells, f"{ours / other:.2f}"])
        if case["requests"] != 16:
            own.append(ours / full)
            its.append(other / other_full)
    assert beside(6) == expected
    text = section("## Beside the peers")
    assert f"the plugin has {spread(own, 2)} times" in text and f"SGLang's HiSparse {spread(its, 2)} times" in text
    assert (
        cell("full_depth_whole_steps", "running_max", system="ours", **CASES["56 requests of 34K, recorded trace"])
        == 55
    )


def test_beside_sglang_with_a_draft_and_where_nothing_is_copied() -> None:
    cases = {
        "56 requests of 32K, one draft": ("drafts", 32768),
        "28 requests of 64K, one draft": ("drafts", 65536),
        "400 requests of 500 tokens": ("fit", 500),
        "one request of 16K": ("fit", 16384),
    }
    expected = []
    for label, (name, context) in cases.items():
        found = {row["system"]: row for row in rows(f"full_depth_peers_{name}", context=context)}
        ours, other = found["ours"], found["sglang"]
        assert ours["running_max"] == ours["requests"] and ours["drafts"] == other["drafts"] == (name == "drafts")
        speeds = [
            whole(row["tokens_per_s"]) if context != 16384 else rounded(row["tokens_per_s"], 1) for row in (ours, other)
        ]
        running = "" if other["running_max"] == other["requests"] else f", {other['running_max']} running"
        ratio = ours["tokens_per_s"] / other["tokens_per_s"]
        expected.append([label, speeds[0], speeds[1] + running, f"{ratio:.2f}"])
        if name == "fit":
            full = found["full"]["tokens_per_s"]
            assert (whole(full) if context == 500 else rounded(full, 1)) in section("## Beside the peers")
    assert beside(4) == expected
    (ours, its) = (
        cell("full_depth_peers_drafts", "tokens_per_step", system=each, context=32768) for each in ("ours", "sglang")
    )
    claim = f"SGLang's HiSparse got {its:.2f} tokens per step and request in the first line, and the plugin {ours:.2f}"
    assert claim in section("## Beside the peers")


def test_what_else_was_measured_with_the_present_kernels() -> None:
    drafts = {(row["system"], row["context"]): row["tokens_per_s"] for row in rows("mtp_keys")}
    text = section("## With drafts")
    for context in (32768, 65536):
        ours, full = drafts["ours", context], drafts["full", context]
        assert f"get {whole(ours)}" in text and whole(full) in text and f"({ours / full:.2f} times" in text
    times = {row["row_bytes"]: row["us_p50"] for row in rows("swap_in_576", system="ours", op="swap_in")}
    text = section("## Swap-in")
    assert f"{100 * (1 - times[576] / times[656]):.0f}% faster: {times[576]:.0f} instead of {times[656]:.0f} us" in text
    found = rows("backends_flashinfer", requests=16)
    speeds = {(row["backend"], row["system"]): row["tokens_per_s"] for row in found}
    one, other = "FLASHINFER", "FLASH_ATTN 3"
    ratios = [f"{speeds[name, 'ours'] / speeds[name, 'full']:.2f}" for name in (one, other)]
    claim = f"got {whole(speeds[one, 'ours'])} tokens/s with `FLASHINFER` and {whole(speeds[other, 'ours'])} with"
    assert claim in section(BACKENDS) and f"{ratios[0]} and {ratios[1]} times full KV's" in section(BACKENDS)
    rates = {(row["choice"], row["way"], row["piece_kib"]): row["gb_s"] for row in results("h200x2/imports")}
    host = [f"{rates[choice, 'host', 41]:.2f}" for choice in ("default", "pipeline")]
    assert f"Between two H200s, the rates are {host[0]} and {host[1]} GB/s" in section(UNDER_LOAD)
    (soak,) = results("h200/soak")
    claim = "{sessions} sessions, {preempted} preemptions, {tier_loaded_blocks:,} blocks loaded from a tier, {aborted}"
    assert claim.format(**soak) in section(UNDER_LOAD) and soak["is_flat"] and not soak["wrong_rows"]
    assert f"| {soak['minute']:.0f} minutes at saturation of a tiny model on an H200" in section(UNDER_LOAD)
    claim = "{compared_answers:,} answers with {compared_tokens:,} tokens are full KV's up to {ties:,} ties, except for"
    assert claim.format(**soak) in section(UNDER_LOAD)
    exact = results("cpu/soak_float32")
    assert len(exact) == soak["wrong_tokens"] == len(soak["wrong"])
    assert f"except for {len(exact)} tokens" in section(UNDER_LOAD)
    assert [row["got"] for row in exact] == [answer["got"] for answer in soak["wrong"]]
    distances = [row["got_distance"] for row in exact]
    claim = (
        f"ranks these {len(exact)} tokens {min(distances):.2f} to {max(distances):.2f} (logprobs) below its best ones"
    )
    assert claim in section(UNDER_LOAD) and "are those that full KV chose on the GPU" in section(UNDER_LOAD)
    share = f"[{len(exact)} of {soak['compared_tokens']:,} tokens]"
    assert share in section("## Same tokens")
    assert not any(row["expected_distance"] for row in exact)
    assert f"{soak['checked_rows'] / 1e6:.1f} million hot rows were compared" in section(UNDER_LOAD)
    first = next(each for each in soak["samples"] if each["minute"] >= 8)
    later = [each["own_mib"]["engine"] - first["own_mib"]["engine"] for each in soak["samples"] if each["minute"] > 8]
    claim = f"was {later[-1]:.0f} MiB larger at the end than {soak['minute'] - first['minute']:.0f} minutes before"
    assert f"{claim}, and at most {max(later):.0f} MiB larger in between" in section(UNDER_LOAD)
    assert soak["has_ended"] and not any(soak["left_at_end"].values())
    assert f"{soak['backlog']} more answers were not compared" in section(UNDER_LOAD)


def test_the_readme_compares_with_the_peers() -> None:
    case = {"context": 32768, "requests": 56}
    speeds = [cell("full_depth", "tokens_per_s", system=name, **case) for name in ("ours", "full", "vllm_native")]
    ours, full, native = (f"{round(speed):,}" for speed in speeds)
    expected = f"get {ours} tokens/s with the plugin, {full} with full KV, and {native} with the HiSparse"
    assert expected in " ".join(README.split())


def test_what_is_measured_under_load() -> None:
    speeds = {name: rows("full_depth", context="mixed", system=name)[0] for name in ("full", "ours")}
    ours, full = speeds["ours"], speeds["full"]
    assert f"{ours['tokens_per_s'] / full['tokens_per_s']:.2f} times full KV's tokens/s" in PERFORMANCE
    assert f"{ours['running_max']} instead of {full['running_max']} requests run" in PERFORMANCE
    percentiles = f"{ours['itl_ms_p99']:.0f} instead of {full['itl_ms_p99']:.0f} ms"
    assert f"the 99th percentile of the time between tokens is {percentiles}" in PERFORMANCE
    doctor = json.loads((ROOT / "benchmarks" / "results" / "h100" / "doctor.json").read_text())["rows"]
    rates = {row["what"]: row["value"] for row in doctor}
    seconds = 32768 * 61 * 656 / rates["nixl_local"] / 1e9
    assert f"{rates['nixl_local']:.2f} GB/s between two processes" in PERFORMANCE
    assert f"{seconds:.1f} s for 32K tokens" in PERFORMANCE
    assert f"16 GiB: {rates['pin']:.1f} s to pin, {rates['unpin']:.1f} s to unpin" in PERFORMANCE
    campaign = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "campaign.json").read_text())["rows"]
    assert f"{sum(row.get('lives', 0) for row in campaign):,} simulated lives" in PERFORMANCE
    assert not any(row.get("violations") for row in campaign)


FITS = "## Where full KV fits"


def test_where_full_kv_fits() -> None:
    name = "full_depth_lrfu_fit"
    for requests, claim in (
        (1, "one request of 16K tokens takes {} ms per token instead of {} ms"),
        (16, "16 requests of 32K take {} ms instead of {} ms"),
    ):
        (row,), (full,) = (
            rows(name, system=system, requests=requests, indexer_key_dtype="auto") for system in ("ours", "full")
        )
        times = [f"{each['itl_ms_p50']:.1f}" for each in (row, full)]
        assert claim.format(*times) in " ".join(README.split())
    measured, equal = [], {"rows_by_layer": "equal"}
    for requests, options in (
        (400, {"indexer_key_dtype": "auto", **equal}),
        (1, {"indexer_key_dtype": "auto", **equal}),
        (16, {"indexer_key_dtype": "auto", **equal}),
        (16, {"indexer_key_dtype": "fp4", **equal}),
        (16, {"indexer_key_dtype": "fp4", "rows_by_layer": "code-dsa-8192:3.5"}),
    ):
        speeds = [
            cell(name, "tokens_per_s", system="full", requests=requests),
            cell(name, "tokens_per_s", system="ours", requests=requests, **options),
        ]
        keys = "4 bits" if options["indexer_key_dtype"] == "fp4" else "8 bits"
        keys += ", list" if options["rows_by_layer"] != "equal" else ""
        cells = [f"{rounded(speed, 1)}" if requests == 1 else whole(speed) for speed in speeds]
        measured.append([keys, *cells, f"{speeds[1] / speeds[0]:.2f}"])
    assert [cells[1:] for cells in lines_of(FITS, 5)] == measured
    (row,) = rows(name, system="ours", requests=16, indexer_key_dtype="auto")
    (full,) = rows(name, system="full", requests=16)
    own = row["kernel_ms"]["resolve"] + row["kernel_ms"]["copies"]
    less = full["kernel_ms"]["attention"] - row["kernel_ms"]["attention"]
    claim = (
        f"16 requests take {own:.1f} ms of a step of {row['itl_ms_p50']:.1f} ms, and attention takes {less:.1f} ms less"
    )
    assert claim in section(FITS)


def test_where_full_kv_fits_in_earlier_versions() -> None:
    text = section(FITS)
    many = [ratio(name, context=500) for name in ("full_depth_peers_fit", "full_depth_fit")]
    one = [ratio(name, context=16384) for name in ("full_depth_peers_fit", "full_depth_fit")]
    one.append(of_own_copies(16384, 1, "auto", 2))
    assert f"400 requests of 500 tokens at {many[0]:.2f} and {many[1]:.2f}" in text
    assert f"one of 16K at {min(one):.2f} to {max(one):.2f}" in text
    speeds = [cell("full_depth_fit", "tokens_per_s", system=each, requests=43) for each in ("ours", "full")]
    ratios = [speeds[0] / speeds[1], ratio("full_depth_whole_steps", context=12288)]
    claim = f"ran at {min(ratios):.2f} to {max(ratios):.2f} (for example {whole(speeds[0])} tokens/s instead of"
    assert f"{claim} {whole(speeds[1])}; full_depth_fit)" in text


def of_own_copies(context: int, requests: int, keys: str, launches: int) -> float:
    """Tokens/s of the plugin to those of full KV: the mean of the rows with so many launches for a swap-in."""
    case = {"context": context, "requests": requests}
    wanted = {"system": "ours", "indexer_key_dtype": keys, "launches": launches}
    speeds = [row["tokens_per_s"] for row in rows("full_depth_own_copies", **case, **wanted)]
    return statistics.mean(speeds) / cell("full_depth_own_copies", "tokens_per_s", system="full", **case)


def test_a_resolve_that_copies_its_misses() -> None:
    text = " ".join((ROOT / "docs" / "decisions" / "resolve-clusters.md").read_text().split())
    times: dict[tuple, dict[str, float]] = {}
    for row in rows("swap_in_own_copies"):
        case = row["device_buffer_size"], row["batch"], row["misses_per_request"]
        times.setdefault(case, {})[row["op"]] = row["us_p50"]
    slower = {case: each["swap_in_one_launch"] - each["swap_in"] for case, each in times.items()}

    def between(least: float, most: float, sizes: tuple[int, ...] = (4096, 16448)) -> list[float]:
        return [value for (size, _, misses), value in slower.items() if least <= misses <= most and size in sizes]

    few, some, more = between(0, 2), between(6, 7), between(16, 18, (4096,))
    assert f"{-max(few):.1f} to {-min(few):.1f} us faster with at most 2 misses per request" in text
    assert f"{-min(some):.1f} us faster to {max(some):.1f} us slower with 6 or 7" in text and min(between(16, 999)) > 0
    (alone,) = (slower[case] for case in slower if case[:2] == (4096, 1) and 230 < case[2] < 231)
    assert (
        f"by {min(more):.1f} to {max(more):.1f} us with about 17 (4,096 hot rows), and by {alone:.1f} us with 230"
        in text
    )
    gains = [
        100 * (of_own_copies(*case, 1) / of_own_copies(*case, 2) - 1)
        for case in ((32768, 16, "auto"), (32768, 16, "fp4"), (16384, 1, "auto"))
    ]
    assert f"decoded {gains[0]:.1f}% more tokens/s with keys in 8 bits, and {gains[1]:.1f}% more with keys" in text
    missed = {
        round((1 - row["hit_rate"]) * 2048) for row in rows("full_depth_own_copies", system="ours", context=16384)
    }
    assert f"one request of 16K that missed 6 rows per layer decoded {-gains[2]:.1f}% fewer" in text and 6 in missed


def test_where_the_time_of_400_short_requests_goes() -> None:
    names = "sglang", "ours", "full"
    found = [next(iter(rows("full_depth_fit", system=name, requests=400))) for name in names]
    text = section("## Beside the peers")
    times = [f"{row['itl_ms_p50']:.1f} ms" for row in found]
    assert f"A step takes {times[0]} in SGLang, {times[1]} with the plugin, and {times[2]}" in text
    attention, experts = ([f"{row['kernel_ms'][kind]:.1f}" for row in found] for kind in ("attention", "experts"))
    claim = f"Attention takes {attention[0]} ms in SGLang, {attention[1]} ms with the plugin, and {attention[2]} ms"
    assert claim in text and f"experts take {experts[0]}, {experts[1]} and {experts[2]} ms" in text
    own = found[1]["kernel_ms"]["resolve"] + found[1]["kernel_ms"]["copies"]
    assert f"lookups and copies together take {own:.1f} ms" in text


def test_admission_after_more_steps() -> None:
    case = {"context": 12288, "requests": 100}
    ours, full = (next(iter(rows("full_depth_admission_settled", system=name, **case))) for name in ("ours", "full"))
    speeds = [row["tokens_per_s"] for row in (ours, full)]
    claim = f"{ours['running_max']} run and get {whole(speeds[0])} tokens/s; with full KV, {full['running_max']} run"
    claim += f" and get {whole(speeds[1])} (ratio {speeds[0] / speeds[1]:.2f};"
    assert claim in section("## Without locality")


# Columns of `microbatch_orders`: the package's order, and below it what other orders change
ORDER = {
    "indexer": "by microbatch",
    "copies": "side by side",
    "priority": False,
    "copies_begin": "behind the joined query",
    "begins_after": "selection",
    "lookups": "-",
    "gather_thread_blocks": 8,
    "rows_per_warp": 1,
    "score_thread_blocks": 132,
    "attention_parts": 66,
    "selecting_kernel": "plugin's",
    "selection_threads": 512,
    "selection_thread_blocks": None,
}
EARLY = {"priority": True, "copies_begin": "with the lookup"}
ONE_AT_A_TIME = {"copies": "one at a time", **EARLY}
ONE_GO = {"indexer": "once", "begins_after": "-", "lookups": "once", "gather_thread_blocks": 16, **ONE_AT_A_TIME}
SPARED = {"begins_after": "lookup", "score_thread_blocks": 120}
ORDERS = {
    "as in the package, with vLLM's kernel that selects": (3, {"selecting_kernel": "vLLM's"}),
    "**as in the package**": (3, {}),
    "the indexer in one go, copies one at a time": (3, ONE_GO),
    "as in the package, another run": (2, {}),
    "copies one at a time, scores on 120 of 132 multiprocessors": (2, SPARED | ONE_AT_A_TIME),
}


def step_in_order(context: int, run: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a case whose step ran in an order, with equal microbatches and keys in 4 bits: the first one,
    because some runs end with their first order again."""
    wanted = {"context": context, "run": run, "indexer_key_dtype": "fp4", **ORDER, **changes}
    return next(row for row in rows("microbatch_orders", **wanted) if set(row["microbatches"]) == {14})


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_a_step(order: str) -> None:
    decision = (ROOT / "docs" / "decisions" / "microbatches.md").read_text()
    (line,) = (line for line in decision.splitlines() if line.startswith(f"| {order} |"))
    claimed = line.strip("| ").split(" | ")[1:]
    for cell_, context in zip(claimed, (32768, 65536, 35064, 67832), strict=True):
        if cell_ == "–":
            assert order == next(iter(ORDERS)) and context in (35064, 67832)  # not measured
        else:
            assert cell_ == f"{step_in_order(context, *ORDERS[order])['itl_ms_p50']:.2f}", context


def test_the_fastest_order_of_one_case() -> None:
    decision = " ".join((ROOT / "docs" / "decisions" / "microbatches.md").read_text().split())
    small, large = (
        [step_in_order(context, 1, changes)["itl_ms_p50"] for changes in (SPARED | EARLY, {})]
        for context in (32768, 65536)
    )
    found = [row["itl_ms_p50"] for row in rows("microbatch_orders", context=65536)]
    assert large[0] == min(found)
    assert f"28 requests of 64K, {large[0]:.2f} instead of {large[1]:.2f} ms" in decision
    assert f"56 requests of 32K then took {small[0]:.2f} instead of {small[1]:.2f} ms" in decision


def test_a_gather_that_is_alone_on_the_link() -> None:
    decision = " ".join((ROOT / "docs" / "decisions" / "microbatches.md").read_text().split())
    found = [step_in_order(context, 3, ONE_GO) for context in (32768, 65536)]
    times = [row["kernel_us"]["gather"] for row in found]
    rates = [14 * 2048 * (1 - row["hit_rate"]) * 656 / us / 1000 for row, us in zip(found, times, strict=True)]
    claim = f"takes {times[0]:.0f} us with 32K tokens and {times[1]:.0f} us with 64K"
    assert f"{claim}, which is {rates[0]:.0f} and {rates[1]:.0f} GB/s" in decision


def cluster_of(queries: int) -> int:
    """Thread blocks of a cluster, with which the package launches the kernel that selects."""
    return next(size for size in (8, 4, 2, 1) if size == 1 or size * queries <= 128)


def test_the_kernel_that_selects() -> None:
    decision = " ".join((ROOT / "docs" / "decisions" / "own-kernel-selects-positions.md").read_text().split())
    vllm = {"selecting_kernel": "vLLM's"}
    own, stock = ([step_in_order(c, 3, changes)["itl_ms_p50"] for c in (32768, 65536)] for changes in ({}, vllm))
    assert f"56 requests of 32K took {own[0]:.2f} instead of {stock[0]:.2f} ms" in decision
    assert f"28 requests of 64K took {own[1]:.2f} instead of {stock[1]:.2f} ms" in decision

    def in_one_go(key_dtype: str, **changes: Any) -> list[float]:
        wanted = {"run": 3, **ORDER, **ONE_GO, "indexer_key_dtype": key_dtype, **changes}
        found = rows("microbatch_orders", **wanted)
        return [row["itl_ms_p50"] for row in found if set(row["microbatches"]) == {14}]

    pairs = [
        zip(in_one_go(key_dtype, selection=selection), in_one_go(key_dtype, selection=selection, **vllm), strict=True)
        for key_dtype, selection in (("fp4", "independent"), ("fp4", "trace"), ("auto", "trace"))
    ]
    gains = [round(100 * (stock / own - 1)) for pair in pairs for own, stock in pair]
    assert len(gains) == 6
    assert f"the changed form was {min(gains[:2])} to {max(gains[:2])}% faster in these two cases" in decision
    assert f"between {-min(gains[2:])}% slower and {max(gains[2:])}% faster with traces" in decision
    is_slower = [
        row["vllm_cooperative_us"] < row[f"plugin_512x{cluster_of(row['queries'])}_us"]
        for row in rows("select_positions")
    ]
    assert f"vLLM's kernel was faster in {sum(is_slower)} of {len(is_slower)} cases" in decision
    assert "not in the package" in note_of("h200/microbatch_orders")
    assert "the package does not have these changes" in decision
    for scores, claim in (
        ("normal", "it takes {0} us, and the changed form {1} us, if the scores are normally distributed"),
        ("near 3", "{0} and {1} us if they lie close together"),
        ("equal", "{0} and {1} us if they are equal"),
    ):
        (row,) = rows("select_positions", scores=scores, context=32768, queries=14)
        assert claim.format(f"{row['vllm_cooperative_us']:.1f}", f"{row['plugin_512x8_us']:.1f}") in decision


def test_copies_of_one_microbatch_at_a_time() -> None:
    decision = (ROOT / "docs" / "decisions" / "microbatches.md").read_text()
    found = results("h200/microbatch_copies")
    cells = re.findall(
        r"^\| (\d+) x (\d+)K(, trace)? \| (side by side|one at a time)(.*?) \| ([\d.]+) ms \| ([\d,]+) \|$",
        decision,
        re.M,
    )
    assert len(cells) == 8
    contexts = {"32": 32768, "64": 65536, "66": 67832}
    for requests, context, trace, order, rest, time, speed in cells:
        blocks = int(re.search(r"(\d+) thread", rest)[1]) if "thread" in rest else 8
        wanted = {
            "requests": int(requests),
            "context": contexts[context],
            "selection": "trace" if trace else "independent",
            "order": order,
            "priority": "with priority" in rest,
            "thread_blocks": blocks,
        }
        (row,) = (row for row in found if all(row[name] == value for name, value in wanted.items()))
        assert f"{row['itl_ms_p50']:.1f}" == time and whole(row["tokens_per_s"]) == speed
    speeds = {"bulk copies (TMA)": [], "loads of warps": []}
    for row in results("h200/gather_bulk"):
        assert not row["wrong_rows"]
        if row["requests"] >= 14:
            speeds[row["copies_by"]].append(row["gb_per_s"])
    plain = speeds["loads of warps"]
    assert f"gather reads {min(plain):.0f} to {max(plain):.0f} GB/s" in " ".join(decision.split())
    assert f"at {max(speeds['bulk copies (TMA)']):.0f} GB/s at most" in " ".join(decision.split())


def test_without_locality() -> None:
    beyond = [ratio("decode_random_weights", context=12000, requests=requests) for requests in (34, 68, 136)]
    assert [f"{min(beyond):.2f}", f"{max(beyond):.2f}"] == ["0.64", "0.68"]
    assert f"{ratio('decode_random_weights', context=12000, requests=17):.2f}" == "0.56"
    assert "| of 12K tokens | 0.64 to 0.68 | 0.56 |" in PERFORMANCE
    assert "0.56 to 0.68" in " ".join(README.split())
    longer = [ratio("decode_random_weights", context=64000, requests=requests) for requests in (7, 13, 26)]
    assert [f"{min(longer):.1f}", f"{max(longer):.1f}"] == ["2.2", "2.4"]


def test_latency() -> None:
    latencies = [cell("full_depth", "itl_ms_p50", context=32768, requests=56, system=each) for each in ("ours", "full")]
    assert [f"{latency:.0f}" for latency in latencies] == ["46", "24"]
    assert "is 46 ms for 56 requests, and 24 ms for 16 requests with full KV" in PERFORMANCE
    row, full = present("56 requests of 32K", "auto", False)
    times = [f"{each['itl_ms_p50']:.0f} ms" for each in (row, full)]
    claim = f"have {times[0]} per token with the plugin's default options, and 16 have {times[1]} with full KV"
    assert claim in " ".join(README.split())
    claim = f"is {times[0]} for 56 requests of 32K with the default options, and {times[1]} for 16 with full KV"
    assert claim in section(PRESENT)


def test_drafts() -> None:
    ratios = [
        ratio("mtp", context=context, requests=requests, drafts=drafts)
        for context, requests in ((32768, 56), (65536, 28))
        for drafts in (1, 2, 3)
    ]
    present = ratio("full_depth_lrfu_drafts", context=65536)
    assert f"## With drafts: {min(ratios):.1f} to {max([*ratios, present]):.1f} times" in PERFORMANCE
    earlier = [ratio("full_depth_managed_drafts", context=context) for context in (32768, 65536)]
    assert f"get {earlier[0]:.2f} and {earlier[1]:.2f} times full KV's tokens/s" in section("## With drafts")


def test_where_the_time_of_a_step_with_a_draft_goes() -> None:
    (row,), text = rows("full_depth_lrfu_drafts", system="ours", requests=28), section("## With drafts")
    times = {kind: time for kind, time in row["kernel_ms"].items() if kind not in ("copies", "idle")}
    step_ms = row["itl_ms_p50"] * row["tokens_per_step"]
    named = [times.pop(kind) for kind in ("matrix products", "attention", "indexer", "experts", "resolve")]
    total, rest = sum(named) + sum(times.values()), sum(times.values())
    assert f"takes {step_ms:.1f} ms, its copies take {row['kernel_ms']['copies']:.1f} ms" in text
    claim = (
        "the other kernels add up to {:.1f} ms: {:.1f} in matrix products, {:.1f} in attention, {:.1f} in the indexer, "
    )
    claim += "{:.1f} in experts, {:.1f} in lookups, {:.1f} in others"
    assert claim.format(total, *named, rest) in text


def test_swap_in() -> None:
    case = {"kernels": "now", "device_buffer_size": 4096}
    ours = {row["batch"]: row["us_p50"] for row in rows("swap_in_resolve", system="ours", op="swap_in", **case)}

    def slower(system: str) -> list[float]:
        found = rows("swap_in_resolve", system=system, op="swap_in", **case)
        return [row["us_p50"] / ours[row["batch"]] for row in found]

    native, roomy = slower("vllm_native"), slower("vllm_native_roomy")
    assert f"## Swap-in: {min(native):.0f} to {max(native):.0f} times" in PERFORMANCE
    assert f"takes {min(roomy):.2f} to {max(roomy):.1f} times" in " ".join(PERFORMANCE.split())


def test_dense_model() -> None:
    times = f"{ratio('decode_llama_128k', context=128000, requests=8):.1f} times"
    assert f"## Dense models with Quest: {times} at 128K" in PERFORMANCE
    running = cell("decode_llama_128k", "running_max", system="full", context=128000, requests=8)
    run_at_once = (
        f"8 requests of 128K tokens run at once, at {times} the throughput of full KV, which runs {running} at"
    )
    assert run_at_once in section("## Dense models with Quest")


CASES = {
    "56 requests of 32K": {"context": 32768, "requests": 56},
    "28 requests of 64K": {"context": 65536, "requests": 28},
    "56 requests of 34K, recorded trace": {"context": 35064, "requests": 56},
    "28 requests of 66K, recorded trace": {"context": 67832, "requests": 28},
    "16 requests of 32K, which just fill the memory": {"context": 32768, "requests": 16},
}
RELEASES = "## vLLM 0.32 and 0.33 on one machine"
KEYS = "## Indexer keys in 4 bits"
BACKENDS = "### Back ends of dense models"


def test_the_overview_is_that_of_the_sections() -> None:
    headings = dict(re.findall(r"^(#+ (.*))$", PERFORMANCE, re.MULTILINE))
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-"): line for line, title in headings.items()}
    found = re.findall(r"^\| (.*\(#.*) \| (.*) \|$", PERFORMANCE.partition("\n## ")[0], re.MULTILINE)
    for link, ratios in found:
        (anchor,) = re.findall(r"\(#(.*)\)", link)
        text = section(anchors[anchor])
        assert all(ratio in text for ratio in re.findall(r"\d\.\d+", ratios)), link
    assert len(found) == 9


def test_both_releases() -> None:
    expected = []
    for label, case in CASES.items():
        before = [cell("full_depth_0.32.0", "tokens_per_s", system=name, **case) for name in ("full", "ours")]
        systems = "full", "vllm_native", "ours"
        now = [cell("full_depth_0.33.0", "tokens_per_s", system=name, **case) for name in systems]
        ratios = [f"{each:.2f}" for each in (before[1] / before[0], now[2] / now[0], now[2] / now[1])]
        expected.append([label, *map(whole, before), ratios[0], *map(whole, now), *ratios[1:]])
    assert table(RELEASES) == expected


def test_a_step_with_each_release() -> None:
    def longer(system: str) -> list[float]:
        """Milliseconds by which a step takes longer with 0.33, by case."""
        steps = [
            [cell(f"full_depth_{release}", "itl_ms_p50", system=system, **case) for release in ("0.33.0", "0.32.0")]
            for case in CASES.values()
        ]
        return [now - before for now, before in steps]

    assert f"{spread(longer('ours'), 1)} ms longer with 0.33" in section(RELEASES)
    full = longer("full")
    assert min(full) > -0.1 and f"takes as long, or up to {max(full):.1f} ms longer" in section(RELEASES)
    other = "full_depth_0.33.0_profile"
    measured = [ratio(other, context=32768, requests=requests) for requests in (16, 56)]
    assert "16 requests of 32K ran at {:.2f} of full KV and 56 at {:.2f}".format(*measured) in section(RELEASES)


def test_where_full_kv_fits_with_later_versions() -> None:
    case = {"context": 32768, "requests": 16}
    names = ("full_depth_0.32.0", "full_depth_0.33.0", "full_depth_0.33.0_profile", "full_depth_whole_steps")
    found = [ratio(name, **case) for name in (*names, "full_depth_fit")]
    text, local = section(FITS), {"context": 12288, "requests": 43}
    assert f"The 16 requests of 32K ran at {min(found):.2f} to {max(found):.2f} of full KV" in text
    divided = [ratio("full_depth_0.33.0_profile", **local)]
    full = cell("full_depth_admission", "tokens_per_s", system="full", context=12288, requests=100)
    divided.append(cell("full_depth_admission", "tokens_per_s", system="ours", admission="off", **local) / full)
    assert f"ran at {min(divided):.2f} and {max(divided):.2f}" in text
    kernels = [cell("full_depth_0.33.0_profile", "kernel_ms", system=name, **local) for name in ("ours", "full")]
    times = [f"{each[name]:.1f}" for name in ("matrix products", "indexer", "attention") for each in kernels]
    claimed = "{} ms instead of full KV's {}, the indexer {} instead of {}, and attention {} instead of {}."
    assert claimed.format(*times) in text


@pytest.mark.parametrize(
    ("label", "backend"),
    [
        ("FlashAttention 3", "FLASH_ATTN 3"),
        ("FlashAttention 2", "FLASH_ATTN 2"),
        ("FlashAttention 4", "FLASH_ATTN 4"),
        ("`TRITON_ATTN`", "TRITON_ATTN"),
    ],
)
def test_back_ends_of_dense_models(label: str, backend: str) -> None:
    found = {
        (system, requests): [row["tokens_per_s"] for row in rows("backends", **case)]
        for system in ("full", "ours")
        for requests in (1, 16)
        if (case := {"system": system, "requests": requests, "backend": backend})
    }
    medians = {key: statistics.median(values) for key, values in found.items()}
    cells = [label]
    for requests in (1, 16):
        full, ours = medians["full", requests], medians["ours", requests]
        cells += [whole(full), whole(ours), f"{ours / full:.2f}"]
    assert cells in table(BACKENDS)
    running = {row["system"]: row["running_max"] for row in rows("backends", requests=16, backend=backend)}
    assert running == {"full": 4, "ours": 16}


def test_spread_of_back_ends() -> None:
    differ = {}
    for row in rows("backends", system="ours", requests=1):
        differ.setdefault(row["backend"], []).append(row["tokens_per_s"])
    percent = {name: 100 * (1 - min(values) / max(values)) for name, values in differ.items()}
    triton, newest = percent.pop("TRITON_ATTN"), percent.pop("FLASH_ATTN 4")
    others = spread(list(percent.values()), 0)
    expected = f"by {triton:.0f}% with `TRITON_ATTN`, by {newest:.0f}% with FlashAttention 4, and by {others}%"
    assert expected in section(BACKENDS)
    one, many = ([float(cells[column]) for cells in table(BACKENDS)] for column in (3, 6))
    heading = f"{spread(many, 1)} times with 16 requests, {spread(one, 2)} with one"
    assert f"{BACKENDS}: {heading}\n" in PERFORMANCE
    slower = [100 * (1 - each) for each in one]
    assert f"[{spread(slower, 0)}% slower]" in section("## Where full KV fits")


def test_keys_in_4_bits() -> None:
    expected, gains = [], []
    for label, case in CASES.items():
        found = rows("full_depth_keys", **case)
        if not found:
            continue
        full = cell("full_depth_whole_steps", "tokens_per_s", system="full", **case)
        wide, narrow = rows("full_depth_whole_steps", system="ours", **case)[0], found[0]
        cells = [f"{whole(row['tokens_per_s'])}, {row['hit_rate']:.1%} hits" for row in (wide, narrow)]
        expected.append([label, *cells, whole(full), f"{narrow['tokens_per_s'] / full:.2f}"])
        gains.append(100 * (narrow["tokens_per_s"] / wide["tokens_per_s"] - 1))
    narrow, full = (rows("full_depth_keys_128k", system=name)[0] for name in ("ours", "full"))
    cells = (
        f"{whole(narrow['tokens_per_s'])}, {narrow['hit_rate']:.1%} hits",
        f"{whole(full['tokens_per_s'])}, 4 running",
    )
    times = f"{narrow['tokens_per_s'] / full['tokens_per_s']:.2f}"
    expected.append(["34 requests of 128K (130,560 tokens)", "20 fit", *cells, times])
    found = [cells for cells in table(KEYS) if len(cells) == 5]
    assert found[: len(expected)] == expected and full["running_max"] == 4
    assert f"{spread(gains, 0)}% faster with 4 bits" in section(KEYS)
    speeds = [present(case, key, True)[0]["tokens_per_s"] for case in list(CASES)[2:4] for key in ("fp4", "auto")]
    more = [f"{100 * (narrow / wide - 1):.0f}%" for narrow, wide in (speeds[:2], speeds[2:])]
    assert f"it is {more[0]} faster with the 34K trace, and {more[1]} with the 66K trace" in section(KEYS)
    sizes = ({"context": 32768, "requests": 16}, {"context": 500}, {"context": 16384})
    others = [rows("full_depth_keys_first", **each)[0]["tokens_per_s"] for each in sizes]
    same = [cell("full_depth_0.33.0", "tokens_per_s", system="full", **sizes[0])]
    assert f"{others[0] / same[0]:.2f}" == "0.95" and "at 0.95 of full KV" in section(KEYS)


PRESENT, PRESENT_RESULT = "## The present version", "full_depth_lrfu_managed"
MANAGED = "## Managed host memory"


def managed_rows(**wanted: Any) -> list[dict[str, Any]]:
    """Rows of the plugin with managed or with pinned memory, in their order."""
    return [row for row in rows("full_depth_managed", system="ours") if wanted.items() <= row.items()]


def lines_of(heading: str, columns: int) -> list[list[str]]:
    """Lines of a section's table with so many columns, without its head."""
    return [cells for cells in table(heading) if len(cells) == columns and cells[0] != "case"]


def pool_gib(name: str) -> str:
    """Size of the plugin's host pool, by the command of a result."""
    command = json.loads((ROOT / "benchmarks" / "results" / "h200" / f"{name}.json").read_text())["command"]
    (size,) = {
        re.search(r"--host-pool-gib ([\d.]+)", each)[1] for each in command.split(" && ") if "--system ours" in each
    }
    return size


def line_of(row: dict[str, Any], full: dict[str, Any]) -> list[str]:
    """Cells of a case: full KV, the plugin and the ratio."""
    cells = [f"{whole(each['tokens_per_s'])}, {each['running_max']} running" for each in (full, row)]
    return [cells[0], f"{cells[1]}, {row['hit_rate']:.1%} hits", f"{row['tokens_per_s'] / full['tokens_per_s']:.2f}"]


def present(case: str, key_dtype: str, has_list: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows of the plugin and of full KV in the present version, without drafts."""
    found = rows(PRESENT_RESULT, system="ours", indexer_key_dtype=key_dtype, drafts=0, **CASES[case])
    (row,) = [row for row in found if (row["rows_by_layer"] != "equal") == has_list]
    (full,) = rows(PRESENT_RESULT, system="full", **CASES[case])
    return row, full


def present_ratio(case: str, key_dtype: str, has_list: bool) -> float:
    row, full = present(case, key_dtype, has_list)
    return row["tokens_per_s"] / full["tokens_per_s"]


def test_the_present_version() -> None:
    labels, text = list(CASES), section(PRESENT)
    cases = [(label, "auto", False) for label in labels[:4]] + [(label, "auto", True) for label in labels[2:4]]
    cases += [(label, "fp4", True) for label in labels[:4]] + [(labels[4], key, True) for key in ("auto", "fp4")]
    expected = []
    for label, key_dtype, has_list in cases:
        row, full = present(label, key_dtype, has_list)
        keys = "4 bits" if key_dtype == "fp4" else "8 bits"
        expected.append([label, keys, row["rows_by_layer"].rpartition(":")[2], *line_of(row, full)])
        assert (row["host_pool_memory"], row["host_memory"]) == ("auto", "managed")
        fits, has_trace = row["requests"] == 16, row["selection"] == "trace"
        assert (row["settle"], full["settle"]) == (200 if has_trace else 560, 560 if fits else 200)
    assert lines_of(PRESENT, 6) == expected
    assert len(rows(PRESENT_RESULT, system="ours", drafts=0)) == len(cases)
    ratios = [float(line[-1]) for line in expected if not line[0].startswith("16")]
    assert f"\n{PRESENT}: {min(ratios):.1f} to {max(ratios):.1f} times full KV\n" in PERFORMANCE
    head = PERFORMANCE.partition("\n## ")[0]
    for first, options in ((0, ("auto", False)), (0, ("fp4", True)), (2, ("auto", False)), (2, ("fp4", True))):
        both = [f"{present_ratio(label, *options):.2f}" for label in labels[first : first + 2]]
        assert f"| {both[0]}, {both[1]} |" in head
    block = 64 * 61 * 788  # bytes; a token has 788 in a layer, indexer key included
    need = 56 * 553 * block  # requests of 35,336 tokens
    assert f"requests of 34K would have about {need / 2**30:.0f} GiB (computed)" in text
    for label, key_dtype, has_list in cases:
        row, _ = present(label, key_dtype, has_list)
        blocks = int((84.5 if key_dtype == "fp4" else 85.45) * 2**30) // block
        assert row["running_max"] == min(row["requests"], blocks // -(-row["context"] // 64))
    pinned = [
        cell("full_depth_large_pool", "tokens_per_s", system="ours", indexer_key_dtype="fp4", drafts=0, **case)
        / cell("full_depth_large_pool", "tokens_per_s", system="full", drafts=0, **case)
        for case in list(CASES.values())[:2]
    ]
    assert f"get [{pinned[0]:.2f} and {pinned[1]:.2f} times]" in text


def test_the_present_version_with_one_draft() -> None:
    name, text = "full_depth_lrfu_drafts", section(PRESENT)
    expected = []
    for label in list(CASES)[:2]:
        (row,), (full,) = (rows(name, system=system, **CASES[label]) for system in ("ours", "full"))
        expected.append([label, *line_of(row, full)])
        assert (row["settle"], full["settle"]) == (300, 300) and row["host_memory"] == "managed"
    assert lines_of(PRESENT, 4)[1:] == expected and "each was timed after 300 steps" in text
    assert "had room for 55 of the 56 requests" in text and expected[0][2].split(", ")[1] == "55 running"
    assert f"and [{expected[0][-1]} and {expected[1][-1]}]" in section("## With drafts")
    assert f"(#the-present-version-18-to-26-times-full-kv) | {expected[0][-1]}, {expected[1][-1]} |" in PERFORMANCE


def test_the_present_version_in_the_readme() -> None:
    text, labels = " ".join(README.split()), list(CASES)
    default, both = (present_ratio(labels[0], *options) for options in (("auto", False), ("fp4", True)))
    assert f"Throughput is {default:.1f} times as high with the default options." in text
    assert f"It is {both:.1f} times as high with two options for DSA models" in text
    pinned = [
        cell(
            "full_depth_large_pool", "tokens_per_s", indexer_key_dtype=key, drafts=0, system="ours", **CASES[labels[0]]
        )
        / cell("full_depth_large_pool", "tokens_per_s", system="full", drafts=0, **CASES[labels[0]])
        for key in ("auto", "fp4")
    ]
    assert f"an earlier version had [{pinned[0]:.1f} times]" in text
    assert f"full KV's throughput with the default options, and {pinned[1]:.1f} times with both" in text


def test_a_trace_in_managed_and_in_pinned_memory() -> None:
    label = "56 requests of 34K, recorded trace"
    large = {"drafts": 0, "indexer_key_dtype": "auto", **CASES[label]}
    speeds = [cell("full_depth_large_pool", "tokens_per_s", system=each, **large) for each in ("ours", "full")]
    assert cell("full_depth_large_pool", "running_max", system="ours", **large) == 56
    with_lru = [
        cell("full_depth_managed_8_bits", "tokens_per_s", system=each, **CASES[label]) for each in ("ours", "full")
    ]
    row, full = present(label, "auto", True)
    ratios = {f"{with_lru[0] / with_lru[1]:.2f}", f"{row['tokens_per_s'] / full['tokens_per_s']:.2f}"}
    assert len(ratios) == 1 and row["running_max"] == 54
    memory = " ".join((ROOT / "docs" / "decisions" / "managed-host-memory.md").read_text().split())
    assert f"a pool of 85.45 GiB, 54 requests got {ratios.pop()} times full KV's tokens/s" in memory
    assert f"56 got {speeds[0] / speeds[1]:.2f} times full KV's tokens/s with pinned" in memory


def test_microbatches_with_drafts() -> None:
    decision = " ".join((ROOT / "docs" / "decisions" / "microbatches.md").read_text().split())
    gains: list[str] = []
    for settle, running in ((100, 56), (300, 55)):
        speeds = [
            cell("microbatch_drafts", "tokens_per_s", settle=settle, microbatches=number, context=32768)
            for number in (3, 4)
        ]
        assert f"| {settle} steps, {running} running | {whole(speeds[0])} | {whole(speeds[1])} |" in decision
        gains.append(f"{100 * (speeds[1] / speeds[0] - 1):.0f}")
        assert {row["running_max"] for row in rows("microbatch_drafts", settle=settle, system="ours", requests=56)} == {
            running
        }
    claim = f"four microbatches of 56 requests of 32K were {gains[0]} and {gains[1]}% faster than three"
    assert claim in decision
    names = ("full_depth_managed_default", "full_depth_managed")
    plain = {"rows_by_layer": "code-dsa-8192:3.5", "host_pool_memory": "auto", "drafts": 0, "indexer_key_dtype": "fp4"}
    many = [f"{cell(name, 'itl_ms_p50', context=32768, selection='independent', **plain):.1f}" for name in names]
    assert f"takes {many[0]} ms in three, and took {many[1]} ms in four on another host" in decision
    memory = " ".join((ROOT / "docs" / "decisions" / "managed-host-memory.md").read_text().split())
    assert f"instead of four, a step of 56 requests of 32K takes {many[0]} ms" in memory


def test_three_microbatches_with_a_trace() -> None:
    case = {"system": "ours", "indexer_key_dtype": "auto", "rows_by_layer": "code-dsa-8192:2.3", "context": 35064}
    three, four = (rows(name, **case)[0] for name in ("full_depth_managed_8_bits", "full_depth_managed"))
    few, many = three["running_max"], four["running_max"]
    assert (few // MANAGED_LEAST_REQUESTS, many // LEAST_REQUESTS) == (3, 4)
    assert "Its steps ran in three microbatches" in note_of("h200/full_depth_managed_8_bits")
    times = [f"{row['itl_ms_p50']:.1f}" for row in (three, four)]
    decision = " ".join((ROOT / "docs" / "decisions" / "microbatches.md").read_text().split())
    assert f"a step of {few} requests takes {times[0]} ms in three" in decision
    assert f"one of {many} took {times[1]} ms in four on another host" in decision
    age = section("## Age of the results")
    trace = {present("56 requests of 34K, recorded trace", key, True)[0]["running_max"] for key in ("fp4", "auto")}
    assert few in trace
    assert f"for 56 requests with independent selections and for {min(trace)} and {max(trace)} with a trace" in age


def test_managed_memory() -> None:
    expected, gains = [], []
    for label in list(CASES)[:2]:
        found = []
        for memory, settle in (("pinned", 200), ("auto", 560)):
            shares = {"rows_by_layer": "code-dsa-8192:3.5", "indexer_key_dtype": "fp4", "settle": settle}
            (row,) = managed_rows(host_pool_memory=memory, **shares, **CASES[label])
            found.append(row)
        cells = [f"{whole(row['tokens_per_s'])} tokens/s, a step of {row['itl_ms_p50']:.1f} ms" for row in found]
        gain = found[1]["tokens_per_s"] / found[0]["tokens_per_s"]
        expected.append([label, *cells, f"{gain:.2f}"])
        gains.append(f"{100 * (gain - 1):.0f}")
    assert lines_of(MANAGED, 4) == expected
    heading = f"{MANAGED}: {gains[0]} and {gains[1]}% more throughput than pinned memory"
    assert f"\n{heading}\n" in PERFORMANCE


def test_admission_without_locality() -> None:
    case, claims = {"context": 12288, "requests": 100}, []
    for ours, full in (("full_depth_select_positions", "full_depth_equal_shares"), 2 * ("full_depth_managed",)):
        (row,) = rows(ours, system="ours", admission="auto", **case)
        assert row["running_max"] == 43
        claims.append(f"{row['tokens_per_s'] / cell(full, 'tokens_per_s', system='full', **case):.2f} (")
    decision = (ROOT / "docs" / "decisions" / "no-more-requests-than-pay.md").read_text()
    for text in (section("## Without locality"), " ".join(decision.split())):
        before, _, after = text.partition(f", at {claims[0]}")
        assert claims[1] in after and "43" in before[-60:]


def test_traces_with_managed_memory() -> None:
    """Rows of the same case, keys and shares, in managed and in pinned memory."""
    pinned = rows("full_depth_rows_by_layer", system="ours") + [
        row | {"rows_by_layer": "equal"} for row in rows("full_depth_select_positions", system="ours", drafts=0)
    ]
    ratios = []
    for row in managed_rows(host_pool_memory="auto", selection="trace"):
        same = {name: row[name] for name in ("context", "indexer_key_dtype", "rows_by_layer")}
        ratios += [row["tokens_per_s"] / each["tokens_per_s"] for each in pinned if same.items() <= each.items()]
    assert len(ratios) == 5 and all(abs(ratio - 1) < 0.02 for ratio in ratios)
    assert "In five cases" in section(MANAGED) and "were within 2% of the earlier runs" in section(MANAGED)


def test_pools_larger_than_the_gpus_free_memory() -> None:
    heading = "## Pools larger than the GPU's free memory"
    labels = {(case["context"], case["requests"]): label for label, case in CASES.items()}
    found, expected, ratios = rows("full_depth_large_pool", system="ours"), [], []
    for row in found[:-1]:
        case = {name: row[name] for name in ("context", "requests", "selection", "drafts")}
        (full,) = rows("full_depth_large_pool", system="full", **case)
        label = labels[row["context"], row["requests"]] + (", one draft" if row["drafts"] else "")
        keys = "4 bits" if row["indexer_key_dtype"] == "fp4" else "8 bits"
        cells = f"{whole(full['tokens_per_s'])}, {full['running_max']} running", whole(row["tokens_per_s"])
        ratios.append(row["tokens_per_s"] / full["tokens_per_s"])
        shares = row["rows_by_layer"].rpartition(":")[2]
        expected.append([label, keys, shares, cells[0], f"{cells[1]}, {row['hit_rate']:.1%} hits", f"{ratios[-1]:.2f}"])
        assert row["host_memory"] == "pinned" and row["host_pool_memory"] == "auto"
        assert row["running_max"] == row["requests"]
        assert row["settle"] == full["settle"] == 300 or not row["drafts"]
    assert table(heading) == expected
    many = [each for each, row in zip(ratios, found, strict=False) if row["requests"] > 16]
    assert f"{heading}: {min(many):.1f} to {max(many):.2f} times full KV\n" in PERFORMANCE
    by_layer, _ = (each for each, row in zip(ratios, found, strict=False) if row["requests"] == 16)
    assert f"ran at {by_layer:.2f} of full KV here (4 bits, by layer)" in section(heading)
    assert "96 GiB were pinned, because 85 to 87 GiB of GPU memory were free" in note_of("h200/full_depth_large_pool")
    long = found[-1]
    assert long["requests"] == long["running_max"] == 8 and long["device_buffer_size"] == 3072
    gb = long["device_kv_gib"] * 2**30 / long["requests"] / 1e9
    claim = f"at once in {long['device_kv_gib']} GiB of device memory for KV, which is {gb:.2f} GB for each"
    assert claim in section("## Indexer keys in 4 bits")


def memory_rates(**wanted: Any) -> list[dict[str, Any]]:
    found = rows("host_memory", pool_gib=44)
    return [row for row in found if wanted.items() <= row.items()]


def test_rates_of_managed_memory() -> None:
    decision = (ROOT / "docs" / "decisions" / "managed-host-memory.md").read_text()
    alone = {"thread_blocks_beside": 0, "touch_stride": 0, "thread_blocks": 16, "order": "by request"}
    beside = {"thread_blocks_beside": 116, "thread_blocks": 16}
    for requests, label, case in (
        (56, "nothing", {**alone, "device_mib_before": 0}),
        (56, "nothing, after reads of 300 MiB of device memory", {**alone, "device_mib_before": 300}),
        (56, "a kernel that reads device memory", beside),
        (28, "a kernel that reads device memory", beside),
        (14, "a kernel that reads device memory", beside),
    ):
        (pinned,), (managed,) = (memory_rates(memory=kind, requests=requests, **case) for kind in ("shared", "managed"))
        line = f"| {requests} requests | {label} | {pinned['gb_per_s']} GB/s | {managed['gb_per_s']} GB/s |"
        assert line in decision
    (pinned,), (managed,) = (memory_rates(memory=kind, touch_stride=65536) for kind in ("shared", "managed"))
    text = " ".join(decision.split())
    assert f"takes {pinned['touch_us']:.0f} us, longer than the gather. In managed memory, it takes" in text
    assert f"it takes {managed['touch_us']:.0f} us." in text and pinned["touch_us"] > pinned["us"]
    large = [
        row for row in rows("host_reads", order="by request", thread_blocks=64, touch_stride=0) if not row["chunked"]
    ]
    huge, small = (next(row for row in large if row["memory"] == kind) for kind in ("huge", "small"))
    assert f"no faster: {huge['gb_per_s']} GB/s, and {small['gb_per_s']} without" in text
    step = [
        managed_rows(host_pool_memory=kind, context=65536, indexer_key_dtype="fp4", drafts=0)
        for kind in ("auto", "pinned")
    ]
    times = [f"{each[0]['itl_ms_p50']:.1f}" for each in step]
    assert f"28 requests of 64K takes {times[0]} instead of {times[1]} ms" in text


def test_sizes_of_microbatches() -> None:
    decision = (ROOT / "docs" / "decisions" / "microbatches.md").read_text()
    plain = {"copies": "side by side", "gather_thread_blocks": 8, "selecting_kernel": "plugin's"}

    def times(context: int, run: int, number: int) -> str:
        most = 2 if run == 1 else 1  # by which sizes differ; the second run has the package's sizes, too
        found = [
            row["itl_ms_p50"]
            for row in rows("microbatch_sizes", context=context, run=run, **plain)
            if len(row["microbatches"]) == number and max(row["microbatches"]) - min(row["microbatches"]) <= most
        ]
        return ", ".join(f"{time:.2f}" for time in found) or "–"

    for label, context, run in (
        ("56 x 32K, first", 32768, 1),
        ("56 x 32K, second", 32768, 2),
        ("56 x 34K, trace, first", 35064, 1),
        ("56 x 34K, trace, second", 35064, 2),
        ("48 x 40K, second", 40000, 2),
        ("32 x 57K, second", 57344, 2),
        ("28 x 64K, first", 65536, 1),
        ("28 x 66K, trace, first", 67832, 1),
    ):
        line = " | ".join([label, *(times(context, run, number) for number in (1, 2, 3, 4))])
        assert f"| {line} |" in decision, line
    text = " ".join(decision.split())
    three, two = (
        [float(times(context, run, number)) for context in (32768, 35064) for run in (1, 2)] for number in (3, 2)
    )
    ratios = [100 * (other / own - 1) for own, other in zip(three[:2], two[:2], strict=True)]
    assert f"{min(ratios):.0f} to {max(ratios):.0f}% faster than two for 56 requests of 32K" in text
    ratios = [100 * (own / other - 1) for own, other in zip(three[2:], two[2:], strict=True)]
    assert f"but {min(ratios):.0f} to {max(ratios):.0f}% slower with a trace" in text


def test_gathers_of_microbatches() -> None:
    """Throughput of other gathers over that of the package's, in the first run and in keys of 4 bits."""
    decision = (ROOT / "docs" / "decisions" / "microbatches.md").read_text()
    cases = [(32768, 56), (35064, 56), (65536, 28), (67832, 28)]
    same = {"copies": "side by side", "indexer_key_dtype": "fp4", "run": 1}
    package = {"gather_thread_blocks": 8, "rows_of_a_warp": 1, "scoring_thread_blocks": 132}

    def ratios(context: int, requests: int, sizes: list[int], **switches: int) -> list[float]:
        wanted = same | package | {"context": context, "requests": requests}
        own = [18, 19, 19] if requests == 56 else [14, 14]
        first = rows("microbatch_gathers", **wanted, microbatches=own)[0]["tokens_per_s"]
        found = rows("microbatch_gathers", **(wanted | switches), microbatches=sizes or own)
        return [row["tokens_per_s"] / first for row in found]

    for label, switches in (
        ("4, two", {"gather_thread_blocks": 4, "rows_of_a_warp": 2}),
        ("6, two", {"gather_thread_blocks": 6, "rows_of_a_warp": 2}),
        ("4, four", {"gather_thread_blocks": 4, "rows_of_a_warp": 4}),
        ("8, one; the kernel that scores keys has 120 thread blocks", {"scoring_thread_blocks": 120}),
    ):
        cells = [f"{ratios(*case, [], **switches)[0]:.2f}" for case in cases]
        assert f"| {' | '.join([label, *cells])} |" in decision
    two = [f"{ratios(*case, [28, 28])[0]:.2f}" for case in cases[:2]]
    assert f"| 8, one; two microbatches | {two[0]} | {two[1]} |" in decision
    again = [ratio for case in cases for ratio in ratios(*case, [])[1:]]
    assert f"The same form again gave {min(again):.2f} to {max(again):.2f}" in " ".join(decision.split())
    text = " ".join(decision.split())
    for context, claim in (
        (32768, "{} faster than two and than a whole step for 56 requests of 32K"),
        (35064, "and {} for the trace of 34K"),
    ):
        times = {
            number: [
                row["tokens_per_s"]
                for row in rows("microbatch_gathers", run=2, context=context, last_products_at_once=False)
                if len(row["microbatches"]) == number
            ]
            for number in (1, 2, 3)
        }
        gains = [100 * (max(times[3]) / max(times[number]) - 1) for number in (1, 2)]
        assert claim.format(f"{min(gains):.0f} to {max(gains):.0f}%") in text
    changes = []
    for row in rows("microbatch_gathers", run=2, last_products_at_once=True):
        same_form = {name: row[name] for name in ("context", "microbatches")}
        (first, *_) = rows("microbatch_gathers", run=2, last_products_at_once=False, **same_form)
        changes.append(100 * (row["tokens_per_s"] / first["tokens_per_s"] - 1))
    assert f"changed the tokens/s by {min(changes):.0f} to {max(changes):.0f}%" in text


def test_the_long_soak() -> None:
    (soak,) = results("cpu/soak_long")
    text = section(UNDER_LOAD)
    claim = "{compared_answers:,} answers with {compared_tokens:,} tokens are full KV's up to {ties} ties"
    assert claim.format(**soak) in text and f"| {soak['minute']:.0f} minutes at saturation of a tiny model with" in text
    claim = (
        "{sessions:,} streaming sessions, {preempted:,} preemptions, {tier_loaded_blocks:,} blocks loaded from a tier"
    )
    assert claim.format(**soak) in text and f"{soak['aborted']:,} aborts" in text
    assert claim.format(**soak) in text and soak["is_flat"] and not soak["wrong_tokens"] and not soak["wrong_rows"]
    assert f"{soak['checked_rows'] / 1e6:.1f} million hot rows" in text


def test_rows_by_layer() -> None:
    text = section("### Rows by layer")
    for label in list(CASES)[2:4]:
        (listed, _), (equal, _) = (present(label, "auto", has_list) for has_list in (True, False))
        gain = 100 * (listed["tokens_per_s"] / equal["tokens_per_s"] - 1)
        hits = f"({listed['hit_rate']:.1%} instead of {equal['hit_rate']:.1%} hits)"
        length = f"{label.split(',')[0]} {gain:.0f}% more"
        assert length in text and hits in text
    row, _ = present("56 requests of 34K, recorded trace", "fp4", True)
    kernels = {kind: time for kind, time in row["kernel_ms"].items() if kind != "idle"}
    step, copies, total = (round(each) for each in (row["itl_ms_p50"], kernels["copies"], sum(kernels.values())))
    claim = f"takes {step} ms, and the times of its kernels, with {copies} ms of copies, add up to {total} ms"
    assert claim in text
    name, decision = "full_depth_rows_by_layer", (ROOT / "docs" / "decisions" / "rows-by-layer.md").read_text()
    ratios = []
    for case in list(CASES.values())[2:4]:
        full = cell(name, "tokens_per_s", system="full", **case)
        equal_full = cell("full_depth_equal_shares", "tokens_per_s", system="full", **case)
        equal = cell("full_depth_select_positions", "tokens_per_s", indexer_key_dtype="fp4", **case)
        ours = cell(name, "tokens_per_s", system="ours", indexer_key_dtype="fp4", **case)
        ratios.append((f"{ours / full:.2f}", f"{equal / equal_full:.2f}"))
    claim = f"{ratios[0][0]} times full KV's tokens/s with 56 requests of 34K and keys in 4 bits, and {ratios[1][0]}"
    decision = " ".join(decision.split())
    assert claim in decision and f"with equal rows, {ratios[0][1]} and {ratios[1][1]} times" in decision


def test_equal_rows_of_requests_that_are_hot_as_a_whole() -> None:
    text, name, case = section("### Rows by layer"), "full_depth_equal_rows", {"context": 32768, "requests": 16}
    full = cell(name, "tokens_per_s", system="full", **case)
    ratios = [
        cell(name, "tokens_per_s", system="ours", indexer_key_dtype=key_dtype, **case) / full
        for key_dtype in ("auto", "fp4")
    ]
    assert all(row["rows_by_layer"] != "equal" for row in rows(name, system="ours"))
    later = [f"{present_ratio(list(CASES)[4], key_dtype, True):.2f}" for key_dtype in ("auto", "fp4")]
    lists = ("code-dsa-8192:3.5", "equal")
    speeds = [
        whole(rows("full_depth_lrfu_fit", indexer_key_dtype="fp4", rows_by_layer=each, **case)[0]["tokens_per_s"])
        for each in lists
    ]
    claim = f"16 requests of 32K, which just fill the memory, got [{speeds[0]} tokens/s with a list"
    assert f"{claim} and {speeds[1]} without one]" in text
    (before,) = rows("full_depth_large_pool", system="ours", rows_by_layer="code-dsa-8192:3.5", **case)
    before = before["tokens_per_s"] / cell("full_depth_large_pool", "tokens_per_s", system="full", **case)
    assert f"they ran at {before:.2f}" in text
    decision = (ROOT / "docs" / "decisions" / "rows-by-layer.md").read_text().replace("\n", " ")
    assert f"16 requests of 32K ran at {before:.2f} times full KV's tokens/s with keys in 4 bits" in decision
    assert f"they ran at {ratios[1]:.2f}, and with keys in 8 bits at {ratios[0]:.2f}" in decision
    assert later[0] == later[1] and f"in a later run, both ran at {later[0]}" in decision
    whole_only, listed = (rows("full_depth_lrfu", eviction=policy, **case)[0] for policy in ("lrfu", "lru"))
    hits, speed = f"{whole_only['hit_rate']:.1%}", whole(whole_only["tokens_per_s"])
    assert f"16 requests of 32K hit {hits} and decoded {speed} tokens/s, less than with the list alone" in decision
    assert f"({listed['hit_rate']:.1%} and {whole(listed['tokens_per_s'])};" in decision


def test_lrfu_beside_lru() -> None:
    text, decision = section("### Rows by layer"), (ROOT / "docs" / "decisions" / "lru-by-steps.md").read_text()
    decision = decision.replace("\n", " ")
    name, case = "full_depth_equal_rows", {"context": 35064, "requests": 56}
    new, old = (rows(name, system="ours", eviction=policy, **case)[0] for policy in ("lrfu", "lru"))
    full = cell(name, "tokens_per_s", system="full", **case)
    times = [row["tokens_per_s"] / full for row in (new, old)]
    hits = f"it hit {new['hit_rate']:.1%} instead of {old['hit_rate']:.1%}"
    speeds = f"decoded {whole(new['tokens_per_s'])} tokens/s instead of {whole(old['tokens_per_s'])}"
    assert f"With {new['running_max']} requests of 34K, keys in 8 bits and managed memory, {hits}, and {speeds}" in text
    assert f"{times[0]:.2f} and {times[1]:.2f} times full KV of the same run" in text
    fewer = (1 - new["hit_rate"]) / (1 - old["hit_rate"])
    assert f"missed {1 - fewer:.0%} fewer rows and decoded {times[0] / times[1] - 1:.1%} more tokens/s" in decision
    new, old = (rows("full_depth_lrfu", eviction=policy, **case)[0] for policy in ("lrfu", "lru"))
    hits = f"it hit {new['hit_rate']:.1%} instead of {old['hit_rate']:.1%}"
    assert f"With {new['running_max']} requests and keys in 4 bits, {hits}" in text
    speeds = sorted(round(row["tokens_per_s"]) for row in (new, old))
    assert f"the engines decoded {speeds[1]:,} and {speeds[0]:,} tokens/s" in text
    fewer = (1 - new["hit_rate"]) / (1 - old["hit_rate"])
    assert f"it missed {1 - fewer:.0%} fewer rows, but the tokens/s were the same" in decision


def test_kernel_of_keys_in_4_bits() -> None:
    def times(queries: int, *requests: int) -> str:
        found = [row["ratio"] for row in rows("indexer_keys_kernel", queries=queries) if row["requests"] in requests]
        return spread(found, 2)

    text = section(KEYS)
    assert f"it takes {times(1, 32, 56)} times as long; with one and eight requests, {times(1, 1, 8)} times" in text
    assert f"the kernel takes {times(2, 1, 8, 32, 56)} times as long" in text


def test_accuracy_of_keys_in_4_bits() -> None:
    labels = {"full attention": "full attention", "exact": "exact", "fp8": "8 bits", "fp4": "**4 bits**"}
    measured = [row for row in results("indexer_keys") if row["key_dtype"] in labels]
    expected = [
        [
            f"{row['context'] // 1024}K",
            labels[row["key_dtype"]],
            f"{int(row['perplexity'] * 1000 + 0.5) / 1000:.3f}",
            f"{row['same_next_token']:.1%}",
            "–" if row["selection_agreement"] is None else f"{row['selection_agreement']:.1%}",
        ]
        for row in measured
    ]
    assert table(KEYS)[-len(expected) :] == expected
    by_key = {(row["context"], row["key_dtype"]): row for row in measured}
    higher = {
        n: 100 * (by_key[n, "fp4"]["perplexity"] / by_key[n, "exact"]["perplexity"] - 1) for n in (2048, 6144, 16384)
    }
    text = section(KEYS)
    assert max(abs(higher[2048]), abs(higher[6144])) < 0.1 and "change perplexity by less than 0.1%" in text
    differ = [f"{1 - by_key[16384, key]['same_next_token']:.1%}" for key in ("fp4", "fp8")]
    assert f"At 16K they raise it by {higher[16384]:.1f}%, and {differ[0]} of the tokens differ" in text
    assert f"with keys in 8 bits, {differ[1]} do" in text


# By line of the table under "Same tokens": parts of `benchmarks.release`
PARTS = {
    "kernels of hot buffers": "kernels",
    "managed memory: reads and writes of CPU and GPU, CUDA graphs": "managed_memory",
    "kernels of indexer keys in 4 bits": "narrow_keys_kernels",
    "kernel that selects positions": "select_positions",
    "XQA (FlashInfer) over hot units": "flashinfer_units",
    "DSA, fp8 KV, `FLASHMLA_SPARSE`": "parity_fp8",
    "DSA, bf16 KV, `FLASHMLA_SPARSE`": "parity_bf16_flashmla",
    "DSA, bf16 KV, `FLASH_ATTN_MLA_SPARSE`": "parity_bf16_flash_attn",
    "DSA, fp8 and bf16 KV, `FLASHINFER_MLA_SPARSE_SM90`": "parity_flashinfer",
    "vLLM's generic DeepSeek class, fp8 KV": "generic",
    "steps as a whole and in microbatches, each forced, fp8 and bf16 KV": "forms",
    "layers with different numbers of hot rows, each form of a step, fp8 and bf16 KV": "rows_by_layer",
    "preemption and prefix reuse, without and with drafts": "preemption",
    "a draft layer (MTP), two drafts": "mtp",
    "n-gram drafts": "ngram",
    "GLM-5.2, whose layers share indexers": "shared",
    "GLM-5 and GLM-5.3": "glm",
    "HY-V4: graphs, preemption, prefix reuse, full layers, drafts": "hyv4",
    "MiniMax-M3: graphs, eager, preemption, prefix reuse, drafts": "minimax_m3",
    "indexer keys in 4 bits; the reference is full KV that rounds its keys to 4 bits": "narrow_keys",
    "Llama with Quest and PQCache, and Qwen3 with Quest, whose evicted pages are copied again": "dense",
    "Quest over `TRITON_ATTN` and FlashAttention 2 and 4": "backends",
    "Quest over `FLASHINFER`": "flashinfer",
    "dense models with KV in fp8, over FlashAttention 3 and `TRITON_ATTN`": "dense_fp8",
    "Qwen3, Qwen3-MoE, Qwen2-MoE, Mixtral, GLM-4-MoE and ERNIE-4.5-MoE with Quest": "moe",
    "images in prompts of Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE and GLM-4.1V with Quest": "images",
    "prefill/decode pair over NIXL, DSA in fp8 and dense": "pd",
    "the same, HY-V4": "pd_hyv4",
    "the same, MiniMax-M3": "pd_minimax_m3",
    "the same, indexer keys in 4 bits": "pd_narrow_keys",
    "the same, DSA in fp8 through an import buffer, by layers and by blocks, and with keys in 4 bits": "pd_buffer",
    "pair over NIXL, DSA in fp8, host pool in managed memory, without and with import buffer": "pd_managed",
    "a KV cache of the size that vLLM measures: DSA and Llama": "memory",
    "the same with the layers of Llama-3.1-8B: Quest, PQCache": "memory_llama_8b",
    "two tensor parallel ranks, DSA and Llama": "ranks",
}
MOE_PARTS = ("qwen", "mixtral", "glm4_moe", "ernie45_moe")  # of newer result files, which were one part before


def outcome(gpu: str, release: str, part: str) -> str | None:
    """A cell of the table under "Same tokens"; None if the file has no such part."""
    wanted = MOE_PARTS if part == "moe" and release == "0.33.0" else (part,)
    found = [row for row in results(f"{gpu}/release_{release}") if row["part"] in wanted]
    if not found:
        return None
    columns = "tokens", "same_tokens", "passed", "failed"
    tokens, same, passed, failed = (sum(row[column] for row in found) for column in columns)
    failures = f"; {failed} test{'s' if failed > 1 else ''} failed" if failed else ""
    return (f"{same:,} of {tokens:,}" if tokens else f"{passed} passed") + failures


@pytest.mark.parametrize("label", PARTS)
def test_tests_on_gpus(label: str) -> None:
    """On an H200; where it has not run there, on an H100, with a star; where not there either: not run."""
    (claimed,) = [cells[1:] for cells in table("## Same tokens") if cells[0] == label]
    for cell_, release in zip(claimed, ("0.32.0", "0.33.0"), strict=True):
        on_h200, on_h100 = (outcome(gpu, release, PARTS[label]) for gpu in ("h200", "h100"))
        assert cell_.partition(", without")[0] == (on_h200 or (f"{on_h100}*" if on_h100 else "not run"))


def test_rows_were_missed_where_layers_have_different_numbers() -> None:
    found = re.search(r"rows_by_layer at \w+, (\d+) of (\d+) selected rows were missed", note_of("h200/release_0.33.0"))
    assert found is not None
    share = int(found[1]) / int(found[2])
    assert f"hot rows also ran then; {share:.0%} of the selected rows were missed" in section("## Same tokens")


def test_no_line_of_the_table_of_tests_is_left_out() -> None:
    assert [cells[0] for cells in table("## Same tokens")] == list(PARTS)


@pytest.mark.parametrize(
    ("label", "what", "case"),
    [
        ("Quest scores the pages of 64 requests of 4K tokens", "page_scores", {"num_tokens": 4096}),
        ("the same, requests of 131,056 tokens", "page_scores", {"num_tokens": 131056}),
        ("save the indexer keys of 64 full blocks", "save", {"batch": 64}),
        ("restore the indexer keys of 4 blocks", "restore", {"batch": 4}),
        ("plan one chunk of a dense model's prefill", "prefill_plan", {"batch": 1}),
        ("change 40 of 600 hot blocks of each of 56 requests", "move_tables (host)", {"batch": 56}),
        ("the same, time on the device", "move_tables (device)", {"batch": 56}),
        ("launch a swap-in, time on the host", "launch: swap_in", {"batch": 32}),
    ],
)
def test_the_workers_own_work(label: str, what: str, case: dict[str, int]) -> None:
    (claimed,) = [cells[1:] for cells in table("## The worker's own work") if cells[0].startswith(label)]
    for cell_, name in zip(claimed, ("worker_ops_before", "worker_ops"), strict=True):
        (row,) = rows(name, what=what, **case)
        number, unit = cell_.split(" ")
        digits = len(number.partition(".")[2])
        assert (number, unit) == (f"{row['p50']:,.{digits}f}", row["unit"])


def test_the_rest_of_what_is_measured_under_load() -> None:
    text = section("## Under load")
    ours = {row["what"]: row["value"] for row in results("h200/doctor")}
    assert f"{ours['pin']:.1f} and {ours['unpin']:.1f} s on an H200 host" in text
    assert f"{ours['nixl_local']:.1f}" == "0.4" and "An H200 host has the same rate" in text
    rates = {row["choice"]: row["gb_s"] for row in results("h100/imports") if row["way"] == "host"}
    assert f"On busy cores {rates['default']:.2f} GB/s, and {rates['pipeline']:.2f} with" in text
    (soak,) = results("cpu/soak")
    counts = "{sessions} streaming sessions, {preempted} preemptions, {tier_loaded_blocks:,} blocks loaded from a tier"
    assert counts.format(**soak) + f", {soak['aborted']} aborts" in text
    answers = "{compared_answers:,} answers with {compared_tokens:,} tokens are full KV's up to {ties} ties"
    assert answers.format(**soak) in text and soak["has_ended"] and not soak["wrong_tokens"]
    assert (
        f"{soak['minute']:.0f} minutes at saturation of a tiny model, on the CPU platform" in text and soak["is_flat"]
    )
    assert f"memory grew by {soak['own_mib_per_hour']:.1f} MiB per hour after the first third" in text
    assert not any(soak["left_at_end"].values())


def test_with_64k_tokens_and_without_locality() -> None:
    measured = {row["requests"] for row in rows("decode_random_weights", context=64000)}
    ratios = {each: ratio("decode_random_weights", context=64000, requests=each) for each in measured}
    longer = [value for value in ratios.values() if value > 1]
    (shorter,) = [value for value in ratios.values() if value < 1]
    assert table("## Without locality")[1] == ["of 64K tokens", spread(longer, 1), f"{shorter:.2f}"]


def test_headings_with_ranges() -> None:
    """The headings' numbers are those of the tables below them."""
    sglang, own = ([float(cells[-1]) for cells in beside(columns)] for columns in (6, 5))
    heading = f"{spread(sglang, 1)} times SGLang's HiSparse, {spread(own, 1)} times vLLM's own"
    assert f"## Beside the peers: {heading}\n" in PERFORMANCE
    more = [float(cells[-1]) for cells in table("## More requests than full KV can hold")]
    assert f"## More requests than full KV can hold: {spread(more, 1)} times" in PERFORMANCE


SYSTEMS = {"full": "full KV", "ours": "plugin", "vllm_native": "vLLM's own HiSparse"}
UNDER_LOAD = "## Under load"
NUMBERS = "no", "one", "two", "three", "four"


def seconds(milliseconds: float) -> str:
    """Two digits, as in 0.28 s or 3.8 s."""
    return f"{rounded(milliseconds / 1e3, 1 if milliseconds >= 995 else 2)} s"


def test_a_pair_under_load() -> None:
    expected = []
    for row in results("h200x2/pd_load") + results("h200x2/pd_load_32_systems"):
        preempted = f", {NUMBERS[row['preempted']]} preempted" if row["preempted"] else ""
        latencies = [f"{rounded(row[name], 1)} ms" for name in ("itl_ms_p50", "itl_ms_p99")]
        cells = str(row["concurrency"]), SYSTEMS[row["system"]], whole(row["tokens_per_s"])
        expected.append([*cells, f"{row['running_max']}{preempted}", seconds(row["ttft_ms_p50"]), *latencies])
        assert not row["failed"] and row["device_kv_gib"] == 1.25 and row["layers"] == 8
        assert not (row["system"] == "ours" and row["transfers_refused"] + row["transfers_expired"])
    found = [cells for cells in table(UNDER_LOAD) if len(cells) == 7]
    assert sorted(found) == sorted(expected)
    ours, full = (
        next(r for r in results("h200x2/pd_load") if r["system"] == name and r["concurrency"] == 16)
        for name in ("ours", "full")
    )
    first, _ = results("h200x2/pd_load_32")
    ratios = [ours["tokens_per_s"] / full["tokens_per_s"], first["tokens_per_s"] / full_with_32_clients()]
    later = {row["system"]: row["tokens_per_s"] for row in results("h200x2/pd_load_32_systems")}
    ratios.append(later["ours"] / later["full"])
    assert f"{UNDER_LOAD}: {spread(ratios, 1)} times full KV's throughput" in PERFORMANCE
    measured = results("h200x2/pd_load") + results("h200x2/pd_load_32_systems")
    own = later["ours"] / later["vllm_native"]
    notes = {8: ", which full KV can hold", 16: ", of which three wait with full KV"}
    notes[32] = f", on another host; {own:.2f} times vLLM's own HiSparse"
    for clients, note in notes.items():
        plugin, stock = (
            next(row for row in measured if row["system"] == name and row["concurrency"] == clients)
            for name in ("ours", "full")
        )
        waits = " | ".join(f"{row['ttft_ms_p50'] / 1e3:.1f} s" for row in (plugin, stock))
        ratio = plugin["tokens_per_s"] / stock["tokens_per_s"]
        assert f"| {clients}{note} | {ratio:.2f} | {waits} |" in README
    assert f"has room for about {full['running_max']} of 16 requests" in section(UNDER_LOAD)


def full_with_32_clients() -> float:
    """Full KV's tokens/s in an earlier run, which only the note of the result has."""
    return float(re.search(r"with ([\d,.]+) tokens/s", note_of("h200x2/pd_load_32"))[1].replace(",", ""))


def test_a_pair_with_32_clients() -> None:
    found = {row["system"]: row for row in results("h200x2/pd_load_32_systems")}
    assert set(found) == set(SYSTEMS) and {row["concurrency"] for row in found.values()} == {32}
    speeds = {system: row["tokens_per_s"] for system, row in found.items()}
    text = section(UNDER_LOAD)
    claim = f"the plugin gives {speeds['ours'] / speeds['full']:.2f} times full KV's tokens/s, and "
    assert f"{claim}{speeds['ours'] / speeds['vllm_native']:.2f} times those of vLLM's own HiSparse" in text
    assert f"Up to {max(row['prefill_waiting_max'] for row in found.values())} prompts wait for the prefill" in text
    waiting = {system: row["waiting_max"] for system, row in found.items()}
    assert f"at most {NUMBERS[waiting['ours']]} request waits for the decode engine" in text
    claim = f"with full KV up to {waiting['full']} wait for it, and with vLLM's own HiSparse up to "
    assert f"{claim}{waiting['vllm_native']}." in text


def test_earlier_runs_with_32_clients() -> None:
    first, second = results("h200x2/pd_load_32")
    (alone,) = results("h200x2/pd_load_32_full")
    text, full = section(UNDER_LOAD), full_with_32_clients()
    claim = f"The plugin gave {whole(first['tokens_per_s'])} and {whole(second['tokens_per_s'])} tokens/s on two hosts"
    assert claim in text
    claim = (
        f"Full KV gave {whole(full)} tokens/s on the first host, so the plugin gave {first['tokens_per_s'] / full:.2f}"
    )
    assert f"{claim} times as many" in text
    assert f"On a third host, full KV gave {whole(alone['tokens_per_s'])}" in text
    assert {row["concurrency"] for row in (first, second, alone)} == {32}
    assert not first["failed"] + second["failed"] + alone["failed"]


def test_32_conversations_with_vllms_own_hisparse() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "h200" / "turns_native.json").read_text())
    (row,), text = result["rows"], section(UNDER_LOAD)
    assert f"This line was measured on {result['date']}" in text
    assert f"with {result['hardware']['num_cores']} cores of its own" in text
    assert f"The 32 conversations with vLLM's own HiSparse took {row['seconds']:.0f} s" in text
    assert row["prefix_hit_rate"] == 0 and "No token of a later prompt was found in its prefix cache" in text
    (others,) = {each["prefix_hit_rate"] for each in results("h200/turns") + results("h200/turns_8")}
    assert f"in all other lines, {others:.1%} of these tokens were found" in text
    claim = f"At most {row['running_max']} requests ran at once, and {NUMBERS[row['preempted']]} were preempted"
    assert claim in text


def test_a_decode_engine_that_is_killed() -> None:
    (row,) = results("h200x2/pd_kill")
    words = {5: "five", 6: "six"}
    text = section(UNDER_LOAD)
    assert (
        f"{row['requests']} requests of {row['concurrency']} clients: the {row['in_flight_at_fault']} requests" in text
    )
    later = words[row["failed"] - row["in_flight_at_fault"]]
    assert f"and {later} more until the engine answers again after {row['back_after_s']:.0f} s" in text
    assert f"The other {row['completed']} are answered" in text
    assert row["left_on_prefill"] == 0 and row["answers_again"]


def test_a_decode_engine_that_is_drained() -> None:
    (row,) = results("h200x2/pd_drain")
    assert row["exit_code"] == 0 and row["left_on_prefill"] == 0 and row["answers_again"]
    text = section(UNDER_LOAD)
    assert f"all {row['in_flight_at_fault']} requests in flight are answered" in text
    assert f"before it ends, after {row['ended_after_s']} s" in text
    words = {5: "Five", 6: "Six"}
    assert f"{words[row['failed']]} requests fail at the client until the engine answers again after" in text
    assert f"after {row['back_after_s']:.0f} s" in text and f"The other {row['completed']} are answered" in text


def test_imports_on_one_host() -> None:
    heading = "### Imports on one host without RDMA"
    found = {row["import_buffer_gib"]: row for row in results("h200x2/pd_imports")}
    without, with_buffer = found[0], found[1]
    for cells, row in zip(table(heading), (without, with_buffer), strict=True):
        rate, ttft = rounded(row["transfer_gb_per_s"], 1), rounded(row["ttft_ms_p50"] / 1e3, 2)
        assert cells[1:] == [f"{row['transfer_ms_mean']:.0f} ms", f"{rate} GB/s", f"{ttft} s"]
        assert (row["layers"], row["transfers"], row["output"]) == (30, 6, "64:64")
    faster = without["transfer_ms_mean"] / with_buffer["transfer_ms_mean"]
    assert f"{faster:.0f} times as fast" in " ".join((ROOT / "docs" / "configuration.md").read_text().split())
    assert f"32K tokens of 30 layers [came in {with_buffer['transfer_ms_mean']:.0f} ms]" in " ".join(README.split())
    rates = [f"{rounded(row['transfer_gb_per_s'], 1)} GB/s" for row in (with_buffer, without)]
    assert (
        f"at {with_buffer['transfer_gb_per_s']:.0f} GB/s through a buffer"
        in (ROOT / "docs" / "deployment.md").read_text()
    )
    decision = (ROOT / "docs" / "decisions" / "imports-without-rdma.md").read_text()
    assert all(rate in decision for rate in rates)


def test_histories_that_were_staged_together() -> None:
    decision = (ROOT / "docs" / "decisions" / "staged-prefill.md").read_text()
    for name in ("turns_staging", "turns_8"):
        times = [cell(name, "ttft_ms_p50", system=each, concurrency=8) for each in ("ours", "full")]
        assert f"{times[0]:.0f}" in decision and f"{times[1]:.0f} ms" in decision
        assert f"{times[0] / times[1]:.2f}" in decision


def test_conversations() -> None:
    later = results("h200/turns_8")
    again = [(row["system"], row["concurrency"]) for row in later]
    first = {(row["system"], row["concurrency"]): row for row in results("h200/turns")}
    measured = later + [row for key, row in first.items() if key not in again] + results("h200/turns_native")
    speeds = {row["system"]: row["tokens_per_s"] for row in later}
    slower = 100 * (1 - speeds["ours"] / speeds["full"])
    before = 100 * (1 - first["ours", 8]["tokens_per_s"] / first["full", 8]["tokens_per_s"])
    assert f"the plugin is {slower:.0f}% slower" in section(UNDER_LOAD)
    assert f"was {before:.0f}% slower" in section(UNDER_LOAD)
    turns = {row["system"]: (row["ttft_ms_p50"] + (row["answer"] - 1) * row["tpot_ms_p50"]) / 1e3 for row in later}
    claim = f"{later[0]['answer'] - 1} times the median time per output token are {turns['ours']:.2f} s, with full KV "
    assert f"{claim}{turns['full']:.2f} s." in section(UNDER_LOAD)
    expected = [
        [
            str(row["concurrency"]),
            SYSTEMS[row["system"]],
            whole(row["tokens_per_s"]),
            seconds(row["ttft_ms_p50"]),
            f"{rounded(row['tpot_ms_p50'], 1)} ms",
        ]
        for row in measured
    ]
    found = [cells for cells in table(UNDER_LOAD) if len(cells) == 5 and cells[0].isdigit()]
    assert sorted(found) == sorted(expected)
    running = {row["system"]: row["running_max"] for row in measured if row["concurrency"] == 32}
    assert f"full KV runs {running['full']} at once" in section(UNDER_LOAD) and running["ours"] == 32
    (sizes,) = {
        tuple(row[name] for name in ("turns", "layers", "device_kv_gib", "question", "answer")) for row in measured
    }
    described = (
        "**Conversations of {} turns** in one instance with {} layers and {} GiB of device memory for KV: the first "
    )
    described += "prompt has 30K tokens, each turn adds {}, each answer has {}."
    assert described.format(*sizes) in section(UNDER_LOAD)


def test_prompts_that_one_instance_computes() -> None:
    speeds = {
        (row["system"], row["context"], row["decoding"]): row["prompt_tokens_per_s"]["median"]
        for row in results("h200/prefill")
    }
    expected = [
        [f"{size // 1024}K", *(f"{speeds['ours', size, n] / speeds['full', size, n]:.2f}" for n in (0, 16))]
        for size in (8192, 32768, 131072)
    ]
    assert [cells for cells in table(UNDER_LOAD) if len(cells) == 3 and cells[0] != "prompt"] == expected


def test_numbers_that_repeat_tables() -> None:
    """The text around a table, and headings, say the same as the table."""
    without_drafts = [float(cells[-1]) for cells in beside(5) if "draft" not in cells[0]]
    assert f"Without drafts, the plugin is {spread(without_drafts, 1)} times as fast" in section("## Beside the peers")
    least = round(100 * (1 - ratio("full_depth_fit", requests=43)))
    slowest = min(
        ratio("full_depth_whole_steps", context=12288), ratio("full_depth_0.33.0", context=32768, requests=16)
    )
    assert f"{FITS}: DSA models are {least} to {100 * (1 - slowest):.0f}% slower\n" in PERFORMANCE


def test_memory_of_a_long_request() -> None:
    """The planner's numbers, and the share of 4,096 hot rows of 656 bytes in 61 layers."""
    model, length, text = ModelShape.load("DeepSeek-V3.2", "fp8"), 1 << 17, section(KEYS)
    plans = [KVMemory(model, 24 << 30, 900 << 30, 1, 4096, 2048, has_narrow_keys=each) for each in (True, False)]
    sizes = [plan.request_bytes(System.plugin, length)[0] for plan in plans]
    running = [plan.seats(System.plugin, [length]).running for plan in plans]
    assert "needs {:.2f} GB of device memory instead of {:.2f} GB".format(*(size / 1e9 for size in sizes)) in text
    assert "so {} instead of {} run in 24 GiB".format(*running) in text
    assert f"{4096 * 656 * 61 / 1e9:.2f} GB are the 4,096 hot rows" in text


def test_hit_rates_without_locality() -> None:
    shares = [row["hit_rate"] for row in rows("decode_random_weights", system="ours")]
    claim = f"only {100 * min(shares):.0f} to {100 * max(shares):.0f}% of the selected rows are in the hot buffer"
    assert claim in section("## Without locality")


def test_two_gpus_with_experts_of_full_size() -> None:
    ratios = {}
    for name in ("full_size_tp", "full_size"):
        found = {(row["system"], row["requests"], row["context"]): row for row in results(f"h200x2/{name}")}
        for (system, requests, context), row in found.items():
            assert row["experts"] == 24
            if system == "ours" and context == 32768:
                ratios[name, requests] = row["tokens_per_s"] / found["full", requests, context]["tokens_per_s"]
    (row,) = [row for row in results("h200x2/full_size") if (row["system"], row["requests"]) == ("ours", 112)]
    claim = (
        f"56 requests of 32K ran at {ratios['full_size_tp', 56]:.2f} times full KV's throughput with two tensor "
        f"parallel ranks. With two data parallel ranks, {row['running_max']} of 112 requests ran at once, at "
        f"{ratios['full_size', 112]:.2f} times full KV's throughput"
    )
    assert claim in section("## More requests than full KV can hold")
    claim = (
        f"ran at {ratios['full_size_tp', 16]:.2f} with two tensor parallel ranks, and at {ratios['full_size', 32]:.2f} "
        "with two data parallel ranks"
    )
    assert claim in section("## Where full KV fits")


def test_the_example_of_the_table_of_tests() -> None:
    example = outcome("h100", "0.32.0", "parity_fp8")
    same, tokens = example.split(" of ")
    text = section("## Same tokens")
    assert f"*{example}* means: the answers have {tokens} tokens in all; {same} of them" in text


def test_eviction_policies() -> None:
    decision = (ROOT / "docs" / "decisions" / "lru-by-steps.md").read_text()
    found = {
        (row["source"], row["context"], row["requests"], row["scope"], row["policy"], row["buffer_rows"] / 256): row
        for row in results("locality")
        if "policy" in row and row["layer"] == "all"
    }
    for label, scope, policy in (
        ("LRU by steps", "buffers", "lru"),
        ("FIFO", "buffers", "fifo"),
        ("**LRFU: each use lets a row stay 8 steps longer, 48 at most**", "buffers", "lrfu"),
        ("one LRU pool for all requests and layers", "pool", "lru"),
    ):
        cells = [f"{found['text', 16384, 2, scope, policy, size]['hit_rate']:.1%}" for size in (2, 16)]
        assert f"| {label} | {' | '.join(cells)} |" in decision
    fewer = {}
    for key, row in found.items():
        if key[3:5] == ("buffers", "lrfu"):
            lru = found[(*key[:3], "buffers", "lru", key[5])]["hit_rate"]
            fewer[key] = 100 * (row["hit_rate"] - lru) / (1 - lru)
    small = [value for key, value in fewer.items() if key[5] in (2, 4)]
    assert min(fewer.values()) >= 0 and len(small) == 8
    assert f"With 2 and 4 top-k, it misses {min(small):.0f} to {max(small):.0f}% fewer" in " ".join(decision.split())


def test_how_long_imports_take_where_engines_share_a_gpu() -> None:
    seconds = {(row["pair"], row["prompt_tokens"]): row["transfer_s"] for row in results("h200/pd_shared_gpu")}
    found = []
    for tokens in (12000, 32000):
        for pairs in (("fp8", "managed"), ("buffer", "buffer_blocks", "managed_buffer")):
            times = [seconds[name, tokens] for name in pairs]
            found.append(f"{min(times):.0f} to {max(times):.0f}")
    found.insert(2, f"{seconds['buffer_narrow_keys', 12000]:.0f}")
    claim = (
        "a prompt of 12,000 tokens of DSA in fp8 took {} s without the buffer, {} s through it, and {} s through it "
        "with keys in 4 bits; 32,000 tokens took {} s without the buffer, and {} s through it"
    )
    assert claim.format(*found) in section("## Same tokens")


def test_how_long_imports_take_where_a_pair_has_a_gpu_for_itself() -> None:
    seconds = {(row["pair"], row["prompt_tokens"]): row["transfer_s"] for row in results("h200/pd_own_gpu")}
    claim = f"the same 12,000 tokens take {seconds['fp8', 12000]:.2f} s, and 32,000 take {seconds['fp8', 32000]:.2f} s"
    assert claim in section("## Same tokens")


def test_calls_of_nixl() -> None:
    found, text = results("h200/nixl_calls"), section("### Imports on one host")
    calls = [row[kind] for row in found for kind in ("longest_start_s", "longest_poll_s")]
    assert 0.08 < max(calls) < 0.09 and "No call that started or polled a read took longer than 0.09 s" in text
    assert {row["reads"] for row in found} == {1, 2, 4} and {row["piece_kib"] for row in found} == {41, 1024}
    assert {row["choice"] for row in found} == {"default", "one host", "tcp"} and {row["mib"] for row in found} == {64}
    large = [row for row in found if (row["place"], row["reads"], row["piece_kib"]) == ("device", 1, 1024)]
    one = {row["choice"]: row["seconds"] for row in large}
    assert f"took {one['tcp']:.2f} s over TCP, and {one['default']:.3f} s with the defaults" in text


def test_the_soak_of_full_kv() -> None:
    (control,), (soak,), text = results("h200/soak_full_kv"), results("h200/soak"), section(UNDER_LOAD)
    claim = "{compared_answers} answers with {compared_tokens:,} tokens had {ties:,} ties"
    assert f"of {control['minute']:.0f} minutes on another host, {claim.format(**control)}" in text
    assert control["widest_tie"] == soak["widest_tie"] == 0.75 and not control["wrong_tokens"]
    assert control["has_ended"] and not control["backlog"]
    expected = soak["wrong_tokens"] * control["compared_tokens"] / soak["compared_tokens"]
    assert round(expected) == 3 and "at the plugin's rate, three would be expected" in text
