"""Input images: taken out of a data URL or fetched, and really decoded before anything is stored.

The type comes from the content, not from what the client calls it. Bytes are bounded before base64 is decoded, and
pixels after the header is read and before a pixel is, so that a small file cannot unfold into gigabytes, nor, by
scan after scan over the same pixels, into hours of work. The original bytes are kept: pipelines scale as they need,
and the hash names what the client sent.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from PIL import Image

from activities.http_guard import FetchError, GuardedClient, UrlRefusedError

_MEDIA_TYPES: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "MPO": "image/jpeg"}
"""By Pillow's name. MPO is a JPEG with more pictures behind the first, as many phones write it."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP")
MAX_JPEG_SCANS: Final = 100
"""Each scan walks over every pixel again and may be ten bytes long: a small file could hold a core for hours.
Encoders write about ten."""
_JPEG_SCAN: Final = b"\xff\xda"
"""Marker of a scan; inside of compressed pixels these two bytes do not follow each other."""
_DATA_SCHEME: Final = "data:"
_FETCH_RULES: Final = {"ADDRESS_REFUSED": "address", "TOO_LARGE": "image_bytes"}
"""Where the same rule has a name already; the others are `image_<code of the fetch error>`."""

_URL_SCHEMES: Final = ("https://", "http://")
"""Plain HTTP is the egress policy's to refuse: it allows it to development networks only."""

ImageFetcher = Callable[[str, int], Awaitable[bytes]]
"""Fetches a URL within the limits of the egress policy: the URL and the bytes that it may have.

Raises InvalidImageError.
"""


class InvalidImageError(Exception):
    """An image that cannot be an input; `rule` is stable, the message is for the client."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """Bounds of an input image."""

    max_bytes: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True)
class InputImage:
    """A checked image."""

    content: bytes = field(repr=False)
    sha256: str
    media_type: str
    width: int
    height: int


async def load_image(source: str, limits: ImageLimits, *, fetch: ImageFetcher) -> InputImage:
    """Return the image behind the `image` field of a request.

    Args:
        source: a base64 data URL or an https URL.
        limits: bounds in bytes and pixels.
        fetch: how https URLs are read.

    Raises:
        InvalidImageError: there is no such image, or it is not one we take.
    """
    if source[: len(_DATA_SCHEME)].lower() == _DATA_SCHEME:
        return await asyncio.to_thread(_from_data_url, source, limits)
    if not source.lower().startswith(_URL_SCHEMES):
        raise InvalidImageError("image_source", "must be a base64 data URL or an https URL")
    return await asyncio.to_thread(check_image, await fetch(source, limits.max_bytes), limits)


def guarded_fetch(client: GuardedClient, *, timeout: float) -> ImageFetcher:
    """Read images through the guard that callbacks pass too, each whole within `timeout` seconds.

    Rules of refused URLs are the guard's, the same as those of `callback_url`.
    """

    async def fetch(url: str, max_bytes: int) -> bytes:
        try:
            return (await client.fetch_bounded(url, max_bytes=max_bytes, timeout=timeout)).body
        except FetchError as error:
            refused = error.__cause__
            if isinstance(refused, UrlRefusedError):
                raise InvalidImageError(refused.rule, str(refused)) from None
            rule = _FETCH_RULES.get(error.code, f"image_{error.code.lower()}")
            raise InvalidImageError(rule, f"cannot be fetched: {error}") from None

    return fetch


def _from_data_url(url: str, limits: ImageLimits) -> InputImage:
    header, comma, encoded = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise InvalidImageError("data_url", "must look like data:image/png;base64,...")
    if len(encoded) // 4 * 3 > limits.max_bytes + 2:
        raise _too_many_bytes(limits)
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidImageError("base64", "the data URL does not hold valid base64") from None
    return check_image(content, limits)


def check_image(content: bytes, limits: ImageLimits) -> InputImage:
    """Decode an image whole and return what it is; blocks for as long as decoding takes.

    Raises:
        InvalidImageError: it is not a whole PNG, JPEG or WebP picture within the limits.
    """
    if len(content) > limits.max_bytes:
        raise _too_many_bytes(limits)
    try:
        return _decode(content, limits)
    except InvalidImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(limits) from None
    except Exception as error:
        # Decoders of broken files raise whatever they stumble over; to the client it is one thing.
        raise InvalidImageError("image_decodable", "cannot be decoded as a PNG, JPEG or WebP picture") from error


def _decode(content: bytes, limits: ImageLimits) -> InputImage:
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        width, height = image.size
        if width * height > limits.max_pixels:
            raise _too_many_pixels(limits)
        media_type = _MEDIA_TYPES[image.format or ""]
        if media_type == "image/jpeg" and content.count(_JPEG_SCAN) > MAX_JPEG_SCANS:
            raise InvalidImageError("image_scans", f"has more than {MAX_JPEG_SCANS} progressive scans")
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise InvalidImageError("image_animated", "must be a single picture, not an animation")
        image.load()
    digest = hashlib.sha256(content).hexdigest()
    return InputImage(content=content, sha256=digest, media_type=media_type, width=width, height=height)


def _too_many_bytes(limits: ImageLimits) -> InvalidImageError:
    return InvalidImageError("image_bytes", f"is larger than {limits.max_bytes} bytes")


def _too_many_pixels(limits: ImageLimits) -> InvalidImageError:
    return InvalidImageError("image_pixels", f"has more than {limits.max_pixels} pixels")
