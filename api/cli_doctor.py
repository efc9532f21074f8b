"""`reelgate doctor`: is this deployment as it should be, and what is to be done."""

# ruff: noqa: PLC0415 - each command imports its own world

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Final

import typer

from api.cli_output import EXIT_BROKEN, leave, out

_STYLES: Final = {"ok": "green", "look": "yellow", "broken": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Look at everything a deployment needs, from this machine with its settings. Exit code 1: something is broken."""
    import logging

    from api.doctor.examination import examine, is_well
    from api.doctor.findings import broken
    from workers.errors import ConfigurationError
    from workers.settings import load_settings

    # What the parts log about what is broken would stand between the lines that say it.
    logging.disable(logging.CRITICAL)
    try:
        findings = asyncio.run(examine(load_settings()))
    except ConfigurationError as error:
        findings = [broken("settings", "; ".join(str(error).splitlines()), "correct these variables, then look again")]
    well = is_well(findings)
    if as_json:
        out.print_json(data={"ok": well, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            out.print(f"{finding.state:<6}", style=_STYLES[finding.state], end="  ")
            remedy = f" -- {finding.remedy}" if finding.remedy else ""
            out.print(f"{finding.name:<{width}}  {finding.detail}{remedy}", markup=False)
    leave(0 if well else EXIT_BROKEN)
