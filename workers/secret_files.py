"""Small files with secrets in them: created once and written whole, readable by their owner only."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from workers.errors import ConfigurationError

_OWNER_ONLY: Final = 0o600


class SecretFileError(ConfigurationError):
    """A secret file is missing or unreadable; the message names the file."""


def read_secret_file(file: Path) -> str:
    """Text of a secret file.

    Raises:
        SecretFileError: it is missing, unreadable or empty.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SecretFileError(f"cannot read {file}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    if not text.strip():
        raise SecretFileError(f"{file} is empty")
    return text


def create_secret_file(file: Path, text: str) -> bool:
    """Create `file` with mode 0600 unless it exists; True when it was created.

    Two processes that start together agree on one content: the file appears whole or not at all.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = _write_draft(file, text)
    try:
        file.hardlink_to(draft)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def replace_secret_file(file: Path, text: str) -> None:
    """Write `file` whole with mode 0600: a reader sees the old content or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = _write_draft(file, text)
    draft.replace(file)


def _write_draft(file: Path, text: str) -> Path:
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY), "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    return draft
