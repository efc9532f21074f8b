"""Temporal's visibility store, page by page: what every list that clients walk by cursor is read with.

It lags behind by moments and may be wrong, so whoever acts on a row asks the run itself first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from temporalio.client import Client, WorkflowExecution

from api.cursors import Cursors
from api.problems import ValidationFailedError
from api.temporal_calls import bounded


@dataclass(frozen=True, kw_only=True)
class VisibilityPage:
    """Some rows, and the cursor of the next ones."""

    rows: Sequence[WorkflowExecution]
    next_cursor: str | None


class VisibilityPages:
    """Reads pages.

    Args:
        client: of the namespace.
        cursors: seal what the server needs to go on.
        call_limit: for one page.
    """

    def __init__(self, client: Client, *, cursors: Cursors, call_limit: timedelta) -> None:
        self._client = client
        self._cursors = cursors
        self._limit = call_limit

    async def page(self, query: str, *, cursor: str | None, limit: int) -> VisibilityPage:
        """At most `limit` runs that match, from a cursor on.

        Raises:
            ValidationFailedError: the cursor is not one of ours.
            TemporalUnavailableError: no answer in time.
            RPCError: INVALID_ARGUMENT, the query is none.
        """
        token = None
        if cursor is not None:
            token = self._cursors.open(cursor)
            if token is None:
                raise ValidationFailedError.of("cursor", "cursor", "is not the next_cursor of a page")
        found = self._client.list_workflows(query, page_size=limit, next_page_token=token)
        await bounded(found.fetch_next_page, limit=self._limit)
        following = found.next_page_token
        return VisibilityPage(
            rows=found.current_page or (), next_cursor=self._cursors.seal(following) if following else None
        )


def query_time(value: datetime, *, timespec: str = "microseconds") -> str:
    """A time as queries have it."""
    return value.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
