"""`reelgate api` as a process: without a key it is reachable from this machine only."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.cli_run import check_keys_before_listening
from tests.cli.stack import clean_environment, reelgate
from workers.errors import ConfigurationError
from workers.keys_admin import create_key, revoke_key, rotate_key
from workers.settings import Settings

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is refused here


def settings(folder: Path, host: str) -> Settings:
    return Settings(data_dir=folder, host=host)


@pytest.mark.parametrize("host", [EVERYWHERE, "::", "192.0.2.1", "gateway.example"])
def test_without_a_key_it_does_not_listen_where_others_reach_it(tmp_path: Path, host: str) -> None:
    (tmp_path / "keys.toml").touch()
    with pytest.raises(ConfigurationError, match=r"REELGATE_HOST is .*keys\.toml \(REELGATE_KEYS_FILE\) has no live"):
        check_keys_before_listening(settings(tmp_path, host))
    key = create_key(tmp_path / "keys.toml", tenant="acme").key
    check_keys_before_listening(settings(tmp_path, host))
    rotate_key(tmp_path / "keys.toml", key.key_id)
    check_keys_before_listening(settings(tmp_path, host))


def test_keys_that_ended_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = create_key(file, tenant="acme").key
    revoke_key(file, key.key_id)
    with pytest.raises(ConfigurationError, match="keys create"):
        check_keys_before_listening(settings(tmp_path, EVERYWHERE))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_without_a_key_it_listens_on_loopback(tmp_path: Path, host: str) -> None:
    (tmp_path / "keys.toml").touch()
    check_keys_before_listening(settings(tmp_path, host))


@pytest.mark.parametrize(("host", "empty"), [(EVERYWHERE, True), ("127.0.0.1", False)])
def test_the_process_ends_with_5_and_one_message_before_it_listens(tmp_path: Path, host: str, empty: bool) -> None:
    if empty:
        (tmp_path / "keys.toml").touch()
    done = reelgate("api", environment=clean_environment(REELGATE_DATA_DIR=str(tmp_path), REELGATE_HOST=host))
    assert done.returncode == 5
    assert ("REELGATE_KEYS_FILE" if empty else "`reelgate keys create` makes it") in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert "api_starting" not in done.stdout
