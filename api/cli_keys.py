"""`reelgate keys`: API keys and callback secrets in `keys.toml`, on the machine that has the file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.table import Table

from api.cli_output import out
from workers.keys import Scope
from workers.keys_admin import NewKey, create_key, list_keys, revoke_key, rotate_callback_secret, rotate_key
from workers.settings import load_settings


def keys_file(file: Path | None) -> Path:
    """The file given, else the one of the settings."""
    return file or load_settings().keys_file


def create(file: Path | None, *, tenant: str, scope: Scope, tier: str, signing: bool) -> int:
    """Create a key and show it, this once."""
    _show(create_key(keys_file(file), tenant=tenant, scope=scope, tier=tier, signing=signing))
    return 0


def show(file: Path | None) -> int:
    """List all keys."""
    now = datetime.now(UTC)
    table = Table("id", "tenant", "scope", "tier", "created", "state", box=None)
    for key in list_keys(keys_file(file)):
        ends = (
            "live" if key.expires_at is None else f"{'until' if key.live(now) else 'ended'} {key.expires_at:%F %H:%M}"
        )
        table.add_row(key.key_id, key.tenant, key.scope, key.tier, f"{key.created_at:%F %H:%M}", ends)
    out.print(table)
    return 0


def revoke(file: Path | None, key_id: str) -> int:
    """Remove a key."""
    key = revoke_key(keys_file(file), key_id)
    out.print(
        f"key {key.key_id} of {key.tenant} is revoked; running processes refuse it within 5 seconds", markup=False
    )
    return 0


def rotate(file: Path | None, key_id: str, *, overlap: timedelta) -> int:
    """Make a successor of a key."""
    _show(rotate_key(keys_file(file), key_id, overlap=overlap))
    out.print(f"key {key_id} works for {overlap} more", markup=False)
    return 0


def rotate_secret(file: Path | None, tenant: str) -> int:
    """Make a new callback secret for a tenant."""
    out.print(f"callback secret  {rotate_callback_secret(keys_file(file), tenant)}", markup=False)
    out.print("Shown this once. The secret before it signs too, until the next rotation.")
    return 0


def _show(new: NewKey) -> None:
    out.print(f"API key          {new.token}", markup=False)
    if new.key.signing_secret is not None:
        out.print(f"signing key      {new.key.key_id}:{new.key.signing_secret}", markup=False)
    if new.callback_secret is not None:
        out.print(f"callback secret  {new.callback_secret}", markup=False)
    out.print(f"id {new.key.key_id}, tenant {new.key.tenant}, scope {new.key.scope}, tier {new.key.tier}", markup=False)
    out.print("Shown this once.")
