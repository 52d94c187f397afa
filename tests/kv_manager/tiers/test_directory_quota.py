import errno
import os
import time
from pathlib import Path

import pytest

from vllm_hisparse.kv_manager.tiers import directory_quota
from vllm_hisparse.kv_manager.tiers.directory_quota import ABANDONED_S, DirectoryQuota

SIZE = 100


def write(path: Path, age_s: float = 0.0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * SIZE)
    os.utime(path, (time.time() - age_s,) * 2)
    return str(path)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def wait(quota: DirectoryQuota) -> None:
    quota.used([]).result(30)


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    quota = DirectoryQuota(tmp_path, 3 * SIZE)
    wait(quota)
    paths = [write(tmp_path / "aa" / f"{index}.bin") for index in range(3)]
    quota.added(paths)
    quota.used(paths[:1]).result(30)
    quota.added([write(tmp_path / f"{index}.bin") for index in (3, 4)]).result(30)
    assert names(tmp_path) == ["0.bin", "3.bin", "4.bin"]
    assert quota.num_bytes == 3 * SIZE


def test_order_survives_a_restart(tmp_path: Path) -> None:
    for index, age_s in enumerate((10, 30, 20)):
        write(tmp_path / f"{index}.bin", age_s)
    quota = DirectoryQuota(tmp_path, 2 * SIZE)
    wait(quota)
    assert names(tmp_path) == ["0.bin", "2.bin"]
    quota.added([write(tmp_path / "3.bin")]).result(30)
    assert names(tmp_path) == ["0.bin", "3.bin"]


def test_what_was_read_last_is_kept_by_the_next_engine(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{index}.bin", 100 - index) for index in range(3)]
    first = DirectoryQuota(tmp_path, 3 * SIZE)
    first.used(paths[:1]).result(30)
    wait(DirectoryQuota(tmp_path, SIZE))
    assert names(tmp_path) == ["0.bin"]


def test_half_written_files_of_killed_engines_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "0.bin.tmp_1_2", ABANDONED_S + 10)
    write(tmp_path / "1.bin.tmp_1_2")
    write(tmp_path / "hisparse.json", ABANDONED_S + 10)
    wait(DirectoryQuota(tmp_path, SIZE))
    assert names(tmp_path) == ["1.bin.tmp_1_2", "hisparse.json"]


def test_files_of_other_engines_count_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = DirectoryQuota(tmp_path, 2 * SIZE)
    wait(quota)
    for index in range(4):
        write(tmp_path / f"{index}.bin", 10 - index)
    quota.added([]).result(30)
    assert len(names(tmp_path)) == 4
    monkeypatch.setattr(directory_quota, "RESCAN_S", 0.0)
    quota.added([]).result(30)
    assert names(tmp_path) == ["2.bin", "3.bin"]


def test_deleted_files_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = DirectoryQuota(tmp_path, 2 * SIZE)
    wait(quota)
    paths = [write(tmp_path / f"{index}.bin", 10 - index) for index in range(4)]
    quota.added(paths).result(30)
    assert quota.take_deleted() == paths[:2] and not quota.take_deleted()
    os.remove(paths[2])  # by another engine
    monkeypatch.setattr(directory_quota, "RESCAN_S", 0.0)
    quota.added([]).result(30)
    assert quota.take_deleted() == [paths[2]]


def test_missing_files_do_not_matter(tmp_path: Path) -> None:
    quota = DirectoryQuota(tmp_path, 10 * SIZE)
    path = write(tmp_path / "0.bin")
    quota.added([path, str(tmp_path / "never.bin")])
    quota.used([str(tmp_path / "never.bin")])
    os.remove(path)
    quota.deleted(path)
    quota.deleted(path).result(30)
    assert quota.num_bytes == 0


def test_a_file_that_cannot_be_read_is_deleted_and_named(tmp_path: Path) -> None:
    quota = DirectoryQuota(tmp_path, 10 * SIZE)
    paths = [write(tmp_path / f"{index}.bin") for index in range(2)]
    quota.added(paths)
    quota.unreadable(paths[0]).result(30)
    assert names(tmp_path) == ["1.bin"] and quota.num_bytes == SIZE
    assert quota.take_deleted() == paths[:1]


def test_files_stay_while_the_engine_can_open_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    quota = DirectoryQuota(tmp_path, 10 * SIZE)
    path = write(tmp_path / "0.bin")
    quota.added([path]).result(30)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        quota.unreadable(path).result(30)
    assert names(tmp_path) == ["0.bin"] and not quota.take_deleted()
