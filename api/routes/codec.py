"""`/codec/decode`: what Temporal stores for us in clear text, for the Temporal Web UI and CLI. There is no encode.

Operators only. The Web UI of `reelgate dev` has no log-in, so there a random token in the path stands for one; without
the setting `codec_path_token` that path does not exist. A browser may only come from the origin of `web_ui_url`.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final, Self, cast
from urllib.parse import urlsplit

from fastapi import APIRouter, Header, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from temporalio.api.common.v1 import Payload

from api.auth import DECLARED_IN_OPENAPI, AuthenticatedRoute, OperatorCaller
from api.problems import (
    BodyTooLargeError,
    ForbiddenError,
    GatewayError,
    InternalError,
    MalformedJsonError,
    NotFoundError,
    PayloadUnreadableError,
    RateLimitedError,
    UnauthenticatedError,
    UnsupportedMediaTypeError,
    ValidationFailedError,
    problem_responses,
)
from api.state import AppGateway, Gateway
from workers.codec import CodecKeyError

MAX_PAYLOADS: Final = 1_000
_ALLOWED: Final = {
    "Access-Control-Allow-Methods": "POST",
    "Access-Control-Allow-Headers": "content-type,x-namespace,authorization",
    "Access-Control-Max-Age": "600",
}

_Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class EncodedPayload(BaseModel):
    """One Temporal payload in protobuf's JSON form."""

    model_config = ConfigDict(extra="ignore")

    metadata: dict[str, str] = Field(default_factory=dict, description="Values in base64.")
    data: str = Field(default="", description="Base64.")

    @classmethod
    def of(cls, payload: Payload) -> Self:
        """A payload as JSON."""
        encoded = {name: b64encode(value).decode("ascii") for name, value in payload.metadata.items()}
        return cls(metadata=encoded, data=b64encode(payload.data).decode("ascii"))

    def message(self) -> Payload:
        """The payload.

        Raises:
            binascii.Error: something is not base64.
        """
        decoded = {name: _from_base64(value) for name, value in self.metadata.items()}
        return Payload(metadata=decoded, data=_from_base64(self.data))


class EncodedPayloads(BaseModel):
    """What Temporal's tools send to a codec server, and get back."""

    model_config = ConfigDict(extra="ignore")

    payloads: list[EncodedPayload] = Field(default_factory=list, max_length=MAX_PAYLOADS)


class _ForWebUi(APIRoute):
    """Answers browsers that come from the Web UI and refuses other origins before anything is looked at."""

    def get_route_handler(self) -> _Endpoint:
        """FastAPI's handler behind the check of the origin."""
        handle = super().get_route_handler()

        async def handle_from_origin(request: Request) -> Response:
            allowed = _origin_headers(request)
            try:
                response = await handle(request)
            except GatewayError as error:
                # The page that asked may read why.
                response = error.response()
            response.headers.update(allowed)
            return response

        return handle_from_origin


class _ByKey(_ForWebUi, AuthenticatedRoute):
    """For who has a key."""


class _ByToken(_ForWebUi):
    """For who knows the path."""

    def get_route_handler(self) -> _Endpoint:
        """FastAPI's handler behind the check of the token, which comes before the body is read."""
        handle = super().get_route_handler()

        async def handle_with_token(request: Request) -> Response:
            gateway: Gateway = request.state.gateway
            token, given = gateway.settings.codec_path_token, request.path_params["token"].encode("utf-8")
            if token is None or not hmac.compare_digest(token.get_secret_value().encode("utf-8"), given):
                raise NotFoundError("There is no such resource.")
            return await handle(request)

        return handle_with_token


router = APIRouter(prefix="/api/v1/codec", tags=["codec"])


async def decode(
    body: EncodedPayloads,
    gateway: AppGateway,
    _operator: OperatorCaller,
    _user: Annotated[str | None, Header(alias="X-User-Id")] = None,
) -> EncodedPayloads:
    """Payloads that are not encrypted come back as they are. One that does not decrypt fails the request."""
    return await _decoded(body, gateway)


async def decode_by_token(body: EncodedPayloads, gateway: AppGateway) -> EncodedPayloads:
    """The same for a Web UI without a log-in."""
    return await _decoded(body, gateway)


async def preflight(request: Request) -> Response:
    """What a browser asks before it posts; no key goes with it."""
    return Response(status_code=HTTPStatus.NO_CONTENT, headers={**_origin_headers(request), **_ALLOWED})


router.add_api_route(
    "/decode",
    decode,
    methods=["POST"],
    route_class_override=_ByKey,
    dependencies=DECLARED_IN_OPENAPI,
    summary="Decode payloads of Temporal (operators)",
    responses=problem_responses(
        UnauthenticatedError,
        ForbiddenError,
        ValidationFailedError,
        PayloadUnreadableError,
        MalformedJsonError,
        UnsupportedMediaTypeError,
        BodyTooLargeError,
        RateLimitedError,
        InternalError,
    ),
)
router.add_api_route(
    "/{token}/decode", decode_by_token, methods=["POST"], route_class_override=_ByToken, include_in_schema=False
)
for path in ("/decode", "/{token}/decode"):
    router.add_api_route(path, preflight, methods=["OPTIONS"], include_in_schema=False)


def _from_base64(text: str) -> bytes:
    # As bytes: text outside of ASCII would be another error.
    return b64decode(text.encode("utf-8"), validate=True)


async def _decoded(body: EncodedPayloads, gateway: Gateway) -> EncodedPayloads:
    codec = gateway.client.data_converter.payload_codec
    assert codec is not None  # noqa: S101 - `workers.connection` gives every client one
    try:
        clear = await codec.decode([payload.message() for payload in body.payloads])
    except binascii.Error:
        raise ValidationFailedError.of("payloads", "base64", "metadata values and data are base64") from None
    except CodecKeyError as error:
        raise PayloadUnreadableError(f"Not decoded: {error}.") from None
    return EncodedPayloads(payloads=[EncodedPayload.of(payload) for payload in clear])


def _origin_headers(request: Request) -> Mapping[str, str]:
    """CORS headers for the Web UI's pages; none for who is no browser.

    Raises:
        ForbiddenError: the request comes from another site's page.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return {"Vary": "Origin"}
    ours = urlsplit(cast(Gateway, request.state.gateway).settings.web_ui_url)
    if origin != f"{ours.scheme}://{ours.netloc}":
        raise ForbiddenError("Pages of this origin may not decode; REELGATE_WEB_UI_URL names the one that may.")
    return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
