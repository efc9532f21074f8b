"""No setting shows its secret. Where clear text is in a running stack, and where not: `tests/cli/test_dev.py`."""

from __future__ import annotations

from base64 import b64encode

import pytest

from workers.settings import load_settings

LINK_SECRET = "marked-link-secret-0123456789-0123456789"
CODEC_KEY = b64encode(b"marked-payload-key-of-32-bytes!!").decode()
CODEC_TOKEN = "marked-codec-token-" + "x" * 43


def test_no_setting_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELGATE_LINK_SECRET", LINK_SECRET)
    monkeypatch.setenv("REELGATE_CODEC_KEYS", f"marked:{CODEC_KEY}")
    monkeypatch.setenv("REELGATE_STORE_OPTIONS", '{"secret_access_key": "marked-store-secret"}')
    monkeypatch.setenv("REELGATE_TEMPORAL_API_KEY", "marked-temporal-key")
    monkeypatch.setenv("REELGATE_CODEC_PATH_TOKEN", CODEC_TOKEN)
    settings = load_settings()
    assert settings.clear_store_options() == {"secret_access_key": "marked-store-secret"}
    for shown in (repr(settings), str(settings), settings.model_dump_json()):
        assert "marked-" not in shown
        assert CODEC_KEY not in shown
