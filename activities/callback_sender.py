"""One signed request to one receiver, and what its answer means for the delivery.

Only 2xx is success. Redirects are never followed: they are a failed attempt with a code of their own. A receiver
ends a delivery with 410, or with the reply header `webhook-delivery: disable | abort-message`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

import httpx

from activities.callback_body import signed_headers
from activities.delivery_errors import DeliveryError
from activities.dns_cache import NameNotFoundError, ResolverUnavailableError
from activities.http_guard import AddressRefusedError, BoundedReply, GuardedClient
from workflows.policies import CALLBACK_MAX_RETRY_AFTER_SECONDS
from workflows.tasks import DeliveryOutcome

MAX_LOGGED_REPLY_BYTES: Final = 2_048


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one request came to."""

    outcome: DeliveryOutcome
    error: DeliveryError | None = None
    status_code: int | None = None
    reply: str | None = None
    retry_after_seconds: float | None = None
    alive: bool | None = None
    """For the breaker: whether the receiver works. None: the request never left."""


_FAILURES: Final[tuple[tuple[type[Exception], DeliveryError], ...]] = (
    # Most specific first.
    (httpx.ConnectTimeout, DeliveryError.CONNECT_TIMEOUT),
    (httpx.TimeoutException, DeliveryError.TIMEOUT),
    (TimeoutError, DeliveryError.TIMEOUT),
    (httpx.ConnectError, DeliveryError.CONNECT_FAILED),
    (httpx.NetworkError, DeliveryError.CONNECTION_LOST),
    (httpx.ProtocolError, DeliveryError.PROTOCOL_ERROR),
    (NameNotFoundError, DeliveryError.NAME_NOT_FOUND),
    (ResolverUnavailableError, DeliveryError.DNS_FAILED),
    # A name may point elsewhere tomorrow, so this one is tried again; a refused URL never changes.
    (AddressRefusedError, DeliveryError.ADDRESS_REFUSED),
)
_SERVER_CLOSED: Final = "Server disconnected"


RequestOut = Callable[[], AbstractContextManager[Mapping[str, str]]]


@contextmanager
def _plain_request() -> Iterator[Mapping[str, str]]:
    yield {}


class CallbackSender:
    """Signs and sends over a guarded client.

    Args:
        client: pool, time-outs and address checks.
        total_timeout: seconds for connecting, sending and the whole reply.
        request_out: entered round every request; yields headers to send with it.
    """

    def __init__(
        self, client: GuardedClient, *, total_timeout: float = 10.0, request_out: RequestOut | None = None
    ) -> None:
        self._client = client
        self._request_out = request_out or _plain_request
        self._total_timeout = total_timeout

    async def send(self, url: httpx.URL, webhook_id: str, body: str, secrets: Sequence[str]) -> Answer:
        """Make one attempt. Whatever the receiver or the network does is an answer, never an error."""
        now = datetime.now(UTC)
        try:
            headers = signed_headers(webhook_id, body, secrets, now)
        except ValueError:
            return Answer(outcome=DeliveryOutcome.RETRY, error=DeliveryError.NOT_SIGNABLE)
        headers["content-type"] = "application/json"
        try:
            with self._request_out() as more:
                reply = await self._client.exchange(
                    "POST", url, headers={**more, **headers}, content=body.encode(), timeout=self._total_timeout
                )
        except httpx.PoolTimeout:
            return Answer(outcome=DeliveryOutcome.DEFERRED, error=DeliveryError.POOL_BUSY)
        except tuple(kind for kind, _ in _FAILURES) as failure:
            return Answer(outcome=DeliveryOutcome.RETRY, error=_error_of(failure), alive=False)
        return _read(reply, now)


def _error_of(failure: Exception) -> DeliveryError:
    if _caused_by_tls(failure):
        return DeliveryError.TLS_FAILED
    # httpx files a connection closed before any reply under protocol errors.
    if isinstance(failure, httpx.RemoteProtocolError) and str(failure).startswith(_SERVER_CLOSED):
        return DeliveryError.CONNECTION_LOST
    return next(error for kind, error in _FAILURES if isinstance(failure, kind))


def _caused_by_tls(failure: BaseException | None) -> bool:
    while failure is not None:
        if isinstance(failure, ssl.SSLError):
            return True
        failure = failure.__cause__ or failure.__context__
    return False


def _read(reply: BoundedReply, now: datetime) -> Answer:
    status = reply.status_code
    outcome, error = _verdict(status, reply.headers)
    return Answer(
        outcome=outcome,
        error=error,
        status_code=status,
        reply=_excerpt(reply.body),
        retry_after_seconds=_retry_after(reply.headers, now) if outcome is DeliveryOutcome.RETRY else None,
        alive=outcome is not DeliveryOutcome.RETRY,
    )


def _verdict(status: int, headers: Mapping[str, str]) -> tuple[DeliveryOutcome, DeliveryError | None]:
    if httpx.codes.is_success(status):
        return DeliveryOutcome.DELIVERED, None
    match headers.get("webhook-delivery", "").strip().lower():
        case "disable":
            return DeliveryOutcome.GIVE_UP, DeliveryError.RECEIVER_DISABLED
        case "abort-message":
            return DeliveryOutcome.GIVE_UP, DeliveryError.RECEIVER_ABORTED
    if status == httpx.codes.GONE:
        return DeliveryOutcome.GIVE_UP, DeliveryError.GONE
    if httpx.codes.is_redirect(status):
        return DeliveryOutcome.RETRY, DeliveryError.REDIRECT
    return DeliveryOutcome.RETRY, DeliveryError.HTTP_STATUS


def _retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds from `Retry-After`, given as seconds or as a date; None when absent, past or unreadable."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        # A number of any length: int() refuses thousands of digits, and more than a day is a day.
        seconds = float(value[:12])
    else:
        try:
            at = parsedate_to_datetime(value)
        except (ValueError, IndexError, TypeError):
            return None
        seconds = (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds()
    return min(seconds, CALLBACK_MAX_RETRY_AFTER_SECONDS) if seconds > 0 else None


def _excerpt(body: bytes) -> str | None:
    """The first 2 KB as text. NULs go: some stores that people copy the log into refuse them."""
    text = body[:MAX_LOGGED_REPLY_BYTES].decode("utf-8", "replace").replace("\x00", "")
    # Each undecodable byte became three, so the limit is applied once more.
    return text.encode()[:MAX_LOGGED_REPLY_BYTES].decode("utf-8", "ignore") or None
