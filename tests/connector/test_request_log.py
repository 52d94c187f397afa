import logging

import pytest

from vllm_hisparse.connector import request_log
from vllm_hisparse.connector.request_log import RequestLog


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(request_log.logger, "info", lambda message, *args: logged.append(message % args))
    return logged


def line(request_id: str, prompt: int, hits: int = 0, misses: int = 0, to_host: int = 0, to_device: int = 0) -> str:
    return (
        f"HiSparse request {request_id}: prompt_tokens={prompt}, hits={hits}, misses={misses}, "
        f"transfer_bytes_to_host={to_host}, transfer_bytes_to_device={to_device}"
    )


def test_logger_is_one_that_vllm_shows() -> None:
    assert isinstance(request_log.logger, logging.Logger)
    assert request_log.logger.name.startswith("vllm.")


def test_logs_when_the_worker_has_reported(lines: list[str]) -> None:
    log = RequestLog()
    log.started(7, "a")
    log.received("a", 100, 20)
    log.ended("a", 12)
    assert lines == []
    log.released(7, 30, 4)
    assert lines == [line("a", 12, 30, 4, 100, 20)]
    assert not log.leftovers()


def test_the_worker_may_report_first(lines: list[str]) -> None:
    log = RequestLog()
    log.started(7, "a")
    log.released(7, 30, 4)
    assert lines == []
    log.ended("a", 12)
    assert lines == [line("a", 12, 30, 4)]


def test_runs_of_a_preempted_request_add_up(lines: list[str]) -> None:
    log = RequestLog()
    log.started(7, "a")
    log.started(9, "a")
    log.ended("a", 12)
    log.released(7, 1, 2)
    assert lines == []
    log.released(9, 10, 20)
    assert lines == [line("a", 12, 11, 22)]


def test_a_reused_block_reports_its_runs_in_order(lines: list[str]) -> None:
    log = RequestLog()
    log.started(7, "a")
    log.ended("a", 1)
    log.started(7, "b")
    log.ended("b", 2)
    log.started(7, "a2")
    log.released(7, 10, 1)
    log.released(7, 20, 2)
    log.released(7, 30, 3)
    assert lines == [line("a", 1, 10, 1), line("b", 2, 20, 2)]
    log.ended("a2", 3)
    assert lines[2:] == [line("a2", 3, 30, 3)]
    assert not log.leftovers()


def test_a_preempted_request_may_get_its_own_blocks_again(lines: list[str]) -> None:
    log = RequestLog()
    log.started(7, "a")
    log.started(7, "a")
    log.released(7, 1, 1)
    log.released(7, 2, 2)
    log.ended("a", 5)
    assert lines == [line("a", 5, 3, 3)]


def test_a_request_that_never_ran_is_logged(lines: list[str]) -> None:
    log = RequestLog()
    log.ended("a", 12)
    assert lines == [line("a", 12)]
    assert not log.leftovers()


def test_received_bytes_add_up(lines: list[str]) -> None:
    log = RequestLog()
    log.received("a", 100, 20)
    log.received("a", 1, 2)
    log.ended("a", 12)
    assert lines == [line("a", 12, to_host=101, to_device=22)]
