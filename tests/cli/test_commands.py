"""Commands that need no stack: keys, versions, and errors before anything is asked."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import app
from tests.cli.stack import clean_environment, reelgate, reelgate_here
from workers.keys import KeyRing, Scope


@pytest.fixture
def no_gateway() -> Iterator[str]:
    """URL of a web server that is no gateway."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"<html>nothing here</html>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def run(*arguments: str) -> str:
    """Run a command in this process; its output."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_version_is_that_of_the_package() -> None:
    assert run("version") == f"{version('reelgate')}\n"


def test_the_exit_codes_are_in_the_help() -> None:
    assert "Exit codes: 0 done, 1 ended without a clip, 2 usage, 3 refused" in " ".join(run("--help").split())


def test_keys_are_made_listed_rotated_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    here = ("--file", str(file))
    made = run("keys", "create", "--tenant", "acme", "--scope", "service", "--signing", *here)
    token = next(word for word in made.split() if word.startswith("rg_"))
    assert any(word.startswith("whsec_") for word in made.split())
    assert "signing key" in made
    key = KeyRing(file).authenticate(token)
    assert key is not None
    assert key.scope is Scope.SERVICE

    rotated = run("keys", "rotate", key.key_id, "--overlap-hours", "0", *here)
    successor = next(word for word in rotated.split() if word.startswith("rg_"))
    assert KeyRing(file).authenticate(token) is None
    assert KeyRing(file).authenticate(successor) is not None

    secret = run("keys", "rotate", "--callback-secret", "acme", *here).split()[2]
    assert KeyRing(file).callback_secrets("acme")[0] == secret

    listed = run("keys", "list", *here)
    assert key.key_id in listed
    assert "ended" in listed
    assert token not in listed

    run("keys", "revoke", key.key_id, *here)
    assert key.key_id not in run("keys", "list", *here)


def test_wrong_usage_of_keys_ends_with_2_and_an_unknown_key_with_5(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    run("keys", "create", "--tenant", "acme", "--file", str(file))
    assert CliRunner().invoke(app, ["keys", "rotate", "--file", str(file)]).exit_code == 2
    gone = reelgate_here("keys", "revoke", "nosuchkey", "--file", str(file))
    assert gone.returncode == 5
    assert "nosuchkey" in gone.stderr


def test_without_a_key_it_is_said_where_keys_come_from(tmp_path: Path) -> None:
    done = reelgate_here("status", "t1", environment=clean_environment(REELGATE_DATA_DIR=str(tmp_path)))
    assert done.returncode == 5
    assert "REELGATE_API_KEY" in done.stderr


def test_a_dead_gateway_and_one_that_is_none_end_with_4(no_gateway: str) -> None:
    key = "rg_abcd_" + "x" * 43
    for url, run_command in (
        ("http://127.0.0.1:9", reelgate),
        (no_gateway, reelgate_here),
        ("http://[broken", reelgate_here),
    ):
        done = run_command("status", "t1", environment=clean_environment(REELGATE_API_KEY=key, REELGATE_URL=url))
        assert done.returncode == 4, done
        assert "REELGATE_URL" in done.stderr
        assert "Traceback" not in done.stderr
        assert key not in done.stderr


def test_an_image_that_is_not_there_is_named(tmp_path: Path) -> None:
    environment = clean_environment(REELGATE_API_KEY="rg_abcd_" + "x" * 43)
    done = reelgate_here("submit", "x", "--image", str(tmp_path / "none.png"), environment=environment)
    assert done.returncode == 5
    assert "none.png" in done.stderr


def test_a_port_that_is_taken_keeps_the_api_from_starting(no_gateway: str, tmp_path: Path) -> None:
    port = no_gateway.rpartition(":")[2]
    (tmp_path / "keys.toml").touch()
    done = reelgate("api", environment=clean_environment(REELGATE_PORT=port, REELGATE_DATA_DIR=str(tmp_path)))
    assert done.returncode == 5
    assert "REELGATE_PORT" in done.stderr
