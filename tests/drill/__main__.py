"""`make drill`: causes every symptom of the runbook on processes of its own and prints what revealed and mended it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from api.cli_output import out
from tests.drill.incidents import Incident, drill
from tests.drill.stack import Stack
from tests.receiver import Receiver

_ROW = "{:<31} {:<66} {:<51} {:>7}"


def _report(incident: Incident, seconds: float, wrong: str) -> None:
    out.print(_ROW.format(incident.symptom, incident.revealed_by, incident.mended_by, f"{seconds:.1f}"), markup=False)
    if wrong:
        out.print(f"    NOT AS WRITTEN: {wrong}", markup=False)


async def main(*, quick: bool) -> int:
    """Run the drill; the exit code."""
    out.print(_ROW.format("symptom", "revealed by", "mended by", "seconds"), markup=False)
    with TemporaryDirectory(prefix="reelgate-drill-") as folder:
        async with Receiver() as receiver:
            stack = await Stack.open(Path(folder), receiver)
            try:
                return min(1, await drill(stack, quick=quick, report=_report))
            finally:
                stack.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(quick="--quick" in sys.argv[1:])))
