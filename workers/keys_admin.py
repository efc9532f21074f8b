"""Changing `keys.toml`: create, list, revoke and rotate. Each change is one locked read and one whole write."""

from __future__ import annotations

import fcntl
import secrets
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from workers.errors import ConfigurationError
from workers.keys import digest
from workers.keys_file import ApiKey, KeysFile, KeysFileError, Scope, read_keys_file, render_keys_file, valid_tenant
from workers.secret_files import replace_secret_file

ROTATION_OVERLAP: Final = timedelta(hours=24)
"""How long a rotated key still works beside its successor."""

MAX_CALLBACK_SECRETS: Final = 2
"""A tenant's secrets that live at a time: the newest, and the one before it."""

_ID_ALPHABET: Final = "abcdefghijkmnpqrstuvwxyz23456789"
_ID_LENGTH: Final = 10


class UnknownKeyError(ConfigurationError):
    """There is no key with this id."""


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key just made. What is here in clear is nowhere else and cannot be shown again."""

    key: ApiKey
    token: str = field(repr=False)
    """The key itself, `rg_<id>_<secret>`."""
    callback_secret: str | None = field(default=None, repr=False)
    """The tenant's first callback secret, when the tenant is new."""


def create_key(
    file: Path, *, tenant: str, scope: Scope = Scope.USER, tier: str = "standard", signing: bool = False
) -> NewKey:
    """Add a key, and with a tenant's first key its callback secret.

    Args:
        file: `keys.toml`; made when it is not there.
        tenant: who the key belongs to: a-z, 0-9, `_` and `-`, at most 64 characters.
        scope: what the key may do.
        tier: limits and priorities of the key.
        signing: also make a secret for signed requests; unlike the key it has to stand in the file in clear.

    Raises:
        KeysFileError: the file is wrong, or the tenant's name is.
    """
    if not valid_tenant(tenant):
        raise KeysFileError(
            f"tenant {tenant!r}: a-z, 0-9, `_` and `-`, at most 64 characters, begins with a letter or digit"
        )
    with _changing(file) as change:
        new = _new_key(tenant=tenant, scope=scope, tier=tier, signing=signing)
        change.keys.append(new.key)
        if tenant in change.callback_secrets:
            return new
        secret = _new_callback_secret()
        change.callback_secrets[tenant] = (secret,)
    return replace(new, callback_secret=secret)


def list_keys(file: Path) -> tuple[ApiKey, ...]:
    """All keys, oldest first, expired ones too."""
    return read_keys_file(file).keys


def revoke_key(file: Path, key_id: str) -> ApiKey:
    """Remove a key; running processes refuse it within 5 seconds.

    Raises:
        UnknownKeyError: there is no such key.
    """
    with _changing(file) as change:
        key = _find(change.keys, key_id, file)
        change.keys.remove(key)
    return key


def rotate_key(file: Path, key_id: str, *, overlap: timedelta = ROTATION_OVERLAP) -> NewKey:
    """Make a successor with the same rights; the old key works for `overlap` more.

    Raises:
        UnknownKeyError: there is no such key.
    """
    with _changing(file) as change:
        old = _find(change.keys, key_id, file)
        new = _new_key(tenant=old.tenant, scope=old.scope, tier=old.tier, signing=old.signing_secret is not None)
        end = datetime.now(UTC).replace(microsecond=0) + overlap
        change.keys[change.keys.index(old)] = replace(old, expires_at=min(end, old.expires_at or end))
        change.keys.append(new.key)
    return new


def rotate_callback_secret(file: Path, tenant: str) -> str:
    """Put a new callback secret in front of a tenant's; the one before it signs too until the next rotation.

    Raises:
        UnknownKeyError: the tenant has no key.
    """
    with _changing(file) as change:
        if not any(key.tenant == tenant for key in change.keys):
            raise UnknownKeyError(f"no key of tenant {tenant!r} in {file}")
        secret = _new_callback_secret()
        change.callback_secrets[tenant] = (secret, *change.callback_secrets.get(tenant, ()))[:MAX_CALLBACK_SECRETS]
    return secret


@dataclass(kw_only=True)
class _Change:
    keys: list[ApiKey]
    callback_secrets: dict[str, tuple[str, ...]]


@contextmanager
def _changing(file: Path) -> Iterator[_Change]:
    file.parent.mkdir(parents=True, exist_ok=True)
    # A lock file of its own: the keys file is replaced, and a lock on it would go with the old one.
    with file.with_name(f".{file.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read_keys_file(file) if file.exists() else KeysFile()
        change = _Change(keys=list(before.keys), callback_secrets=dict(before.callback_secrets))
        yield change
        after = replace(before, keys=tuple(change.keys), callback_secrets=change.callback_secrets)
        replace_secret_file(file, render_keys_file(after))


def _find(keys: Iterable[ApiKey], key_id: str, file: Path) -> ApiKey:
    for key in keys:
        if key.key_id == key_id:
            return key
    raise UnknownKeyError(f"no key {key_id!r} in {file}")


def _new_key(*, tenant: str, scope: Scope, tier: str, signing: bool) -> NewKey:
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    token = f"rg_{key_id}_{secrets.token_urlsafe(32)}"
    key = ApiKey(
        key_id=key_id,
        tenant=tenant,
        scope=scope,
        tier=tier,
        created_at=datetime.now(UTC).replace(microsecond=0),
        sha256=digest(token),
        signing_secret=secrets.token_urlsafe(32) if signing else None,
    )
    return NewKey(key=key, token=token)


def _new_callback_secret() -> str:
    return f"whsec_{b64encode(secrets.token_bytes(32)).decode('ascii')}"
