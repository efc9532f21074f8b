"""Reading event streams as a client does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, kw_only=True)
class SeenEvent:
    """One event as it came."""

    id: str
    name: str
    data: dict[str, Any]

    @property
    def order(self) -> tuple[int, int]:
        state, _, tick = self.id.partition(".")
        return int(state), int(tick)


@asynccontextmanager
async def watching(
    http: httpx.AsyncClient, task_id: str, *, last: str | None = None
) -> AsyncIterator[AsyncIterator[SeenEvent]]:
    """Open a stream; leaving the context drops the connection."""
    headers = {} if last is None else {"Last-Event-ID": last}
    async with http.stream("GET", f"/tasks/{task_id}/events", headers=headers) as reply:
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield parsed(reply.aiter_lines())


async def parsed(lines: AsyncIterator[str]) -> AsyncIterator[SeenEvent]:
    """Events out of lines, comments left out."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            if "data" in fields:
                yield SeenEvent(id=fields["id"], name=fields["event"], data=json.loads(fields["data"]))
            fields = {}


async def to_the_end(http: httpx.AsyncClient, task_id: str, *, last: str | None = None) -> list[SeenEvent]:
    """Everything that a stream has until it ends by itself."""
    async with watching(http, task_id, last=last) as events:
        return [event async for event in events]


async def upto(events: AsyncIterator[SeenEvent], name: str, **data: object) -> list[SeenEvent]:
    """Read on until an event has these data; returns what was read, that one last."""
    seen = []
    async for event in events:
        seen.append(event)
        if event.name == name and all(event.data[key] == value for key, value in data.items()):
            return seen
    raise AssertionError(f"the stream ended without {name} {data}: {seen}")


def states(events: list[SeenEvent]) -> list[tuple[str, bool]]:
    """The states among events: status, and whether the run is closed."""
    return [(event.data["status"], event.data["is_terminal"]) for event in events if event.name == "state"]
