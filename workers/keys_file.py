"""The file `keys.toml`: what is in it, reading and writing it.

[[keys]]
id = "k3f9a..."                  # public part of the key
sha256 = "..."                   # of the whole key
tenant = "acme"
scope = "user"                   # user | service | operator
tier = "standard"
created_at = 2026-01-31T12:00:00Z
expires_at = 2026-02-01T12:00:00Z        # optional
signing_secret = "..."                   # optional: the key may also sign requests (HMAC)

[tenants.acme]
callback_secrets = ["whsec_...", "whsec_..."]    # newest first; all of them sign

[[endpoints]]
tenant = "acme"
url = "https://acme.example/hooks"
merge_window_ms = 0
merge_max_tasks = 100
concurrency = 4
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from workers.errors import ConfigurationError

_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SECRET_BYTES: Final = range(24, 65)


class Scope(StrEnum):
    """What a key may do; each scope includes the ones before it."""

    USER = "user"
    """Acts for itself."""
    SERVICE = "service"
    """Acts for its end users, named in `X-User-Id`."""
    OPERATOR = "operator"
    """Workers, decoding, redrive and quotas as well."""

    def includes(self, other: Scope) -> bool:
        """Whether a key of this scope may do what `other` may."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


class KeysFileError(ConfigurationError):
    """`keys.toml` is missing or wrong; the message names the file and the entry, never a secret."""


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """One API key as the file keeps it."""

    key_id: str
    tenant: str
    scope: Scope
    tier: str
    created_at: datetime
    sha256: str = field(repr=False)
    """Hex digest of the whole key."""
    expires_at: datetime | None = None
    signing_secret: str | None = field(default=None, repr=False)
    """Shared secret for signed requests (HMAC); None: the key is a bearer key only."""

    def live(self, now: datetime) -> bool:
        """Whether the key still opens anything."""
        return self.expires_at is None or now < self.expires_at


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """How callbacks to one (tenant, exact URL) leave."""

    merge_window_ms: int = 0
    """Deliveries that meet within this window leave as one request; 0: off."""
    merge_max_tasks: int = 100
    concurrency: int | None = None
    """Deliveries at a time per callback worker; None: the worker's setting."""


@dataclass(frozen=True, kw_only=True)
class KeysFile:
    """Everything in `keys.toml`."""

    keys: tuple[ApiKey, ...] = ()
    callback_secrets: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    endpoints: Mapping[tuple[str, str], EndpointSettings] = field(default_factory=dict)


def valid_tenant(name: str) -> bool:
    """Whether a tenant may have this name."""
    return _TENANT.fullmatch(name) is not None


def read_keys_file(file: Path) -> KeysFile:
    """Read and check `keys.toml`.

    Raises:
        KeysFileError: it is missing or wrong.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeysFileError(f"{file}: {error.strerror}; `reelgate keys create` makes it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeysFileError(f"{file}: {error}") from error
    root = _Table(f"{file}", table)
    keys = tuple(_read_key(entry) for entry in root.tables("keys"))
    secrets = {entry.name: _read_secrets(entry) for entry in root.named_tables("tenants")}
    endpoints = dict(_read_endpoint(entry) for entry in root.tables("endpoints"))
    root.done()
    ids = [key.key_id for key in keys]
    if repeated := {key_id for key_id in ids if ids.count(key_id) > 1}:
        raise KeysFileError(f"{file}: the key id {min(repeated)!r} stands twice")
    return KeysFile(keys=keys, callback_secrets=secrets, endpoints=endpoints)


class _Table:
    """One TOML table being read: takes values out by name and type, and complains about the rest."""

    def __init__(self, where: str, values: Mapping[str, object], name: str = "") -> None:
        self._where = where
        self._values = dict(values)
        self.name = name

    def text(self, name: str, *, pattern: re.Pattern[str] | None = None) -> str:
        value = self._values.pop(name, None)
        if not isinstance(value, str) or not value or (pattern is not None and not pattern.fullmatch(value)):
            raise self.error(f"`{name}` is missing or malformed")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if name in self._values else None

    def number(self, name: str, default: int, allowed: range) -> int:
        value = self._values.pop(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
            raise self.error(f"`{name}` is a whole number from {allowed.start} to {allowed.stop - 1}")
        return value

    def optional_number(self, name: str, allowed: range) -> int | None:
        return self.number(name, 0, allowed) if name in self._values else None

    def time(self, name: str) -> datetime:
        value = self._values.pop(name, None)
        if not isinstance(value, datetime) or value.tzinfo is None:
            raise self.error(f"`{name}` is a time with an offset, like 2026-01-31T12:00:00Z")
        return value.astimezone(UTC)

    def optional_time(self, name: str) -> datetime | None:
        return self.time(name) if name in self._values else None

    def texts(self, name: str) -> list[str]:
        value = self._values.pop(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"`{name}` is a list of strings")
        return value

    def tables(self, name: str) -> Iterable[_Table]:
        entries = self._values.pop(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self.error(f"`{name}` is written as [[{name}]]")
        return [_Table(f"{self._where}: {name} entry {n}", entry) for n, entry in enumerate(entries, start=1)]

    def named_tables(self, name: str) -> Iterable[_Table]:
        entries = self._values.pop(name, {})
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise self.error(f"`{name}` is written as [{name}.<name>]")
        return [_Table(f"{self._where}: {name}.{key}", entry, key) for key, entry in entries.items()]

    def done(self) -> None:
        if self._values:
            raise self.error(f"unknown field `{min(self._values)}`")

    def error(self, what: str) -> KeysFileError:
        return KeysFileError(f"{self._where}: {what}")


def _read_key(entry: _Table) -> ApiKey:
    scope = entry.text("scope")
    if scope not in list(Scope):
        raise entry.error(f"`scope` is one of {', '.join(Scope)}")
    key = ApiKey(
        key_id=entry.text("id", pattern=re.compile(r"[a-z0-9]{4,32}")),
        sha256=entry.text("sha256", pattern=re.compile(r"[0-9a-f]{64}")),
        tenant=entry.text("tenant", pattern=_TENANT),
        scope=Scope(scope),
        tier=entry.text("tier"),
        created_at=entry.time("created_at"),
        expires_at=entry.optional_time("expires_at"),
        signing_secret=entry.optional_text("signing_secret"),
    )
    entry.done()
    return key


def _read_secrets(entry: _Table) -> tuple[str, ...]:
    if not valid_tenant(entry.name):
        raise entry.error("not a tenant name")
    secrets = entry.texts("callback_secrets")
    for number, secret in enumerate(secrets, start=1):
        if not _is_callback_secret(secret):
            raise entry.error(f"callback secret {number} is not `whsec_` and 24 to 64 bytes in base64")
    entry.done()
    return tuple(secrets)


def _is_callback_secret(secret: str) -> bool:
    try:
        raw = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        return False
    return secret.startswith("whsec_") and len(raw) in _SECRET_BYTES


def _read_endpoint(entry: _Table) -> tuple[tuple[str, str], EndpointSettings]:
    place = (entry.text("tenant", pattern=_TENANT), entry.text("url"))
    settings = EndpointSettings(
        merge_window_ms=entry.number("merge_window_ms", 0, range(2_001)),
        merge_max_tasks=entry.number("merge_max_tasks", 100, range(1, 1_001)),
        concurrency=entry.optional_number("concurrency", range(1, 1_001)),
    )
    entry.done()
    return place, settings


def render_keys_file(content: KeysFile) -> str:
    """`keys.toml` as text; reading it back gives `content`."""
    lines = ["# Written by `reelgate keys`; comments are not kept. Callback secrets stand here in clear."]
    for key in content.keys:
        lines += ["", "[[keys]]", f"id = {_quoted(key.key_id)}", f"sha256 = {_quoted(key.sha256)}"]
        lines += [f"tenant = {_quoted(key.tenant)}", f"scope = {_quoted(key.scope)}", f"tier = {_quoted(key.tier)}"]
        lines += [f"created_at = {key.created_at.isoformat()}"]
        if key.expires_at is not None:
            lines.append(f"expires_at = {key.expires_at.isoformat()}")
        if key.signing_secret is not None:
            lines.append(f"signing_secret = {_quoted(key.signing_secret)}")
    for tenant, tenant_secrets in content.callback_secrets.items():
        listed = ", ".join(_quoted(secret) for secret in tenant_secrets)
        lines += ["", f"[tenants.{_quoted(tenant)}]", f"callback_secrets = [{listed}]"]
    for (tenant, url), endpoint in content.endpoints.items():
        lines += ["", "[[endpoints]]", f"tenant = {_quoted(tenant)}", f"url = {_quoted(url)}"]
        lines += [f"merge_window_ms = {endpoint.merge_window_ms}", f"merge_max_tasks = {endpoint.merge_max_tasks}"]
        if endpoint.concurrency is not None:
            lines.append(f"concurrency = {endpoint.concurrency}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(text).replace("\x7f", "\\u007f")
