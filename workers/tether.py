"""`python -m workers.tether <parent pid> <command> ...`: run a command that dies when its parent does.

A killed supervisor cannot stop its children. On Linux the kernel does it: the request survives `exec`, so the
command itself, e.g. the Temporal server, need not know.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Tie this process to its parent and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit("the supervisor ended before this process began")
    os.execv(command[0], command)  # noqa: S606 - the command is the supervisor's own


if __name__ == "__main__":
    main()
