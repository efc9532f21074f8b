"""What a check found: one line, and in bounded time whatever is broken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum


class State(StrEnum):
    """How a thing stands."""

    OK = "ok"
    LOOK = "look"
    """It cannot be seen from here, or it is a matter of opinion: a person has to look."""
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    detail: str
    remedy: str = ""
    """What to do; empty when all is well."""


def ok(name: str, detail: str) -> Finding:
    """All is well."""
    return Finding(name=name, state=State.OK, detail=detail)


def look(name: str, detail: str, remedy: str) -> Finding:
    """A person has to look."""
    return Finding(name=name, state=State.LOOK, detail=detail, remedy=remedy)


def broken(name: str, detail: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(name=name, state=State.BROKEN, detail=detail, remedy=remedy)


Check = Callable[[], Awaitable[Sequence[Finding]]]


async def within(limit: timedelta, name: str, check: Check, *, remedy: str) -> list[Finding]:
    """Findings of one check; what it raises, and its silence, are findings too.

    Args:
        limit: after which it counts as silent.
        name: of the line when it raises or is silent.
        check: the check.
        remedy: what to do then.
    """
    try:
        async with asyncio.timeout(limit.total_seconds()):
            return list(await check())
    except TimeoutError:
        return [broken(name, f"no answer within {limit.total_seconds():g} s", remedy)]
    except Exception as error:  # whatever is broken, the other lines are wanted too
        return [broken(name, _one_line(str(error)) or type(error).__name__, remedy)]


def _one_line(text: str) -> str:
    return " ".join(text.split())
