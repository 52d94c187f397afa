import subprocess
import sys

from vllm_hisparse.connector.request_line import RequestLine

LINE = RequestLine("cmpl-a", 2000, 30, 4, 100, 20)


def test_the_line_as_people_read_it() -> None:
    assert str(LINE) == (
        "HiSparse request cmpl-a: prompt_tokens=2000, hits=30, misses=4, transfer_bytes_to_host=100, "
        "transfer_bytes_to_device=20"
    )


def test_lines_are_found_among_others() -> None:
    other = RequestLine("cmpl-b:1", 1, 0, 0, 0, 0)
    log = f"(EngineCore pid=7) INFO [request_log.py:60] {LINE}\nHiSparse: a summary\n{other}\n"
    assert RequestLine.find_all(log) == [LINE, other]


def test_the_cli_reads_it_without_vllm() -> None:
    code = "import sys, vllm_hisparse.connector.request_line; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
