"""How many repetitions a test runs: a tenth by default, all of them with `make soak`."""

import os


def scaled(full: int) -> int:
    """`full` under `REELGATE_SOAK=1`, else a tenth of it."""
    return full if os.environ.get("REELGATE_SOAK") == "1" else max(1, full // 10)
