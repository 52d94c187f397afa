import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from tools.demo.prompts import Question
from tools.demo.report import TIE_MARGIN, Report, RequestResult, find_stats, kv_layout, make_result
from tools.demo.table import REQUEST_COLUMNS, answer_table, cells, request_table, totals, verdict
from tools.harness.openai_client import Completion
from vllm_hisparse.connector.request_line import RequestLine

CONFIG = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
ROUTED_ID = "cmpl-___prefill_addr_127.0.0.1:1___decode_addr_127.0.0.1:2_{}"
LOG = """\
(EngineCore pid=7) INFO 01-31 12:00:00 [request_log.py:60] HiSparse request cmpl-a-0-1f: prompt_tokens=2000, hits=30, \
misses=10, transfer_bytes_to_host=100, transfer_bytes_to_device=20
INFO: something else
(EngineCore pid=7) INFO 01-31 12:00:01 [request_log.py:60] HiSparse request cmpl-b-0-2e: prompt_tokens=2001, hits=0, \
misses=0, transfer_bytes_to_host=0, transfer_bytes_to_device=0
"""
STATS = RequestLine("cmpl-a-0-1f", 2000, 30, 10, 100, 20)
METRICS = {"vllm:hisparse_cache_hits_total": 30.0, "vllm:hisparse_cache_misses_total": 10.0}
QUESTION = Question("matches", "starlette/routing.py", 700, [5, 6], [1, 2, 9], "return", " in the\n    [file]")
RECEIVED = {**METRICS, "vllm:hisparse_transfer_bytes_to_host_total": 100.0}


def completion(tokens: Sequence[int], logprobs: Sequence[float], margin: float = 2.0) -> Completion:
    made = Completion(response_id="cmpl-a", token_ids=list(tokens), logprobs=list(logprobs), total_s=1.0)
    made.text, made.margins = " [answered]", [2.0, 2.0, margin]
    return made


def result(tokens: Sequence[int] = (1, 2, 3), margin: float = 2.0) -> RequestResult:
    """The last token is another one than in the file, and full KV's margin there is given."""
    reference = completion([1, 2, 3], [-1.0, -1.0, -1.0], margin)
    layout = kv_layout(CONFIG, 4)
    return make_result(0, QUESTION, completion(tokens, [-1.0, -1.5, -9.0]), reference, STATS, layout, 512)


def shown(table, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_parses_the_lines_of_finished_requests() -> None:
    assert RequestLine.find_all(LOG) == [STATS, RequestLine("cmpl-b-0-2e", 2001, 0, 0, 0, 0)]


def test_finds_stats_by_id_then_by_unique_length() -> None:
    routed = [replace(STATS, request_id=ROUTED_ID.format(name) + "-0-1f") for name in ("aa", "ab")]
    assert find_stats(routed, ROUTED_ID.format("ab"), 1) is routed[1]
    assert find_stats(routed, "cmpl-unknown", 2000) is None
    assert find_stats([routed[0], replace(STATS, prompt_tokens=7)], "cmpl-unknown", 7) is not None
    assert find_stats([], "cmpl-a", 2000) is None


def test_row_of_the_same_tokens() -> None:
    same = result()
    assert same.identical and same.first_difference is None
    assert same.max_logprob_difference == 8.0
    assert (same.num_right, same.margin, same.is_tie) == (2, None, False)
    assert same.hit_rate == 0.75
    layout = kv_layout(CONFIG, 4)
    assert (layout.row_bytes, layout.resident_row_bytes) == (2304, 132)
    assert same.device_bytes == layout.hot_request_bytes(2003, 512)
    assert same.full_bytes == layout.full_request_bytes(2003)


def test_row_of_other_tokens_compares_logprobs_before_the_difference() -> None:
    other = result([1, 2, 4])
    assert not other.identical
    assert other.first_difference == 2
    assert other.max_logprob_difference == 0.5
    assert (other.margin, other.is_tie) == (2.0, False)


def test_a_tie_is_no_problem_and_is_named() -> None:
    tie = result([1, 2, 4], margin=TIE_MARGIN)
    assert tie.is_tie and not result([1, 2, 4], margin=TIE_MARGIN + 1e-6).is_tie
    report = Report([result(), tie], RECEIVED, {})
    assert report.problems() == [] and not report.identical
    assert "the same tokens as with full KV up to a tie in 1 of them" in verdict(report)
    assert "up to" not in verdict(Report([result()], RECEIVED, {}))


def test_tables_show_answers_and_what_the_file_says() -> None:
    right = result([1, 2, 9])
    report = Report([result(), right], RECEIVED, {})
    assert report.share_right == (2 + 3) / 6
    lines = shown(request_table(report)).splitlines()
    assert [line.split()[:4] for line in lines if "/3" in line] == [
        ["0", "2000", "3/3", "75.0%"],
        ["0", "2000", "2/3", "75.0%"],
    ]
    answers = shown(answer_table(report))
    assert [line.split() for line in answers.splitlines() if "matches" in line] == [
        ["0", "2/3", "matches", "starlette/routing.py"],
        ["0", "3/3", "matches", "starlette/routing.py"],
    ]
    assert answers.count("… return [answered]") == 2
    assert answers.count("in the file: … return in the ⏎ [file]") == 1
    assert "in the file:" not in shown(answer_table(Report([right], RECEIVED, {})))


def test_a_request_has_a_cell_per_column_and_no_column_is_cut_on_80_characters() -> None:
    large = replace(result(), request=255, prompt_tokens=8000, output_tokens=512, first_token_s=999.9, total_s=1999.9)
    assert len(cells(large)) == len(REQUEST_COLUMNS)
    table = shown(request_table(Report([large], RECEIVED, {})), width=80)
    words = {word for column in REQUEST_COLUMNS for word in column.split()}
    assert words <= set(table.split()) and "…" not in table
    (row,) = [line for line in table.splitlines() if "/512" in line]
    assert row.split() == ["255", "8000", "512/512", "75.0%", "6.7", "19.0", "999.9", "1999.9"]


def test_the_result_is_one_sentence() -> None:
    report = Report([result()], RECEIVED, {})
    assert "1 of 1 requests got the same tokens as with full KV[/], with 35% of the KV on the device" in verdict(report)
    assert verdict(report).endswith("(6.7 instead of 19.0 MiB per request).")
    lines = totals(Report([result()], {**RECEIVED, "vllm:hisparse_transfer_bytes_to_host_total": 5.0 * 2**20}, {}))
    assert [line.split()[0] for line in lines.splitlines()] == ["75.0%", "5", "67%", "Times"]


@pytest.mark.parametrize(
    ("results", "metrics", "problem"),
    [
        ([result(), result([1, 2, 4])], RECEIVED, "other tokens than with full KV in requests 0"),
        ([result()], METRICS, "no KV was received in host memory"),
        ([result()], {**RECEIVED, "vllm:hisparse_transfer_failures_total": 2.0}, "2 KV transfers failed"),
    ],
)
def test_problems(results: list[RequestResult], metrics: dict[str, float], problem: str) -> None:
    assert Report(results, metrics, {}).problems() == [problem]


def test_report_without_problems() -> None:
    report = Report([result(), result()], RECEIVED, {})
    assert report.problems() == []
    assert report.hit_rate == 0.75
    assert report.device_bytes_per_request == result().device_bytes
    assert report.to_json()["nixl_bytes_to_host"] == 100
