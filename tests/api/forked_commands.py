"""`reelgate` in processes of its own that share one import: they fork from a server that has done it.

Most of what a command costs is imports. What ends the process itself, as `reelgate deploy` does, cannot run in ours.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from api import cli

_FORKS: Final = multiprocessing.get_context("forkserver")
# The server starts with the first command. Without a runtime of the SDK, which would not survive the fork.
_FORKS.set_forkserver_preload([__name__, "api.cli_temporal", "api.deployments", "api.rollouts"])
_END_SECONDS: Final = 240


def forked_reelgate(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = ["reelgate", *arguments]
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _FORKS.Process(target=_run, args=(command, dict(environment), out, err))
        process.start()
        process.join(_END_SECONDS)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{command} has not ended")
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _run(command: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    for file, stream in ((out, sys.stdout), (err, sys.stderr)):
        with file.open("wb") as opened:
            os.dup2(opened.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    cli.main()
