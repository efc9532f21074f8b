"""What a put sends: bytes or a file, read part by part and stoppable between two parts."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

PART_BYTES: Final = 5 * 1024 * 1024
"""Part of an upload. Smaller files go in one request; S3 takes no smaller part."""


class UploadSource:
    """An open file, or bytes that read like one."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._stopped = threading.Event()
        self.size = size

    @classmethod
    @contextmanager
    def opened(cls, body: bytes | Path) -> Iterator[UploadSource]:
        """Open bytes, or the file at a path, and close it at the end.

        Raises:
            OSError: the file cannot be opened.
        """
        with io.BytesIO(body) if isinstance(body, bytes) else body.open("rb") as file:
            yield cls(file, len(body) if isinstance(body, bytes) else body.stat().st_size)

    def read_all(self) -> bytes:
        """Return everything; for what goes in one request."""
        return self._file.read()

    def parts(self) -> Iterator[bytes]:
        """Yield the parts; runs on a thread of obstore, which aborts the upload and cleans up on any exception.

        Raises:
            InterruptedError: `stop` was called.
            OSError: the file cannot be read.
        """
        while part := self._file.read(PART_BYTES):
            self._check()
            yield part
        self._check()

    def stop(self) -> None:
        """Let `parts` fail before its next part; from any thread."""
        self._stopped.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError("the put was cancelled")
