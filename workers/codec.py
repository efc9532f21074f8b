"""Encryption of everything Temporal stores for us: inputs, results, memos, heartbeats, failures (AES-256-GCM).

Each payload names the key that encrypted it, so keys rotate without a pause: add the new key in front everywhere,
and drop the old one when the namespace's retention has passed. Payloads of another encoding pass through unchanged.
Errors name key ids, never what a payload holds.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from temporalio.api.common.v1 import Payload
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes, PayloadCodec

from workers.errors import ConfigurationError
from workers.payload_converter import ReelgatePayloadConverter
from workers.secret_files import SecretFileError, create_secret_file, read_secret_file
from workers.settings import Settings

ENCODING: Final = b"binary/encrypted"
KEY_ID_FIELD: Final = "encryption-key-id"

_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class CodecKeyError(ConfigurationError):
    """A payload key is missing, malformed or not the one that encrypted a payload."""


@dataclass(frozen=True, kw_only=True)
class CodecKey:
    """One AES-256 key and the id that payloads carry."""

    key_id: str
    secret: bytes = field(repr=False)


class EncryptionCodec(PayloadCodec):
    """Encrypts with the first key, decrypts with any of them."""

    def __init__(self, keys: Sequence[CodecKey]) -> None:
        if not keys:
            raise CodecKeyError("no payload keys: set REELGATE_CODEC_KEYS or REELGATE_CODEC_KEY_FILE")
        self._ciphers = {key.key_id: AESGCM(key.secret) for key in keys}
        if len(self._ciphers) != len(keys):
            raise CodecKeyError("two payload keys have the same id")
        self._write_id = keys[0].key_id

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of all keys, the writing one first."""
        return tuple(self._ciphers)

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Encrypt each payload whole, its metadata included."""
        return [self._encrypt(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Decrypt our payloads and hand back the others as they are.

        Raises:
            CodecKeyError: the key is not here, or it is not the one that encrypted the payload.
        """
        return [self._decrypt(p) if p.metadata.get("encoding") == ENCODING else p for p in payloads]

    def _encrypt(self, payload: Payload) -> Payload:
        key_id = self._write_id.encode("ascii")
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[self._write_id].encrypt(nonce, payload.SerializeToString(), key_id)
        return Payload(metadata={"encoding": ENCODING, KEY_ID_FIELD: key_id}, data=nonce + sealed)

    def _decrypt(self, payload: Payload) -> Payload:
        key_id = payload.metadata.get(KEY_ID_FIELD, b"").decode("ascii", errors="replace")
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise CodecKeyError(
                f"a payload was encrypted with key {key_id!r}; REELGATE_CODEC_KEYS has {', '.join(self.key_ids)}"
            )
        try:
            clear = cipher.decrypt(payload.data[:_NONCE_BYTES], payload.data[_NONCE_BYTES:], key_id.encode("ascii"))
        except (InvalidTag, ValueError) as error:
            # ValueError: too short to hold a nonce and a tag.
            raise CodecKeyError(f"a payload does not decrypt with key {key_id!r}: another key has its id") from error
        return Payload.FromString(clear)


def parse_keys(text: str, *, source: str) -> tuple[CodecKey, ...]:
    """Read `id:base64` entries separated by commas or line breaks; `#` starts a comment line.

    Args:
        text: the entries.
        source: setting or file named in errors.

    Raises:
        CodecKeyError: an entry is malformed; the message numbers it and shows nothing of it.
    """
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    entries = [entry.strip() for line in lines for entry in line.split(",") if entry.strip()]
    return tuple(_parse_key(entry, f"{source}, key {number}") for number, entry in enumerate(entries, start=1))


def _parse_key(entry: str, where: str) -> CodecKey:
    key_id, colon, encoded = entry.partition(":")
    if not colon or not _KEY_ID.fullmatch(key_id):
        raise CodecKeyError(f"{where}: expected `id:base64` with an id of letters, digits, `.`, `_` and `-`")
    try:
        secret = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise CodecKeyError(f"{where} ({key_id}): not base64") from None
    if len(secret) != _KEY_BYTES:
        raise CodecKeyError(f"{where} ({key_id}): {len(secret)} bytes, a key has {_KEY_BYTES}")
    return CodecKey(key_id=key_id, secret=secret)


def codec_from(settings: Settings) -> EncryptionCodec:
    """The codec with the keys of the setting, else of the key file.

    Raises:
        CodecKeyError: there is no key, or one is malformed.
    """
    if settings.codec_keys is not None:
        return EncryptionCodec(parse_keys(settings.codec_keys.get_secret_value(), source="REELGATE_CODEC_KEYS"))
    try:
        text = read_secret_file(settings.codec_key_file)
    except SecretFileError as error:
        raise CodecKeyError(f"{error}; set REELGATE_CODEC_KEYS or REELGATE_CODEC_KEY_FILE") from error
    return EncryptionCodec(parse_keys(text, source=str(settings.codec_key_file)))


def create_key_file(file: Path) -> None:
    """Create a key file with one fresh key, mode 0600, unless the file exists."""
    key_id = f"k{os.urandom(3).hex()}"
    create_secret_file(file, f"{key_id}:{base64.b64encode(os.urandom(_KEY_BYTES)).decode('ascii')}\n")


def data_converter(codec: PayloadCodec) -> DataConverter:
    """JSON behind `codec`, failure messages and stack traces included."""
    return replace(
        DataConverter.default,
        payload_converter_class=ReelgatePayloadConverter,
        payload_codec=codec,
        failure_converter_class=DefaultFailureConverterWithEncodedAttributes,
    )
