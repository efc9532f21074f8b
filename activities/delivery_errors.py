"""Why a delivery attempt did not deliver, as the attempt log names it."""

from __future__ import annotations

from enum import StrEnum


class DeliveryError(StrEnum):
    """`error_code` of a delivery attempt; an attempt that failed in ways of our own reads `INTERNAL`."""

    HTTP_STATUS = "HTTP_STATUS"
    REDIRECT = "REDIRECT"
    GONE = "GONE"
    RECEIVER_DISABLED = "RECEIVER_DISABLED"
    RECEIVER_ABORTED = "RECEIVER_ABORTED"
    TIMEOUT = "TIMEOUT"
    CONNECT_TIMEOUT = "CONNECT_TIMEOUT"
    CONNECT_FAILED = "CONNECT_FAILED"
    TLS_FAILED = "TLS_FAILED"
    CONNECTION_LOST = "CONNECTION_LOST"
    PROTOCOL_ERROR = "PROTOCOL_ERROR"
    NAME_NOT_FOUND = "NAME_NOT_FOUND"
    DNS_FAILED = "DNS_FAILED"
    ADDRESS_REFUSED = "ADDRESS_REFUSED"
    URL_REFUSED = "URL_REFUSED"
    NOT_SIGNABLE = "NOT_SIGNABLE"
    """The tenant has no usable signing secret on this worker."""
    POOL_BUSY = "POOL_BUSY"
    ENDPOINT_BUSY = "ENDPOINT_BUSY"
    BREAKER_OPEN = "BREAKER_OPEN"
