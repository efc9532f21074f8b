"""API keys, tenants' callback secrets and endpoint settings in a running process.

A key is `rg_<id>_<secret>`; the file keeps its SHA-256 (the secret has 256 random bits, so a slow hash would add
nothing but a cost per request). Callback secrets stand in clear, because deliveries are signed with them: the file
is mode 0600 here and a mounted secret on replicas. `workers.keys_admin` changes it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from workers.keys_file import ApiKey, EndpointSettings, KeysFile, KeysFileError, Scope, read_keys_file

__all__ = ["ApiKey", "EndpointSettings", "KeyRing", "KeysFileError", "Scope"]

CHECK_INTERVAL_SECONDS: Final = 2.0
"""How often a running process looks whether the file changed."""

_TOKEN = re.compile(r"rg_([a-z0-9]{4,32})_([A-Za-z0-9_-]{20,})")

_log = structlog.stdlib.get_logger(__name__)


class KeyRing:
    """The keys of a running process; takes a changed file up within 5 seconds, without a restart.

    A file that became unreadable or wrong changes nothing but the log: keys that worked keep working.
    """

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read `file`.

        Raises:
            KeysFileError: it is missing or wrong.
        """
        self._file = file
        self._clock = clock
        self._stamp = _stamp(file)
        self._checked_at = clock()
        self._take(read_keys_file(file))

    def authenticate(self, token: str, *, now: datetime | None = None) -> ApiKey | None:
        """The live key that `token` is, or None."""
        match = _TOKEN.fullmatch(token)
        key = self.find(match[1], now=now) if match else None
        if key is None or not hmac.compare_digest(digest(token), key.sha256):
            return None
        return key

    def find(self, key_id: str, *, now: datetime | None = None) -> ApiKey | None:
        """The live key with this id (for signed requests, which name it), or None."""
        self._reload_if_changed()
        key = self._keys.get(key_id)
        return key if key is not None and key.live(now or datetime.now(UTC)) else None

    def callback_secrets(self, tenant: str) -> tuple[str, ...]:
        """A tenant's `whsec_...` secrets, newest first; every one of them signs."""
        self._reload_if_changed()
        return tuple(self._current.callback_secrets.get(tenant, ()))

    def endpoint(self, tenant: str, url: str) -> EndpointSettings:
        """Settings of a callback endpoint; the defaults where the file has none."""
        self._reload_if_changed()
        return self._current.endpoints.get((tenant, url), EndpointSettings())

    def _take(self, current: KeysFile) -> None:
        self._current = current
        self._keys = {key.key_id: key for key in current.keys}

    def _reload_if_changed(self) -> None:
        now = self._clock()
        if now - self._checked_at < CHECK_INTERVAL_SECONDS:
            return
        self._checked_at = now
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(read_keys_file(self._file))
        except KeysFileError as error:
            _log.error("keys_file_kept", reason=str(error))
        else:
            _log.info("keys_file_reloaded", file=str(self._file), keys=len(self._keys))


def digest(token: str) -> str:
    """What the file keeps of a key."""
    return hashlib.sha256(token.encode("utf-8")).hexdigest()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
