import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(("error", "is_deleted"), [(errno.EIO, True), (errno.EMFILE, False), (None, False)])
def test_a_file_that_cannot_be_read_is_deleted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None, is_deleted: bool
) -> None:
    """Unless it can be read now, or no file can be opened."""
    quota = DirectoryQuota(tmp_path, 10 * SIZE)
    paths = [write(tmp_path / f"{index}.bin") for index in range(2)]
    quota.added(paths).result(30)
    if error is not None:
        monkeypatch.setattr(directory_quota, "open", failing_open(error), raising=False)
    quota.unreadable(paths[0]).result(30)
    assert names(tmp_path) == ["0.bin", "1.bin"][is_deleted:] and quota.num_bytes == (2 - is_deleted) * SIZE
    assert quota.take_deleted() == paths[: int(is_deleted)]


def failing_open(error: int) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


@pytest.mark.parametrize("place", [".", "aa"])
def test_files_in_a_folder_that_cannot_be_read_still_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    quota = DirectoryQuota(tmp_path, 3 * SIZE)
    paths = [write(tmp_path / "aa" / f"{index}.bin", 10 - index) for index in range(3)]
    quota.added(paths).result(30)
    scan = os.scandir

    def fail(path: str) -> object:
        if Path(path) == tmp_path / place:
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return scan(path)

    monkeypatch.setattr(directory_quota, "RESCAN_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        quota.added([]).result(30)
    assert quota.num_bytes == 3 * SIZE and not quota.take_deleted()
    os.remove(paths[0])  # by another engine
    quota.added([]).result(30)
    assert not quota.take_deleted(), "the next scan is not due yet"
    monkeypatch.setattr(directory_quota, "RETRY_S", 0.0)
    quota.added([]).result(30)
    assert quota.take_deleted() == paths[:1] and quota.num_bytes == 2 * SIZE


def test_files_that_cannot_be_read_still_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = DirectoryQuota(tmp_path, 3 * SIZE)
    paths = [write(tmp_path / f"{index}.bin", 10 - index) for index in range(2)]
    quota.added(paths).result(30)
    status = os.stat

    def fail(path: str, **options: object) -> os.stat_result:
        if path == paths[1]:
            raise OSError(errno.EIO, "Input/output error", path)
        return status(path, **options)

    monkeypatch.setattr(directory_quota, "RESCAN_S", 0.0)
    monkeypatch.setattr(os, "stat", fail)
    quota.added([]).result(30)
    assert quota.num_bytes == 2 * SIZE and not quota.take_deleted()


def test_files_of_a_disk_that_is_gone_still_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_quota, "RESCAN_S", 0.0)
    root = tmp_path / "blocks"
    quota = DirectoryQuota(root, 3 * SIZE)
    quota.added([]).result(30)
    quota.added([write(root / "aa" / "0.bin")]).result(30)
    assert quota.num_bytes == SIZE, "it is no error that the directory was missing until then"
    root.rename(tmp_path / "elsewhere")
    quota.added([]).result(30)
    assert quota.num_bytes == SIZE and not quota.take_deleted()


def test_a_folder_that_another_engine_deletes_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_quota, "RESCAN_S", 0.0)
    quota = DirectoryQuota(tmp_path, 3 * SIZE)
    path = write(tmp_path / "aa" / "0.bin")
    quota.added([path]).result(30)
    scan = os.scandir

    def lose(folder: str) -> object:
        if Path(folder) == tmp_path / "aa":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", lose)
    quota.added([]).result(30)
    assert quota.num_bytes == 0 and quota.take_deleted() == [path]
