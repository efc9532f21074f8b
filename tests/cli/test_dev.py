"""`reelgate dev` and the commands against it, as processes: the way a person meets Reelgate first.

To start a stack costs more than all that is asked of one. So a single one is asked what a person sees, what it tells
those who watch it, and where clear text is and where it is not; then it is killed, stopped and started again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import stat
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from temporalio.api.common.v1 import Payload
from temporalio.client import Client

from api.cli_client import Access
from tests.api.stand import NO_TLS, http_client
from tests.browser.chromium import chromium, chromium_path
from tests.cli.stack import Dev, processes_of, until
from tests.deploy.expressions import ADDED_BY_PROMETHEUS, asked_for, documented, expressions
from tests.deploy.pages import Pages, until_counted
from tests.receiver import ReceivedRequest, Receiver
from workers.devserver import temporal_binary

PROMPT = "a red circle moving right, whispered-wish"
NEGATIVE_PROMPT = "unwanted-thing"
CALLBACK_TOKEN = "receivers-own-secret"
LINK_SECRET = "marked-link-secret-0123456789-0123456789"
CODEC_KEY = b64encode(b"marked-payload-key-of-32-bytes!!").decode()
WORDS = re.compile(r"whispered|red circle|unwanted|receivers-own|nobody|https?://")
"""Of clients: none of them leaves with a metric or a span."""

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TRACING_HEADERS = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01", "tracestate": "v=nobody"}
"""What a client that traces too sends with its request."""

EXPRESSIONS = expressions()
PROMTOOL = shutil.which("promtool")

pytestmark = [pytest.mark.durability, pytest.mark.timeout(300)]
"""In the order of the file: the later tests kill and stop what the earlier ones use."""


@dataclass(frozen=True, kw_only=True)
class FirstTask:
    """The one task that the stack had, when its metrics were read."""

    task_id: str
    callback_url: str
    callback: ReceivedRequest
    pages: Pages


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One stack for the tests of this module, with traces, secrets that are easy to find, and all that it can log."""
    folder = tmp_path_factory.mktemp("dev")
    # A profile of another server, that must not keep ours from starting.
    profile = folder / "temporal.toml"
    profile.write_text('[profile.default]\naddress = "other.example:7233"\napi_key = "of-another-server"\n')
    dev = Dev(folder)
    dev.environment |= {
        "TEMPORAL_CONFIG_FILE": str(profile),
        "REELGATE_LINK_SECRET": LINK_SECRET,
        "REELGATE_CODEC_KEYS": f"marked:{CODEC_KEY}",
        "REELGATE_LOG_LEVEL": "DEBUG",
        "REELGATE_TRACE_EXPORTER": "file",
    }
    try:
        dev.start()
        yield dev
    finally:
        dev.kill()


@pytest_asyncio.fixture(scope="module")
async def first(dev: Dev) -> FirstTask:
    """A request that was refused, and a task that was delivered."""
    access = Access.find(dev.environment)
    headers = {"Authorization": f"Bearer {access.api_key}", **TRACING_HEADERS}
    async with Receiver() as receiver, http_client(access.url, headers) as http:
        url = receiver.url_of(f"/hook?token={CALLBACK_TOKEN}")
        task = {"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT, "callback_url": url}
        assert (await http.post("/api/v1/tasks", json={"prompt": ""})).status_code == 422
        accepted = await http.post("/api/v1/tasks", json=task)
        assert accepted.status_code == 202
        (callback,) = await receiver.wait_for(1, timeout=180)
        pages = await until_counted(access)
    return FirstTask(task_id=accepted.json()["task_id"], callback_url=url, callback=callback, pages=pages)


@pytest.fixture(scope="module")
def pages(first: FirstTask) -> Pages:
    """The metrics after the first task."""
    return first.pages


class TestItsMetrics:
    def test_every_listed_series_is_there_with_its_type_and_labels_and_no_other(self, pages: Pages) -> None:
        found = {
            name + ("_total" if family.type == "counter" else ""): (
                family.type,
                frozenset(label for sample in family.samples for label in sample.labels if label != "le"),
            )
            for name, family in pages.families.items()
            if name.startswith("reelgate_")
        }
        assert found == documented()

    @pytest.mark.parametrize("place", EXPRESSIONS)
    def test_an_expression_asks_for_series_and_labels_that_exist(self, pages: Pages, place: str) -> None:
        there = pages.samples
        for name, labels in asked_for(EXPRESSIONS[place]):
            if name == "up":
                continue
            assert name in there
            # `process` of a joined series is checked where that series is selected.
            assert labels - ADDED_BY_PROMETHEUS - {"le"} <= there[name] | {"le"}, name

    def test_the_task_and_its_callback_are_counted_once_where_they_ended(self, pages: Pages) -> None:
        assert pages.value("control", "reelgate_tasks_ended_total", status="SUCCEEDED", error_code="") == 1
        assert (pages.value("control", "reelgate_gpu_seconds_total", outcome="useful") or 0) > 0.1
        assert pages.value("callback", "reelgate_callback_attempts_total", outcome="delivered", error="") == 1
        assert pages.value("callback", "reelgate_callback_delay_seconds_count", attempts="first") == 1
        assert (pages.value("callback", "reelgate_callback_delay_seconds_sum", attempts="first") or 60) < 30
        assert pages.value("callback", "reelgate_callback_breakers_open") == 0
        assert (pages.value("gpu", "reelgate_step_seconds_count", model="moving-shapes") or 0) > 1
        assert pages.value("gpu", "reelgate_device_attempts_total") == 1
        assert pages.value("gpu", "reelgate_device_state", state="READY") == 1
        assert pages.value("api", "reelgate_admissions_total", outcome="ADMITTED") == 1

    def test_requests_are_counted_by_route_template_and_status_class(self, pages: Pages) -> None:
        for status in ("2xx", "4xx"):
            labels = {"method": "POST", "route": "/api/v1/tasks", "status": status}
            assert pages.value("api", "reelgate_http_requests_total", **labels) == 1, status

    def test_the_queues_have_their_workers_and_what_the_api_needs_answers(self, pages: Pages) -> None:
        for queue in ("gpu-default", "callback", "control"):
            assert pages.value("api", "reelgate_queue_workers", queue=queue) == 1, queue
            assert pages.value("api", "reelgate_queue_backlog", queue=queue) == 0, queue
        assert pages.value("api", "reelgate_queue_live_slots", queue="gpu-default") == 2
        for name in ("temporal", "store"):
            assert pages.value("api", "reelgate_dependency_up", dependency=name) == 1, name

    def test_the_pages_of_workers_have_the_series_of_the_sdk_beside_their_own(self, pages: Pages) -> None:
        for kind in ("control", "callback", "gpu"):
            assert pages.value(kind, "temporal_num_pollers") is not None, kind
            assert pages.value(kind, "reelgate_build_info", process=kind) == 1, kind

    def test_no_page_holds_a_task_a_user_a_url_or_a_prompt(self, pages: Pages) -> None:
        for process, text in pages.texts.items():
            assert not re.search(r"t[a-z2-7]{26}|[0-9a-f]{32}|/hook", text), process
            assert not WORDS.search(text), process

    @pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; it comes with Prometheus")
    def test_promtool_reads_every_page_and_finds_no_series_of_ours_badly_named(self, pages: Pages) -> None:
        assert PROMTOOL is not None
        for process, text in pages.texts.items():
            checked = subprocess.run(
                [PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
            )
            ours = [line for line in checked.stderr.splitlines() if line.startswith("reelgate_")]
            assert (ours, "error while linting" in checked.stderr) == ([], False), process


@pytest.mark.usefixtures("first")
class TestDev:
    def test_secrets_are_readable_by_their_owner_only_and_the_key_is_shown(self, dev: Dev) -> None:
        for name in ("codec.keys", "link.secret", "keys.toml", "client.json"):
            assert stat.S_IMODE((dev.folder / name).stat().st_mode) == 0o600, name
        key = json.loads((dev.folder / "client.json").read_text())["api_key"]
        assert key in dev.output
        assert key not in (dev.folder / "keys.toml").read_text()
        assert (dev.folder / ".gitignore").read_text() == "*\n"

    def test_submit_and_wait_saves_a_playable_clip(self, dev: Dev, tmp_path: Path) -> None:
        clip = tmp_path / "clip.mp4"
        options = ("--wait", "-o", str(clip), "--label", "first", "--num-inference-steps", "10")
        done = dev.run("submit", "a yellow triangle moving left", *options)
        assert done.returncode == 0, done
        assert "SUCCEEDED" in done.stdout
        assert str(clip) in done.stdout
        assert "/namespaces/default/workflows/t" in done.stdout
        body = clip.read_bytes()
        assert body[4:8] == b"ftyp"
        assert len(body) > 2_000
        assert list(tmp_path.iterdir()) == [clip], "no part file is left"

    def test_the_same_request_is_answered_by_the_task_that_exists(self, dev: Dev, first: FirstTask) -> None:
        options = ("--negative-prompt", NEGATIVE_PROMPT, "--callback-url", first.callback_url)
        again = dev.run_here("submit", PROMPT, *options)
        assert again.returncode == 0
        assert f"{first.task_id} existed already: SUCCEEDED" in again.stderr

    def test_json_is_one_document_that_names_the_saved_file(self, dev: Dev, first: FirstTask, tmp_path: Path) -> None:
        clip = tmp_path / "clip.mp4"
        options = ("--negative-prompt", NEGATIVE_PROMPT, "--callback-url", first.callback_url)
        task = dev.json("submit", PROMPT, *options, "-o", str(clip))
        assert (task["task_id"], task["status"], task["saved"]) == (first.task_id, "SUCCEEDED", str(clip))
        assert clip.stat().st_size > 2_000

    def test_a_refused_request_prints_code_fields_and_rules_and_ends_with_3(self, dev: Dev) -> None:
        done = dev.run("submit", PROMPT, "--width", "7", "--num-inference-steps", "5000")
        assert done.returncode == 3
        assert "VALIDATION_FAILED" in done.stderr
        assert "  width (" in done.stderr
        assert "  num_inference_steps (" in done.stderr
        assert "whispered" not in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""

    def test_an_unknown_task_ends_with_3_and_a_wrong_key_too(self, dev: Dev) -> None:
        done = dev.run_here("status", "tnosuchtask")
        assert done.returncode == 3
        assert "TASK_NOT_FOUND" in done.stderr
        dev.environment["REELGATE_API_KEY"] = "rg_abcd_" + "x" * 43
        try:
            refused = dev.run_here("models")
        finally:
            del dev.environment["REELGATE_API_KEY"]
        assert refused.returncode == 3
        assert "UNAUTHENTICATED" in refused.stderr

    def test_models_lists_the_built_in_ones(self, dev: Dev) -> None:
        done = dev.run_here("models")
        assert done.returncode == 0
        assert "moving-shapes (default)" in done.stdout
        assert "tiny-wan" in done.stdout

    def test_the_one_who_waits_for_a_task_that_is_canceled_hears_it_and_gets_1(self, dev: Dev) -> None:
        with dev.open("submit", "a blue star falling", "--num-inference-steps", "100", "--wait") as waiting:
            assert waiting.stdout is not None
            _, task_id, verb, *_ = waiting.stdout.readline().split()
            assert verb == "accepted:"
            canceled = dev.run_here("cancel", task_id, "--mode", "hard")
            shown, _ = waiting.communicate(timeout=60)
        assert canceled.returncode == 0
        assert waiting.returncode == 1
        assert "CANCELED" in shown

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


class Site:
    """The stack as somebody sees it who looks for secrets."""

    def __init__(self, dev: Dev, task_id: str) -> None:
        self.dev = dev
        self.task_id = task_id
        access = json.loads((dev.folder / "client.json").read_text())
        self.api_key: str = access["api_key"]
        self.url: str = access["url"]
        self.web_ui: str = access["web_ui_url"]
        self.temporal: str = access["temporal_address"]
        with httpx.Client(verify=NO_TLS) as http:
            ui_settings = http.get(f"{self.web_ui}/api/v1/settings").json()
        self.codec_endpoint: str = ui_settings["Codec"]["Endpoint"]

    @property
    def codec_token(self) -> str:
        return self.codec_endpoint.rpartition("/")[2]

    def logs(self) -> str:
        """Everything that any process wrote, but for what `dev` shows a person at its first start."""
        files = [*(self.dev.folder / "logs").iterdir()]
        shown_once = ("API key", "callback secret", "Try: ")
        lines = [line for line in self.dev.output.splitlines() if not line.strip().startswith(shown_once)]
        return "\n".join([*(file.read_text() for file in files), *lines])

    def database(self) -> bytes:
        """The server's own files."""
        files = list(self.dev.folder.glob("temporal.db*"))
        assert files
        return b"".join(file.read_bytes() for file in files)

    @property
    def codec(self) -> tuple[str, str]:
        """The option of Temporal's own command that names the codec server."""
        return "--codec-endpoint", f"{self.url}/api/v1/codec"

    def temporal_cli(self, *more: str) -> subprocess.Popen[str]:
        """Temporal's own command, showing the task; both its outputs are one."""
        command = [temporal_binary(), "workflow", "show", "-w", self.task_id, "--address", self.temporal, "--detailed"]
        return subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    async def payloads(self) -> list[Payload]:
        """Every encrypted payload at the top of the events of the task's history, read without a key."""
        client = await Client.connect(self.temporal)
        history = await client.get_workflow_handle(self.task_id).fetch_history()
        started = history.events[0].workflow_execution_started_event_attributes
        return [*started.input.payloads, *started.memo.fields.values()]

    def secrets(self) -> dict[str, str]:
        """What must not be found, by what it is."""
        keys = (self.dev.folder / "keys.toml").read_text()
        return {
            "prompt": "whispered-wish",
            "negative prompt": NEGATIVE_PROMPT,
            "token of the callback's URL": CALLBACK_TOKEN,
            "link secret": LINK_SECRET,
            "payload key": CODEC_KEY,
            "API key": self.api_key,
            "callback secret": next(word.strip('[]",') for word in keys.split() if "whsec_" in word),
            "token of the codec server": self.codec_token,
        }


@pytest.fixture(scope="module")
def site(dev: Dev, first: FirstTask) -> Site:
    """The stack with its first task."""
    return Site(dev, first.task_id)


@pytest.fixture(scope="module")
def shown_without_key(site: Site) -> Iterator[subprocess.Popen[str]]:
    """Temporal's own command that is refused by the codec server: for ten seconds it does not believe it."""
    with site.temporal_cli(*site.codec) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("shown_without_key")
class TestWhereClearTextIs:
    def test_no_log_line_has_a_secret_and_transitions_are_told_in_json(self, site: Site) -> None:
        logs = site.logs()
        assert site.task_id in logs
        assert '"level": "debug"' in logs
        assert [what for what, text in site.secrets().items() if text in logs] == []
        assert not re.search("circle|triangle|star falling", logs)
        written = (site.dev.folder / "logs" / "control.log").read_text()
        transitions = [line for line in map(json.loads, written.splitlines()) if line["event"] == "task_transition"]
        assert {"task_id", "user_id", "status", "from_status", "attempt", "worker_id", "timestamp"} <= transitions[
            0
        ].keys()

    async def test_the_servers_own_database_has_neither_prompt_nor_secret(self, site: Site) -> None:
        client = await Client.connect(site.temporal)
        await client.start_workflow("Unencrypted", "written-in-clear", id="control", task_queue="nobody")
        await asyncio.sleep(0.5)
        database = site.database()
        assert site.task_id.encode() in database
        assert b"written-in-clear" in database, "this way of looking finds what is there"
        assert [what for what, text in site.secrets().items() if text.encode() in database] == []

    async def test_the_history_has_neither_prompt_nor_secret_without_the_key(self, site: Site) -> None:
        client = await Client.connect(site.temporal)
        for workflow_id in (site.task_id, f"callback-{site.task_id}"):
            history = (await client.get_workflow_handle(workflow_id).fetch_history()).to_json()
            assert site.task_id in history
            assert [what for what, text in site.secrets().items() if text in history] == []

    async def test_the_path_that_dev_gives_the_web_ui_decodes_for_the_web_ui_only(self, site: Site) -> None:
        body = {
            "payloads": [
                {
                    "metadata": {name: b64encode(value).decode() for name, value in payload.metadata.items()},
                    "data": b64encode(payload.data).decode(),
                }
                for payload in await site.payloads()
            ]
        }
        async with httpx.AsyncClient(verify=NO_TLS) as http:
            from_ui = await http.post(f"{site.codec_endpoint}/decode", json=body, headers={"Origin": site.web_ui})
            elsewhere = await http.post(
                f"{site.codec_endpoint}/decode", json=body, headers={"Origin": "http://evil.test"}
            )
            guessed = await http.post(f"{site.url}/api/v1/codec/{'x' * 43}/decode", json=body)
        assert from_ui.status_code == 200, from_ui.text
        assert from_ui.headers["access-control-allow-origin"] == site.web_ui
        clear = [b64decode(payload["data"]).decode() for payload in from_ui.json()["payloads"]]
        assert any(PROMPT in text for text in clear)
        assert (elsewhere.status_code, guessed.status_code) == (403, 404)

    @pytest.mark.skipif(chromium_path() is None, reason="no Chromium on this machine")
    async def test_the_web_ui_shows_the_prompt_in_clear(self, site: Site, tmp_path: Path) -> None:
        async with chromium(tmp_path / "profile") as browser, browser.tab() as page:
            await page.screen(width=1400, height=1000)
            await page.open(f"{site.web_ui}/namespaces/default/workflows/{site.task_id}")
            # The input, in a viewer that keeps only a part of its lines in the page.
            await page.until("document.body.innerText.includes('idempotency_key')", timeout=40)
            await page.evaluate("[...document.links].find(link => link.textContent.includes('User Metadata')).click()")
            # Summary and details, each drawn in a frame of its own.
            frames = "[...document.querySelectorAll('iframe')].map(frame => decodeURIComponent(frame.src))"
            await page.until(f"{frames}.some(source => source.includes({PROMPT!r}))")
            asked = {url.partition("?")[0] for url in page.requests if "/codec/" in url}
            assert asked == {f"{site.codec_endpoint}/decode"}
            assert "whispered-wish" not in site.logs(), "the page asks its server to draw it, by a URL"

    def test_the_temporal_cli_reads_with_an_operator_key_and_not_without(
        self, site: Site, shown_without_key: subprocess.Popen[str]
    ) -> None:
        def shown(*more: str) -> str:
            with site.temporal_cli(*more) as process:
                return process.communicate(timeout=30)[0]

        assert PROMPT in shown(*site.codec, "--codec-auth", f"Bearer {site.api_key}")
        assert PROMPT not in shown()
        without_key, _ = shown_without_key.communicate(timeout=60)
        assert without_key
        assert PROMPT not in without_key


@pytest.fixture(scope="module")
def interrupted(dev: Dev) -> Mapping[str, Any]:
    """A task whose worker is killed and whose stack is stopped before it is done."""
    return dev.json("submit", "a green square growing", "--num-inference-steps", "40")


class TestItsEnd:
    def test_a_killed_worker_is_started_again(self, dev: Dev, interrupted: Mapping[str, Any]) -> None:
        until(lambda: dev.task(interrupted["task_id"]).status == "PROCESSING", seconds=120, what="the attempt starts")
        killed = dev.pid_of("gpu")
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until(lambda: dev.pid_of("gpu") not in (None, killed), seconds=20, what="another worker runs")
        assert "gpu | ended with signal SIGKILL; starting again" in dev.output

    def test_ctrl_c_leaves_no_process(self, dev: Dev, interrupted: Mapping[str, Any]) -> None:
        assert processes_of(dev.folder)
        assert dev.stop(signal.SIGINT) == 0
        assert processes_of(dev.folder) == []
        assert dev.output.rstrip().endswith("stopped")
        unreachable = dev.run_here("status", str(interrupted["task_id"]))
        assert unreachable.returncode == 4
        assert "REELGATE_URL" in unreachable.stderr


@dataclass(frozen=True)
class Spans:
    """All spans, as they were exported."""

    all: list[Mapping[str, Any]]

    def of_the_client(self) -> list[Mapping[str, Any]]:
        """Those of the client's trace."""
        return [span for span in self.all if span["context"]["trace_id"] == f"0x{TRACE_ID}"]

    def named(self, name: str) -> Mapping[str, Any]:
        """The one span of this name in the client's trace."""
        (found,) = [span for span in self.of_the_client() if span["name"] == name]
        return found


@pytest.fixture(scope="module")
def spans(dev: Dev, first: FirstTask) -> Spans:
    """What was exported: when the processes ended, at the latest."""
    if dev.runs:
        dev.stop()
    lines = (dev.folder / "traces.jsonl").read_text().splitlines()
    return Spans([json.loads(line) for line in lines])


class TestItsTraces:
    def test_one_trace_leads_from_the_request_over_workflow_and_activities_to_the_callback(self, spans: Spans) -> None:
        # What a workflow does stands below what started it: its own span has no length.
        chain = [
            "POST /api/v1/tasks",
            "StartWorkflow:GenerationWorkflow",
            "StartActivity:generate_clip",
            "RunActivity:generate_clip",
        ]
        answered = [s for s in spans.of_the_client() if s["attributes"].get("http.response.status_code")]
        assert sorted(s["attributes"]["http.response.status_code"] for s in answered) == [202, 422]
        accepted = [s for s in answered if s["attributes"]["http.response.status_code"] == 202]
        assert [span["name"] for span in accepted] == chain[:1]
        assert accepted[0]["parent_id"] == f"0x{CLIENT_SPAN}"
        parent = accepted[0]
        for name in chain[1:]:
            span = spans.named(name)
            assert span["parent_id"] == parent["context"]["span_id"], name
            parent = span
        for name in (
            "RunWorkflow:GenerationWorkflow",
            "StartChildWorkflow:CallbackWorkflow",
            "RunActivity:deliver_callback",
            "POST callback",
        ):
            spans.named(name)
        sent, delivery = spans.named("POST callback"), spans.named("RunActivity:deliver_callback")
        assert sent["parent_id"] == delivery["context"]["span_id"]

    def test_the_receiver_is_told_of_the_trace(self, first: FirstTask, spans: Spans) -> None:
        sent = spans.named("POST callback")["context"]["span_id"].removeprefix("0x")
        assert first.callback.headers["traceparent"] == f"00-{TRACE_ID}-{sent}-01"
        assert not {"tracestate", "baggage"} & set(first.callback.headers)

    def test_spans_name_the_process_that_made_them_and_the_task(self, first: FirstTask, spans: Spans) -> None:
        services = {span["resource"]["attributes"]["service.name"] for span in spans.all}
        assert services == {"reelgate-api", "reelgate-control", "reelgate-callback", "reelgate-gpu"}
        for name in ("StartWorkflow:GenerationWorkflow", "RunActivity:generate_clip"):
            assert spans.named(name)["attributes"]["temporalWorkflowID"] == first.task_id

    def test_no_span_holds_a_prompt_a_url_or_what_an_error_said(self, spans: Spans) -> None:
        for span in spans.all:
            assert not WORDS.search(json.dumps(span)), span["name"]
            assert span["events"] == []
            assert "description" not in span["status"]

    def test_probes_and_scrapes_are_not_traced(self, spans: Spans) -> None:
        assert not [span for span in spans.all if re.search(r"/metrics|/readyz|/healthz", span["name"])]


class TestItsNextStart:
    def test_every_task_is_known_and_ends_and_no_secret_is_made_anew(
        self, dev: Dev, interrupted: Mapping[str, Any]
    ) -> None:
        if dev.runs:
            dev.stop()
        files = [dev.folder / name for name in ("codec.keys", "link.secret", "keys.toml")]
        made = [file.read_bytes() for file in files]
        key = json.loads((dev.folder / "client.json").read_text())["api_key"]
        dev.start()
        assert [file.read_bytes() for file in files] == made
        assert json.loads((dev.folder / "client.json").read_text())["api_key"] == key
        assert key not in dev.output
        task_id = interrupted["task_id"]
        until(lambda: dev.task(task_id).is_terminal, seconds=180, what="the task ends")
        after = dev.json("status", task_id)
        assert (after["status"], after["created_at"]) == ("SUCCEEDED", interrupted["created_at"])
        assert dev.stop(signal.SIGTERM) == 0
        assert processes_of(dev.folder) == []
