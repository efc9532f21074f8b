"""`/`: the console, a static page without a build step. It has no rights of its own: whoever opens it brings a key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from importlib.resources import files
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response

from activities.storage import StoreUnavailableError
from api.byte_ranges import etag_matches
from api.problems import NotFoundError
from api.state import AppGateway, Gateway

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE: Final = "index.html"

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, kw_only=True)
class _File:
    body: bytes
    media_type: str
    etag: str


def _files() -> dict[str, _File]:
    """Every file of the console by name; nothing else of the disk can be asked for."""
    found = {}
    for file in files("api").joinpath("console").iterdir():
        media_type = _MEDIA_TYPES.get(PurePath(file.name).suffix)
        if media_type is not None:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[file.name] = _File(body=body, media_type=media_type, etag=etag)
    return found


FILES: Final = _files()


@router.get("/")
async def page(request: Request, gateway: AppGateway) -> Response:
    """The page; scripts and styles are files beside it, so the policy needs no `unsafe-inline`."""
    return _answer(request, FILES[_PAGE], {"Content-Security-Policy": await _policy(gateway)})


@router.get("/console/{name}")
async def part(request: Request, name: str) -> Response:
    """A script, style or image of the page."""
    if name not in FILES:
        raise NotFoundError("The console has no such file.")
    return _answer(request, FILES[name], {})


def _answer(request: Request, file: _File, headers: dict[str, str]) -> Response:
    headers = {**headers, "ETag": file.etag, "Cache-Control": "no-cache"}
    if etag_matches(request.headers.get("if-none-match"), file.etag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)


async def _policy(gateway: Gateway) -> str:
    """Everything from this origin; clips also from the store that a result link redirects to."""
    store = await _store_origin(gateway)
    media = f"'self' {store}" if store else "'self'"
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            f"img-src {media} data:",
            f"media-src {media}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


async def _store_origin(gateway: Gateway) -> str | None:
    try:
        url = await gateway.store.signed_url("console", expires_in=timedelta(seconds=1))
    except StoreUnavailableError:
        return None
    parts = urlsplit(url or "")
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else None
