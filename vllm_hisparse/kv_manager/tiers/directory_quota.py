"""Keeps the block files of a directory within a quota."""

from __future__ import annotations

import errno
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from vllm.logger import init_logger

BLOCK_SUFFIX = ".bin"
TEMPORARY = ".tmp"  # part of the names of files that are being written
ABANDONED_S = 600.0  # seconds after which such a file counts as left by a killed engine
RESCAN_S = 600.0  # seconds between scans, because other engines may write to the directory, too
RETRY_S = 30.0  # seconds from a scan that could not read everything to the next
READ_BYTES = 1 << 20  # bytes that are read at a time
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # errors of opening a file that say nothing about the file

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


class DirectoryQuota:
    """Deletes the least recently used block files, in a thread of its own. The thread first lists the existing files.

    A file's modification time says when it was last used, so that the order survives restarts.

    Args:
        directory: directory of the block files; subdirectories are included.
        max_bytes: upper bound of the bytes of all block files.
    """

    def __init__(self, directory: Path, max_bytes: int):
        self.directory, self.max_bytes = directory, max_bytes
        self.num_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()  # path -> bytes, least recently used first
        self._deleted: deque[str] = deque()
        self._scanned_at, self._is_incomplete = 0.0, False  # of the last scan
        self._thread = ThreadPoolExecutor(1, "hisparse_tier_quota")
        self._thread.submit(self._scan)

    def added(self, paths: Iterable[str]) -> Future:
        """Count files that were written."""
        return self._thread.submit(self._add, list(paths))

    def used(self, paths: Iterable[str]) -> Future:
        """Make files that were read the most recently used ones."""
        return self._thread.submit(self._touch, list(paths))

    def deleted(self, path: str) -> Future:
        """Stop counting a file that was deleted."""
        return self._thread.submit(self._forget, path)

    def unreadable(self, path: str) -> Future:
        """Delete a file that could not be read, and cannot be read now, so that its block is stored again."""
        return self._thread.submit(self._discard, path)

    def take_deleted(self) -> list[str]:
        """Paths of the files that this engine has deleted since the last call, because of the quota or because they
        could not be read, and of files that were gone when they were counted anew.
        """
        return [self._deleted.popleft() for _ in range(len(self._deleted))]

    def shutdown(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _scan(self) -> None:
        """Count the files anew. Files that cannot be read stay counted, because they take room nevertheless."""
        errors: list[OSError] = []
        found = sorted((status.st_mtime, path, status.st_size) for path, status in self._block_files(errors))
        sizes = OrderedDict((path, size) for _, path, size in found)
        self._scanned_at, self._is_incomplete = time.monotonic(), bool(errors)
        if errors:
            message = "Cannot read all of %s; files that were counted before still count: %s"
            logger.warning(message, self.directory, errors[0])
            self._sizes |= sizes
        else:
            self._deleted.extend(self._sizes.keys() - sizes.keys())
            self._sizes = sizes
        self.num_bytes = sum(self._sizes.values())
        self._evict()

    def _block_files(self, errors: list[OSError]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield block files with their status, and delete half-written files that a killed engine has left.

        Args:
            errors: errors of reading files and folders that may still be there; new ones are added.
        """
        now = time.time()

        def note(error: OSError) -> None:
            # NOTE: another engine may have deleted a file or a folder, but the root is missing if the disk is gone.
            is_root = error.filename == os.fspath(self.directory)
            if not isinstance(error, FileNotFoundError) or (is_root and self._sizes):
                errors.append(error)

        for folder, _, names in os.walk(self.directory, onerror=note):
            for path in (os.path.join(folder, name) for name in names):
                try:
                    status = os.stat(path)
                except OSError as error:
                    note(error)
                    continue
                if path.endswith(BLOCK_SUFFIX):
                    yield path, status
                elif TEMPORARY in os.path.basename(path) and now - status.st_mtime > ABANDONED_S:
                    with suppress(OSError):
                        os.remove(path)

    def _add(self, paths: list[str]) -> None:
        if time.monotonic() - self._scanned_at > (RETRY_S if self._is_incomplete else RESCAN_S):
            self._scan()
        for path in paths:
            with suppress(OSError):
                self._forget(path)
                self._sizes[path] = os.path.getsize(path)
                self.num_bytes += self._sizes[path]
        self._evict()

    def _touch(self, paths: list[str]) -> None:
        for path in paths:
            with suppress(OSError):
                os.utime(path)
                if path in self._sizes:
                    self._sizes.move_to_end(path)

    def _discard(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                while file.read(READ_BYTES):
                    pass
            return  # the file can be read: the error was the reader's, or has passed
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                return
        try:
            self._delete(path)
            self._deleted.append(path)
        except OSError as error:
            logger.warning("Cannot delete %s, which cannot be read: %s", path, error)

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.remove(path)
        self._forget(path)

    def _forget(self, path: str) -> None:
        self.num_bytes -= self._sizes.pop(path, 0)

    def _evict(self) -> None:
        while self.num_bytes > self.max_bytes and self._sizes:
            path = next(iter(self._sizes))
            try:
                self._delete(path)
                self._deleted.append(path)
            except OSError as error:
                logger.warning("Cannot delete %s: %s", path, error)
                self._forget(path)
