"""A folder for the files of running attempts, one per worker process, gone with it.

A killed process leaves its folder behind; the next worker on the machine finds it unlocked and removes it. A lock and
not a process id decides, since ids repeat, and containers that share a folder do not share ids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A fresh, empty folder under `parent`; removes the ones whose process has ended."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.iterdir():
        _remove_if_unlocked(left)
    own, descriptor = _locked_folder(parent)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(descriptor)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        own = Path(tempfile.mkdtemp(dir=parent))
        descriptor = os.open(own, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if own.exists():
            return own, descriptor
        # A worker that started in the same moment took it for one that was left.
        os.close(descriptor)


def _remove_if_unlocked(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
