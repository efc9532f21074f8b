"""Settings: environment, defaults and what they build."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from workers import settings as module
from workers.errors import ConfigurationError
from workers.settings import Settings, Tier, load_settings
from workflows.tasks import Limits


def test_defaults_are_those_of_the_limits_dataclass() -> None:
    assert Settings().limits() == Limits()


def test_every_limit_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for index, limit in enumerate(dataclasses.fields(Limits), start=1):
        monkeypatch.setenv(f"REELGATE_{limit.name.upper()}", str(index))
    assert dataclasses.astuple(Settings().limits()) == tuple(range(1, len(dataclasses.fields(Limits)) + 1))


def test_a_client_can_shorten_the_deadline_but_not_lengthen_it() -> None:
    assert Settings().limits(deadline_seconds=60).deadline_seconds == 60
    assert Settings().limits(deadline_seconds=99_999).deadline_seconds == 1_800


def test_files_follow_the_data_folder_unless_they_are_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REELGATE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("REELGATE_KEYS_FILE", "/run/secrets/keys.toml")
    settings = Settings()
    assert settings.codec_key_file == tmp_path / "codec.keys"
    assert settings.store_url == (tmp_path / "store").as_uri()
    assert settings.keys_file == Path("/run/secrets/keys.toml")


def test_the_safe_environment_is_the_default_and_loopback_receivers_are_for_development() -> None:
    assert not Settings().development
    assert Settings().callback_allowed_networks == ()
    assert Settings(environment="development").callback_allowed_networks == ("127.0.0.0/8", "::1/128")


def test_lists_are_written_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELGATE_DEVICES", "cuda:0, cuda:1,")
    assert Settings().devices == ("cuda:0", "cuda:1")


def test_the_standard_temporal_variables_count_where_ours_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "video")
    assert (Settings().temporal_address, Settings().namespace) == ("temporal.example:7233", "video")
    monkeypatch.setenv("REELGATE_NAMESPACE", "ours")
    assert Settings().namespace == "ours"


def test_a_wrong_value_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELGATE_PORT", "hunter2")
    with pytest.raises(ValidationError, match="port") as raised:
        Settings()
    assert "hunter2" not in str(raised.value)


def test_half_a_client_certificate_is_refused() -> None:
    with pytest.raises(ValidationError, match="belong together"):
        Settings(temporal_tls_cert_file=Path("cert.pem"))


def test_secrets_are_not_in_the_repr() -> None:
    settings = Settings.model_validate(
        {"link_secret": "hunter2" * 6, "store_options": {"secret_access_key": "hunter2"}, "codec_keys": "hunter2"}
    )
    assert "hunter2" not in repr(settings)
    assert settings.clear_store_options() == {"secret_access_key": "hunter2"}


def test_store_options_come_from_a_file_unless_they_are_set(tmp_path: Path) -> None:
    file = tmp_path / "store_options.json"
    file.write_text('{"secret_access_key": "hunter2"}\n')
    settings = Settings(store_options_file=file)
    assert settings.clear_store_options() == {"secret_access_key": "hunter2"}
    assert "hunter2" not in repr(settings)
    both = Settings.model_validate({"store_options_file": file, "store_options": {"region": "eu"}})
    assert both.clear_store_options() == {"region": "eu"}
    assert Settings().clear_store_options() == {}


@pytest.mark.parametrize("content", [None, "", "hunter2", '["hunter2"]', '{"secret_access_key": {"hunter2": 1}}'])
def test_a_file_of_store_options_that_is_missing_or_wrong_is_named_without_its_content(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "store_options.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"store_options\.json.*REELGATE_STORE_OPTIONS_FILE") as raised:
        Settings(store_options_file=file).clear_store_options()
    assert "hunter2" not in str(raised.value)


def test_tiers_come_as_json_and_the_standard_one_always_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELGATE_TIERS", '{"free": {"max_priority": "normal", "max_pending_tasks": 1}}')
    settings = Settings()
    assert settings.tier("free") == Tier.model_validate({"max_priority": "normal", "max_pending_tasks": 1})
    assert settings.tier("never-heard-of") == Tier()


def test_each_setting_is_documented() -> None:
    body = next(
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    ).body
    undocumented = [
        ast.unparse(node.target)
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert undocumented == []
    assert len(Settings.model_fields) > 50


@pytest.mark.parametrize(
    ("variable", "text", "complaint"),
    [
        ("TEMPORAL_PROFILE", "nosuch", "'nosuch' not found"),
        ("TEMPORAL_CONFIG_FILE", '[profile.default]\napi_key = "marked-secret\n', "line 2"),
    ],
)
def test_a_wrong_temporal_profile_is_said_without_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, text: str, complaint: str
) -> None:
    file = tmp_path / "temporal.toml"
    file.write_text(text)
    monkeypatch.setenv(variable, str(file) if variable == "TEMPORAL_CONFIG_FILE" else text)
    with pytest.raises(ConfigurationError, match=f"{variable}.*{complaint}") as raised:
        load_settings()
    assert "marked-secret" not in str(raised.value)
    assert raised.value.__cause__ is raised.value.__context__ is None, "nor where a traceback would show it"


@pytest.mark.parametrize("token", ["short", "x" * 40 + "/decode", "ä" * 40, "x" * 40 + "?"])
def test_a_path_token_is_long_and_one_part_of_a_path(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("REELGATE_CODEC_PATH_TOKEN", token)
    with pytest.raises(ConfigurationError, match="REELGATE_CODEC_PATH_TOKEN") as raised:
        load_settings()
    assert token not in str(raised.value)
