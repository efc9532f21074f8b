"""How many repetitions a test runs: a tenth by default, all of them with `make soak`."""

import os
from typing import Final

import pytest

SOAKING: Final = os.environ.get("REELGATE_SOAK") == "1"

soak_only = pytest.mark.skipif(not SOAKING, reason="takes long on two cores; `make soak` runs it")
"""For the second of two tests that start the same processes over and over."""


def scaled(full: int) -> int:
    """`full` under `REELGATE_SOAK=1`, else a tenth of it."""
    return full if SOAKING else max(1, full // 10)
