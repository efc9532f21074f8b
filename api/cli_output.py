"""How the commands speak: results on stdout, everything else on stderr, one set of exit codes."""

from __future__ import annotations

import os
import sys
from typing import Final, NoReturn

from rich.console import Console

EXIT_NO_CLIP: Final = 1
"""The task ended without a clip."""
EXIT_NO_DELIVERY: Final = 1
"""The receiver did not take the sample."""
EXIT_BROKEN: Final = 1
"""The deployment is not as it should be."""
EXIT_REFUSED: Final = 3
"""The gateway refused the request."""
EXIT_UNREACHABLE: Final = 4
"""The gateway is not reachable, or failed."""
EXIT_CONFIGURATION: Final = 5
"""A setting, a key or the Temporal server is wrong."""
EXIT_INTERRUPTED: Final = 130

out = Console(soft_wrap=True, highlight=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


class CommandError(Exception):
    """A command that failed: what to say, and the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def complain(text: str) -> None:
    """Say what went wrong."""
    err.print("error:", style="bold red", end=" ")
    err.print(text, markup=False)


def leave(code: int) -> NoReturn:
    """End the process here.

    The SDK's runtime can abort while the interpreter winds up, and then -6 is the exit code instead of this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
