"""`reelgate dev` and the commands against it, as processes: the way a person meets Reelgate first."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.stack import Dev, processes_of, until

PROMPT = "a red circle moving right"
INTERRUPTED = ("submit", "a green square growing", "--num-inference-steps", "40")
"""A request whose worker is killed and whose stack is stopped before it is done."""


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One stack for the tests of this module; the last of them stops it."""
    folder = tmp_path_factory.mktemp("dev")
    # A profile of another server, that must not keep ours from starting.
    profile = folder / "temporal.toml"
    profile.write_text('[profile.default]\naddress = "other.example:7233"\napi_key = "of-another-server"\n')
    dev = Dev(folder)
    dev.environment["TEMPORAL_CONFIG_FILE"] = str(profile)
    dev.start()
    yield dev
    dev.kill()


@pytest.mark.durability
@pytest.mark.timeout(300)
class TestDev:
    """In the order of the file: the later tests kill and stop what the earlier ones use."""

    def test_secrets_are_readable_by_their_owner_only_and_the_key_is_shown(self, dev: Dev) -> None:
        for name in ("codec.keys", "link.secret", "keys.toml", "client.json"):
            assert stat.S_IMODE((dev.folder / name).stat().st_mode) == 0o600, name
        key = json.loads((dev.folder / "client.json").read_text())["api_key"]
        assert key in dev.output
        assert key not in (dev.folder / "keys.toml").read_text()
        assert (dev.folder / ".gitignore").read_text() == "*\n"

    def test_submit_and_wait_saves_a_playable_clip(self, dev: Dev, tmp_path: Path) -> None:
        clip = tmp_path / "clip.mp4"
        done = dev.run("submit", PROMPT, "--wait", "-o", str(clip), "--label", "first")
        assert done.returncode == 0, done
        assert "SUCCEEDED" in done.stdout
        assert str(clip) in done.stdout
        assert "/namespaces/default/workflows/t" in done.stdout
        body = clip.read_bytes()
        assert body[4:8] == b"ftyp"
        assert len(body) > 2_000
        assert list(tmp_path.iterdir()) == [clip], "no part file is left"

    def test_the_same_request_is_answered_by_the_task_that_exists(self, dev: Dev) -> None:
        again = dev.run("submit", PROMPT)
        assert again.returncode == 0
        assert "existed already: SUCCEEDED" in again.stderr

    def test_json_is_one_document_that_names_the_saved_file(self, dev: Dev, tmp_path: Path) -> None:
        clip = tmp_path / "clip.mp4"
        task = dev.json("submit", PROMPT, "-o", str(clip))
        assert (task["status"], task["saved"]) == ("SUCCEEDED", str(clip))
        assert clip.stat().st_size > 2_000

    def test_a_refused_request_prints_code_fields_and_rules_and_ends_with_3(self, dev: Dev) -> None:
        done = dev.run("submit", PROMPT, "--width", "7", "--num-inference-steps", "5000")
        assert done.returncode == 3
        assert "VALIDATION_FAILED" in done.stderr
        assert "  width (" in done.stderr
        assert "  num_inference_steps (" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""

    def test_an_unknown_task_ends_with_3_and_a_wrong_key_too(self, dev: Dev) -> None:
        done = dev.run("status", "tnosuchtask")
        assert done.returncode == 3
        assert "TASK_NOT_FOUND" in done.stderr
        dev.environment["REELGATE_API_KEY"] = "rg_abcd_" + "x" * 43
        try:
            refused = dev.run("models")
        finally:
            del dev.environment["REELGATE_API_KEY"]
        assert refused.returncode == 3
        assert "UNAUTHENTICATED" in refused.stderr

    def test_models_lists_the_built_in_ones(self, dev: Dev) -> None:
        done = dev.run("models")
        assert done.returncode == 0
        assert "moving-shapes (default)" in done.stdout
        assert "tiny-wan" in done.stdout

    def test_the_one_who_waits_for_a_task_that_is_canceled_hears_it_and_gets_1(self, dev: Dev) -> None:
        with dev.open("submit", "a blue star falling", "--num-inference-steps", "100", "--wait") as waiting:
            assert waiting.stdout is not None
            _, task_id, verb, *_ = waiting.stdout.readline().split()
            assert verb == "accepted:"
            canceled = dev.run("cancel", task_id, "--mode", "hard")
            shown, _ = waiting.communicate(timeout=60)
        assert canceled.returncode == 0
        assert waiting.returncode == 1
        assert "CANCELED" in shown

    def test_a_killed_worker_is_started_again(self, dev: Dev) -> None:
        task_id = str(dev.json(*INTERRUPTED)["task_id"])
        until(lambda: dev.task(task_id).status == "PROCESSING", seconds=120, what="the attempt starts")
        killed = dev.pid_of("gpu")
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until(lambda: dev.pid_of("gpu") not in (None, killed), seconds=20, what="another worker runs")
        assert "gpu | ended with signal SIGKILL; starting again" in dev.output

    def test_logs_are_json_files_with_transitions_and_without_prompts(self, dev: Dev) -> None:
        written = (dev.folder / "logs" / "control.log").read_text()
        transitions = [line for line in map(json.loads, written.splitlines()) if line["event"] == "task_transition"]
        assert {"task_id", "user_id", "status", "from_status", "attempt", "worker_id", "timestamp"} <= transitions[
            0
        ].keys()
        everything = "".join(file.read_text() for file in (dev.folder / "logs").iterdir())
        assert "circle" not in everything + dev.output.replace('Try: reelgate submit "a red circle moving right"', "")

    def test_a_second_dev_on_the_same_folder_or_ports_is_refused(self, dev: Dev, tmp_path: Path) -> None:
        same_folder = dev.run("dev", "--port", "0", "--temporal-port", "0", "--ui-port", "0")
        assert same_folder.returncode == 5
        assert "another `reelgate dev` uses" in same_folder.stderr
        address = json.loads((dev.folder / "client.json").read_text())["temporal_address"]
        port = address.rpartition(":")[2]
        other = str(tmp_path / "other")
        same_port = dev.run("dev", "--port", "0", "--temporal-port", port, "--ui-port", "0", "--data-dir", other)
        assert same_port.returncode == 5
        assert f"port {port} is taken by a Temporal server (version 1." in same_port.stderr

    def test_ctrl_c_leaves_no_process_and_after_a_restart_every_task_is_known_and_ends(self, dev: Dev) -> None:
        before = dev.json(*INTERRUPTED)
        key = json.loads((dev.folder / "client.json").read_text())["api_key"]
        assert processes_of(dev.folder)
        assert dev.stop(signal.SIGINT) == 0
        assert processes_of(dev.folder) == []
        assert dev.output.rstrip().endswith("stopped")
        unreachable = dev.run("status", str(before["task_id"]))
        assert unreachable.returncode == 4
        assert "REELGATE_URL" in unreachable.stderr

        dev.start()
        assert json.loads((dev.folder / "client.json").read_text())["api_key"] == key
        assert key not in dev.output
        until(lambda: dev.task(str(before["task_id"])).is_terminal, seconds=180, what="the task ends")
        after = dev.json("status", str(before["task_id"]))
        assert (after["status"], after["created_at"]) == ("SUCCEEDED", before["created_at"])
        assert dev.stop(signal.SIGTERM) == 0
        assert processes_of(dev.folder) == []
