"""Calls to Temporal that end in bounded time.

The SDK's own time limits are not enough: it goes on retrying a lost server for about ten seconds, and a call with
`rpc_timeout=2s` was seen to take 5.5 s. Every call of the API passes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, TypeVar

import structlog
from temporalio.service import RPCError, RPCStatusCode

from api.problems import TemporalUnavailableError

T = TypeVar("T")

_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 0.5
_AGAIN: Final = frozenset({RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.ABORTED, RPCStatusCode.UNAVAILABLE})
"""9, 10 and 14: among them updates that met a continue-as-new. Every call made here may be repeated."""
_OURS: Final = frozenset({RPCStatusCode.NOT_FOUND, RPCStatusCode.ALREADY_EXISTS, RPCStatusCode.INVALID_ARGUMENT})
"""What says something about the request itself; the caller looks at these."""

_log = structlog.stdlib.get_logger(__name__)


async def bounded(call: Callable[[], Awaitable[T]], *, limit: timedelta) -> T:
    """Make a call that may be repeated, within `limit` in all.

    Raises:
        TemporalUnavailableError: no answer within the limit, or Temporal refuses to serve.
        RPCError: NOT_FOUND, ALREADY_EXISTS or INVALID_ARGUMENT.
    """
    pause = _PAUSE_SECONDS
    try:
        async with asyncio.timeout(limit.total_seconds()):
            while True:
                try:
                    return await call()
                except RPCError as error:
                    if error.status in _OURS:
                        raise
                    if error.status not in _AGAIN:
                        _log.warning("temporal_refused", rpc_status=error.status.name, reason=error.message)
                        raise TemporalUnavailableError from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, _MAX_PAUSE_SECONDS)
    except TimeoutError:
        _log.warning("temporal_silent", limit_seconds=limit.total_seconds())
        raise TemporalUnavailableError from None
