"""JSON for what crosses Temporal: the SDK's own format, with dataclasses read and written by msgspec.

The SDK walks a dataclass field by field in Python and resolves its annotations each time, which was a fifth of the
work of a control worker (ADR 14). The payloads stay `json/plain`, so that every SDK, the CLI and the Web UI read them,
and what an older release has written is read here.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from typing import Any, Final

import msgspec
from temporalio.api.common.v1 import Payload
from temporalio.converter import CompositePayloadConverter, DefaultPayloadConverter, JSONPlainPayloadConverter

_ENCODER: Final = msgspec.json.Encoder(order="sorted")


class DataclassJSONConverter(JSONPlainPayloadConverter):
    """`json/plain`. What msgspec cannot carry, the SDK is asked for, and its errors are the ones that are raised."""

    def to_payload(self, value: Any) -> Payload | None:  # noqa: ANN401 - as in the SDK
        """Write a value; a text with half a surrogate pair has no UTF-8 and is left to the SDK's escapes."""
        if is_dataclass(value):
            try:
                return Payload(metadata={"encoding": self.encoding.encode()}, data=_ENCODER.encode(value))
            except (TypeError, UnicodeEncodeError):
                pass
        return super().to_payload(value)

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:  # noqa: ANN401 - as in the SDK
        """Read a value; the SDK is more lenient (`Infinity`, half a surrogate pair) and has the last word."""
        if type_hint is not None and is_dataclass(type_hint):
            try:
                return _decoder(type_hint).decode(payload.data)
            except (msgspec.MsgspecError, TypeError):
                pass
        return super().from_payload(payload, type_hint)


class ReelgatePayloadConverter(CompositePayloadConverter):
    """The SDK's converters with ours in the place of its JSON."""

    def __init__(self) -> None:
        standard = DefaultPayloadConverter.default_encoding_payload_converters
        super().__init__(*(DataclassJSONConverter() if type(c) is JSONPlainPayloadConverter else c for c in standard))


@cache
def _decoder(kind: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
