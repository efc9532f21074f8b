"""What holds a secret does not show it: not in its `repr`, which ends in logs and tracebacks, and not as text."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import SecretStr

from api.cli_client import Access, AccessFile
from api.dev_stack import DevStack
from api.request_signing import RequestSignature, RequestSigner
from api.signature_check import SignatureCheck, SignedRequest
from workers.codec import CodecKey, EncryptionCodec, data_converter
from workers.keys import ApiKey, KeyRing, Scope
from workers.keys_admin import NewKey, create_key
from workers.keys_file import KeysFile
from workers.links import SignedLinks
from workers.settings import Settings

MARK = "marked-secret-0123456789-0123456789"
BYTES = b"marked-secret-of-exactly-32-byte"
KEY = ApiKey(
    key_id="abcd1234",
    tenant="acme",
    scope=Scope.USER,
    tier="standard",
    created_at=datetime.now(UTC),
    sha256=MARK,
    signing_secret=MARK,
)
SETTINGS = Settings(
    temporal_api_key=SecretStr(MARK),
    codec_keys=SecretStr(MARK),
    link_secret=SecretStr(MARK),
    codec_path_token=SecretStr(MARK),
    store_options={"secret_access_key": SecretStr(MARK)},
)
SIGNATURE = RequestSignature(key_id="abcd1234", timestamp=1, nonce="n" * 16, body_sha256=b"", signature=BYTES)
ACCESS_FILE = AccessFile(url="http://127.0.0.1", api_key=MARK)
CODEC = EncryptionCodec([CodecKey(key_id="k1", secret=BYTES)])


def _key_ring(folder: Path) -> tuple[KeyRing, str]:
    new = create_key(folder / "keys.toml", tenant="acme", signing=True)
    return KeyRing(folder / "keys.toml"), str(new.key.signing_secret)


@pytest.mark.parametrize(
    "holder",
    [
        KEY,
        NewKey(key=KEY, token=MARK, callback_secret=MARK),
        KeysFile(keys=(KEY,), callback_secrets={"acme": (MARK,)}),
        SETTINGS,
        CodecKey(key_id="k1", secret=BYTES),
        CODEC,
        data_converter(CODEC),
        SignedLinks("http://127.0.0.1", MARK),
        SIGNATURE,
        SignedRequest(key=KEY, signature=SIGNATURE),
        RequestSigner(f"abcd1234:{MARK}"),
        Access(url="http://127.0.0.1", api_key=MARK, signing_key=f"abcd1234:{MARK}"),
        ACCESS_FILE,
        DevStack(settings=SETTINGS, access=ACCESS_FILE, callback_secret=MARK, new_key=True),
    ],
    ids=lambda holder: type(holder).__name__,
)
@pytest.mark.parametrize("shown", [repr, str], ids=["repr", "str"])
def test_a_holder_of_secrets_shows_none(holder: object, shown: Callable[[object], str]) -> None:
    assert "marked-secret" not in shown(holder)


@pytest.mark.parametrize("shown", [repr, str], ids=["repr", "str"])
def test_neither_does_what_read_them_from_a_file(tmp_path: Path, shown: Callable[[object], str]) -> None:
    ring, secret = _key_ring(tmp_path)
    for holder in (ring, SignatureCheck(ring)):
        assert secret not in shown(holder)
