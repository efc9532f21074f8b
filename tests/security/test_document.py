"""docs/security.md says what is so: its commands run, and its list of what is in clear is the whole list."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import app
from workers.codec import parse_keys
from workers.keys_admin import list_keys
from workers.settings import Settings
from workflows.naming import SEARCH_ATTRIBUTES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", DOCUMENT, re.DOTALL) for line in block.splitlines()]


def test_the_commands_for_keys_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.toml"
    monkeypatch.setenv("REELGATE_KEYS_FILE", str(file))
    ours = [shlex.split(line, comments=True)[1:] for line in COMMANDS if line.startswith("reelgate ")]
    assert len(ours) == 8
    for words in ours:
        key_id = list_keys(file)[0].key_id if file.exists() else ""
        done = CliRunner().invoke(app, [key_id if word == "KEY_ID" else word for word in words])
        assert done.exit_code == 0, (words, done.output)


def test_the_command_for_a_payload_key_makes_one() -> None:
    (command,) = (line for line in COMMANDS if line.startswith("printf "))
    made = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    (key,) = parse_keys(made, source="the document")
    assert len(key.secret) == 32


def test_every_search_attribute_is_listed_as_readable() -> None:
    (row,) = (line for line in DOCUMENT.splitlines() if "**search attributes**" in line)
    listed = re.findall(r"`(\w+)`", row.partition("(")[2].partition(")")[0])
    assert set(listed) == {key.name for key in SEARCH_ATTRIBUTES}


def test_every_variable_is_a_setting() -> None:
    named = set(re.findall(r"REELGATE_[A-Z_]*[A-Z]", DOCUMENT))
    of_the_command_line = {"REELGATE_URL", "REELGATE_API_KEY", "REELGATE_SIGNING_KEY"}
    assert named - of_the_command_line <= {f"REELGATE_{name.upper()}" for name in Settings.model_fields}
