"""The whole examination: everything at once, so that it takes as long as its slowest check."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from api.doctor import machine, server
from api.doctor.findings import Finding, State, within
from workers.settings import Settings

STORE_LIMIT: Final = timedelta(seconds=8)
SERVER_LIMIT: Final = timedelta(seconds=15)
VERSIONS_LIMIT: Final = timedelta(seconds=12)


async def examine(settings: Settings) -> list[Finding]:
    """Look at everything; never raises for what is broken."""
    temporal, store, versions = await asyncio.gather(
        within(
            SERVER_LIMIT, "temporal", lambda: server.temporal(settings), remedy="see whether the server is overloaded"
        ),
        within(
            STORE_LIMIT, "store", lambda: machine.store(settings), remedy="correct REELGATE_STORE_URL and its options"
        ),
        within(VERSIONS_LIMIT, "versions", lambda: machine.versions(settings), remedy="see whether nvidia-smi hangs"),
    )
    return [
        *versions,
        *machine.secrets(settings),
        *machine.models(settings),
        *machine.egress(settings),
        *store,
        *temporal,
    ]


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether nothing is broken."""
    return all(finding.state is not State.BROKEN for finding in findings)
