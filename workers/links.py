"""Links to a task's clip and poster that need no API key: who has the link may read, until the artifact is removed.

Links are stable (the expiry is part of the task, not of the moment), so ETags are too, and a callback that
arrives three days late still works.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from workers.errors import ConfigurationError
from workers.secret_files import SecretFileError, create_secret_file, read_secret_file
from workers.settings import Settings

ArtifactKind = Literal["video", "poster"]

_MIN_SECRET_LENGTH: Final = 32


class LinkSecretError(ConfigurationError):
    """The link secret is missing or too short."""


class SignedLinks:
    """Signs and checks `<public_url>/api/v1/tasks/<id>/<video|poster>?exp=<unix seconds>&sig=<hex hmac>`."""

    def __init__(self, public_url: str, secret: str) -> None:
        if len(secret) < _MIN_SECRET_LENGTH:
            raise LinkSecretError(f"the link secret needs at least {_MIN_SECRET_LENGTH} characters")
        self._base = f"{public_url.rstrip('/')}/api/v1/tasks"
        self._secret = secret.encode("utf-8")

    def video_url(self, task_id: str, expires_at: datetime) -> str:
        """Link to the clip of a task, good until `expires_at`."""
        return self._url(task_id, "video", expires_at)

    def poster_url(self, task_id: str, expires_at: datetime) -> str:
        """Link to the poster image of a task, good until `expires_at`."""
        return self._url(task_id, "poster", expires_at)

    def verify(self, task_id: str, kind: ArtifactKind, exp: str, sig: str, *, now: datetime | None = None) -> bool:
        """Whether `sig` is ours for this task, kind and expiry, and the expiry has not passed."""
        if not (exp.isascii() and exp.isdigit()) or not sig.isascii():
            return False
        if not hmac.compare_digest(self._sign(task_id, kind, exp), sig):
            return False
        return (now or datetime.now(UTC)).timestamp() < int(exp)

    def _url(self, task_id: str, kind: ArtifactKind, expires_at: datetime) -> str:
        exp = str(int(expires_at.timestamp()))
        return f"{self._base}/{task_id}/{kind}?exp={exp}&sig={self._sign(task_id, kind, exp)}"

    def _sign(self, task_id: str, kind: ArtifactKind, exp: str) -> str:
        return hmac.new(self._secret, f"{task_id}\n{kind}\n{exp}".encode(), hashlib.sha256).hexdigest()


def links_from(settings: Settings) -> SignedLinks:
    """The links with the secret of this deployment.

    Raises:
        LinkSecretError: there is no secret, or it is too short.
    """
    return SignedLinks(settings.public_url, link_secret(settings))


def link_secret(settings: Settings) -> str:
    """The secret of the setting, else of the secret file.

    Raises:
        LinkSecretError: there is none.
    """
    if settings.link_secret is not None:
        return settings.link_secret.get_secret_value()
    try:
        return read_secret_file(settings.link_secret_file).strip()
    except SecretFileError as error:
        raise LinkSecretError(f"{error}; set REELGATE_LINK_SECRET or REELGATE_LINK_SECRET_FILE") from error


def create_secret(file: Path) -> None:
    """Create a file with a fresh link secret, mode 0600, unless the file exists."""
    create_secret_file(file, f"{secrets.token_urlsafe(48)}\n")
