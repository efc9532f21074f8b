"""Byte ranges of RFC 9110 for one representation: pure functions over header values."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SINGLE = re.compile(r"bytes=\s*(\d*)-(\d*)\s*", re.IGNORECASE | re.ASCII)
_MAX_DIGITS = 18


class UnsatisfiableRangeError(Exception):
    """The range has no byte of the file in it."""


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """The bytes `[start, end)` of a file of `size` bytes."""

    start: int
    end: int
    size: int

    @property
    def length(self) -> int:
        """Bytes in the range."""
        return self.end - self.start

    @property
    def content_range(self) -> str:
        """Value of the `Content-Range` header."""
        return f"bytes {self.start}-{self.end - 1}/{self.size}"


def parse_range(value: str | None, size: int) -> ByteRange | None:
    """The one range that is asked for, or None when the whole file is to be sent.

    What is not a single byte range is ignored, as the RFC allows: several ranges, other units, bad syntax.

    Args:
        value: the `Range` header.
        size: bytes of the file.

    Raises:
        UnsatisfiableRangeError: it starts behind the end, or asks for the last zero bytes.
    """
    match = _SINGLE.fullmatch(value) if value else None
    if match is None or not (match[1] or match[2]) or max(len(match[1]), len(match[2])) > _MAX_DIGITS:
        return None
    if not match[1]:
        suffix = min(int(match[2]), size)
        if suffix == 0:
            raise UnsatisfiableRangeError
        return ByteRange(start=size - suffix, end=size, size=size)
    start = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < start:
        return None
    if start >= size:
        raise UnsatisfiableRangeError
    return ByteRange(start=start, end=min(last + 1, size), size=size)


def etag_matches(value: str | None, etag: str) -> bool:
    """Whether an `If-None-Match` header names the entity tag (weak comparison)."""
    if value is None:
        return False
    named = [tag.strip().removeprefix("W/") for tag in value.split(",")]
    return "*" in named or etag in named
