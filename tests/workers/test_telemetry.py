"""Log lines: fields whoever wrote the record, and no prompt."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog
from temporalio.client import Client

from tests.workers.workflows import LoggingWorkflow, worker_for
from workers.settings import Settings
from workers.telemetry import configure_logging

PROMPT = "a red circle moving right"


@pytest.fixture
def _logging() -> Iterator[None]:
    """Put logging back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("_logging")
class TestJsonLines:
    async def test_a_transition_logged_by_a_workflow_is_one_line_of_fields(
        self, client: Client, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configure_logging(Settings(), process="control")
        async with worker_for(client, LoggingWorkflow) as queue:
            await client.execute_workflow(LoggingWorkflow.run, "t1", id=f"log-{queue}", task_queue=queue)
        (line,) = [line for line in _lines(capsys) if str(line["event"]).startswith("task_transition")]
        assert line.pop("timestamp")
        assert line == {
            "event": "task_transition",
            "level": "info",
            "logger": "temporalio.workflow",
            "process": "control",
            "workflow_id": f"log-{queue}",
            "workflow_type": "LoggingWorkflow",
            "task_id": "t1",
            "user_id": "u1",
            "status": "PROCESSING",
            "from_status": "QUEUED",
            "attempt": 2,
            "worker_id": "host/cpu:0",
            "prompt": "[redacted]",
        }

    def test_our_own_lines_and_those_of_libraries_look_alike(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure_logging(Settings(), process="api")
        structlog.stdlib.get_logger("ours").info("task_accepted", task_id="t1", authorization="Bearer x")
        logging.getLogger("uvicorn.error").warning(
            "Started server on %s", "8080", extra={"task_id": "t1", "body": PROMPT}
        )
        ours, theirs = _lines(capsys)
        assert (ours["event"], ours["task_id"], ours["authorization"]) == ("task_accepted", "t1", "[redacted]")
        assert (theirs["event"], theirs["task_id"], theirs["body"]) == ("Started server on 8080", "t1", "[redacted]")
        assert ours.keys() - {"authorization"} == theirs.keys() - {"body"}

    def test_a_traceback_stays_on_its_line_and_shows_no_local_variable(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configure_logging(Settings(), process="api")
        self._fail(PROMPT)
        (line,) = _lines(capsys)
        assert "ZeroDivisionError" in str(line["exception"])
        assert PROMPT not in json.dumps(line)

    def test_text_for_a_terminal_shows_no_local_variable_either(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure_logging(Settings(log_format="console"), process="api")
        self._fail(PROMPT)
        shown = capsys.readouterr().out
        assert "ZeroDivisionError" in shown
        assert PROMPT not in shown

    def test_the_level_is_a_setting_and_chatty_libraries_stay_quiet(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure_logging(Settings(log_level="INFO"), process="api")
        logging.getLogger("httpx").info("HTTP Request: GET https://x.example/?secret=1")
        structlog.stdlib.get_logger("ours").debug("detail")
        assert _lines(capsys) == []
        configure_logging(Settings(log_level="ERROR"), process="api")
        structlog.stdlib.get_logger("ours").warning("warned")
        assert _lines(capsys) == []

    @staticmethod
    def _fail(prompt: str) -> None:
        try:
            _ = 1 / (len(prompt) - len(prompt))
        except ZeroDivisionError:
            structlog.stdlib.get_logger("ours").exception("failed")


def test_a_warning_of_the_sdk_core_is_a_json_line_too() -> None:
    program = (
        "import asyncio, datetime\n"
        "from workers.connection import process_runtime\n"
        "from workers.settings import Settings\n"
        "from workers.telemetry import configure_logging\n"
        "from temporalio.client import Client\n"
        "from temporalio.service import RetryConfig\n"
        "configure_logging(Settings(), process='api')\n"
        "runtime = process_runtime(datetime.timedelta(seconds=5), None)\n"
        "async def main():\n"
        "    client = await Client.connect('127.0.0.1:9', lazy=True, runtime=runtime)\n"
        "    try:\n"
        "        await client.count_workflows(rpc_timeout=datetime.timedelta(seconds=1))\n"
        "    except Exception as error:\n"
        "        pass\n"
        "    await asyncio.sleep(0.3)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ, check=False
    )
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        assert json.loads(line)["process"] == "api"
