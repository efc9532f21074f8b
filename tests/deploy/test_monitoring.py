"""What a running stack tells: its metrics against alerts, dashboard and document, and its traces end to end."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import pytest_asyncio
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from api.cli_client import Access
from tests.api.stand import http_client
from tests.cli.stack import Dev
from tests.deploy.compose import ROOT, services
from tests.deploy.expressions import (
    ADDED_BY_PROMETHEUS,
    ALERTS,
    asked_for,
    documented,
    expressions,
    panels,
    rules,
)
from tests.receiver import ReceivedRequest, Receiver
from workers.devserver import free_port
from workers.metrics import process_registry, worker_page
from workers.settings import Settings

PROMTOOL = shutil.which("promtool")
CONFIG = ROOT / "deploy/prometheus/prometheus.yml"
PROMPT = "a red circle moving right, and nobody reads this"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
"""What a client that traces too sends with its request."""

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; it comes with Prometheus")


def promtool(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


@dataclass
class Pages:
    """The metrics pages of all processes of one stack that has made a clip and delivered a callback."""

    texts: Mapping[str, str]
    """By process: `api`, `control`, `callback`, `gpu`."""
    spans: Sequence[Mapping[str, Any]]
    """All spans, as they were exported."""
    callback: ReceivedRequest

    def families(self) -> dict[str, Metric]:
        """All families, by the name of their samples' common part."""
        return {family.name: family for text in self.texts.values() for family in text_string_to_metric_families(text)}

    def samples(self) -> dict[str, set[str]]:
        """Label names by name of the sample."""
        found: dict[str, set[str]] = {}
        for family in self.families().values():
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        return found

    def value(self, page: str, name: str, **labels: str) -> float | None:
        """A sample of a process."""
        return value_in(self.texts[page], name, **labels)

    def span(self, name: str) -> Mapping[str, Any]:
        """The one span of this name in the client's trace."""
        (found,) = [
            span for span in self.spans if span["name"] == name and span["context"]["trace_id"] == f"0x{TRACE_ID}"
        ]
        return found


def value_in(text: str, name: str, **labels: str) -> float | None:
    """A sample of a page."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


async def read_pages(access: Access) -> dict[str, str]:
    """Scrape the API and, where the workers say they are, their health ports."""
    assert access.api_key is not None
    async with http_client(headers={"Authorization": f"Bearer {access.api_key}"}) as http:
        texts = {"api": (await http.get(f"{access.url}/metrics")).raise_for_status().text}
        workers = (await http.get(f"{access.url}/api/v1/workers")).raise_for_status().json()["items"]
        for worker in workers:
            address = worker["identity"].rpartition(" health ")[2]
            page = await http.get(f"http://{address}/metrics")
            assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            texts[worker["kind"]] = page.raise_for_status().text
    return texts


@pytest_asyncio.fixture(scope="module")
async def pages(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pages]:
    """A stack with traces on, after one task that was delivered and one request that was refused."""
    dev = Dev(tmp_path_factory.mktemp("monitored"))
    dev.environment["REELGATE_TRACE_EXPORTER"] = "file"
    try:
        await asyncio.to_thread(dev.start)
        access = Access.find(dev.environment)
        headers = {"Authorization": f"Bearer {access.api_key}", "traceparent": TRACEPARENT, "tracestate": "v=nobody"}
        async with Receiver() as receiver, http_client(access.url, headers) as http:
            task = {"prompt": PROMPT, "callback_url": receiver.url}
            assert (await http.post("/api/v1/tasks", json={"prompt": ""})).status_code == 422
            assert (await http.post("/api/v1/tasks", json=task)).status_code == 202
            (callback,) = await receiver.wait_for(1, timeout=180)
            read = await until_counted(access)
        # Spans are exported when the processes end, at the latest.
        assert await asyncio.to_thread(dev.stop) == 0
        lines = (dev.folder / "traces.jsonl").read_text().splitlines()
        yield Pages(read, spans=[json.loads(line) for line in lines], callback=callback)
    finally:
        await asyncio.to_thread(dev.kill)


async def until_counted(access: Access) -> dict[str, str]:
    """The pages once the callback is counted, and the rates and the length of a task have come in."""
    async with asyncio.timeout(60):
        while True:
            texts = await read_pages(access)
            if (
                len(texts) == 4
                and value_in(texts["callback"], "reelgate_callbacks_ended_total", status="SUCCEEDED")
                and value_in(texts["api"], "reelgate_queue_drain_seconds", queue="gpu-default") is not None
            ):
                return texts
            await asyncio.sleep(0.3)


@pytest.mark.durability
@pytest.mark.timeout(300)
class TestARunningStack:
    def test_every_listed_series_is_there_with_its_type_and_labels_and_no_other(self, pages: Pages) -> None:
        found = {
            name + ("_total" if family.type == "counter" else ""): (
                family.type,
                frozenset(label for sample in family.samples for label in sample.labels if label != "le"),
            )
            for name, family in pages.families().items()
            if name.startswith("reelgate_")
        }
        assert found == documented()

    @pytest.mark.parametrize("place", expressions())
    def test_an_expression_asks_for_series_and_labels_that_exist(self, pages: Pages, place: str) -> None:
        there = pages.samples()
        for name, labels in asked_for(expressions()[place]):
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
            assert not re.search(r"t[a-z2-7]{26}|[0-9a-f]{32}|https?://|nobody|/callbacks\"", text), process

    @needs_promtool
    def test_promtool_reads_every_page_and_finds_no_series_of_ours_badly_named(self, pages: Pages) -> None:
        for process, text in pages.texts.items():
            checked = promtool("check", "metrics", stdin=text)
            ours = [line for line in checked.stderr.splitlines() if line.startswith("reelgate_")]
            assert (ours, "error while linting" in checked.stderr) == ([], False), process


@pytest.mark.durability
@pytest.mark.timeout(300)
class TestItsTraces:
    def test_one_trace_leads_from_the_request_over_workflow_and_activities_to_the_callback(self, pages: Pages) -> None:
        # What a workflow does stands below what started it: its own span has no length.
        chain = [
            "POST /api/v1/tasks",
            "StartWorkflow:GenerationWorkflow",
            "StartActivity:generate_clip",
            "RunActivity:generate_clip",
        ]
        accepted = [s for s in pages.spans if s["attributes"].get("http.response.status_code") == 202]
        assert [span["name"] for span in accepted] == chain[:1]
        assert accepted[0]["parent_id"] == f"0x{CLIENT_SPAN}"
        parent = accepted[0]
        for name in chain[1:]:
            span = pages.span(name)
            assert span["parent_id"] == parent["context"]["span_id"], name
            parent = span
        for name in (
            "RunWorkflow:GenerationWorkflow",
            "StartChildWorkflow:CallbackWorkflow",
            "RunActivity:deliver_callback",
            "POST callback",
        ):
            pages.span(name)
        assert (
            pages.span("POST callback")["parent_id"] == pages.span("RunActivity:deliver_callback")["context"]["span_id"]
        )

    def test_the_receiver_is_told_of_the_trace(self, pages: Pages) -> None:
        sent = pages.span("POST callback")["context"]["span_id"].removeprefix("0x")
        assert pages.callback.headers["traceparent"] == f"00-{TRACE_ID}-{sent}-01"
        assert not {"tracestate", "baggage"} & set(pages.callback.headers)

    def test_spans_name_the_process_that_made_them_and_the_task(self, pages: Pages) -> None:
        services = {span["resource"]["attributes"]["service.name"] for span in pages.spans}
        assert services == {"reelgate-api", "reelgate-control", "reelgate-callback", "reelgate-gpu"}
        task_id = pages.callback.json()["task_id"]
        for name in ("StartWorkflow:GenerationWorkflow", "RunActivity:generate_clip"):
            assert pages.span(name)["attributes"]["temporalWorkflowID"] == task_id

    def test_no_span_holds_a_prompt_a_url_or_what_an_error_said(self, pages: Pages) -> None:
        for span in pages.spans:
            assert not re.search(r"nobody|red circle|https?://", json.dumps(span)), span["name"]
            assert span["events"] == []
            assert "description" not in span["status"]

    def test_probes_and_scrapes_are_not_traced(self, pages: Pages) -> None:
        assert not [span for span in pages.spans if re.search(r"/metrics|/readyz|/healthz", span["name"])]


class TestTheFiles:
    @needs_promtool
    def test_prometheus_accepts_its_configuration_and_the_alerts(self) -> None:
        checked = promtool("check", "config", "--lint-fatal", CONFIG)
        assert checked.returncode == 0, checked.stdout + checked.stderr

    @needs_promtool
    def test_each_alert_is_raised_by_its_trouble_and_by_nothing_else(self) -> None:
        checked = promtool("test", "rules", ROOT / "tests/deploy/alerts_test.yml")
        assert checked.returncode == 0, checked.stdout + checked.stderr

    def test_each_alert_is_tested_with_healthy_series_and_with_its_trouble(self) -> None:
        healthy, troubled = yaml.safe_load((ROOT / "tests/deploy/alerts_test.yml").read_text())["tests"]
        names = sorted(rule["alert"] for rule in rules())
        assert sorted(test["alertname"] for test in healthy["alert_rule_test"]) == names
        raised = [sample["labels"] for sample in troubled["promql_expr_test"][0]["exp_samples"]]
        assert sorted(re.search(r'alertname="(\w+)"', labels)[1] for labels in raised) == names  # type: ignore[index]

    @pytest.mark.parametrize("place", expressions())
    def test_an_expression_parses(self, place: str) -> None:
        promql_parser.parse(expressions()[place])

    def test_the_thresholds_are_the_agreed_ones(self) -> None:
        expected = {
            "ReelgateQueueDrainsSlowly": "> 300",
            "ReelgateBacklogLarge": "> 1000",
            "ReelgateCallbackSuccessLow": "< 0.99",
            "ReelgateCallbacksLate": "> 5",
            "ReelgateProcessingSlow": "> 300",
        }
        found = {rule["alert"]: rule["expr"].strip() for rule in rules()}
        assert {name: text for name, text in expected.items() if not found[name].endswith(text)} == {}

    def test_each_alert_says_how_bad_it_is_what_it_means_and_is_in_the_document(self) -> None:
        described = (ROOT / "docs/observability.md").read_text()
        for rule in rules():
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert set(rule["annotations"]) == {"summary", "description"}
            assert f"`{rule['alert']}`" in described

    @pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
    def test_the_documents_name_series_and_alerts_that_exist(self, path: Path) -> None:
        text = path.read_text()
        series = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\breelgate_\w+\b", text)}
        assert series <= set(documented())
        assert set(re.findall(r"\bReelgate[A-Z]\w+", text)) <= {rule["alert"] for rule in rules()}

    def test_prometheus_reads_every_service_of_ours_in_the_compose_file(self) -> None:
        scraped = {
            name
            for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]
            for discovery in job.get("dns_sd_configs", [])
            for name in discovery["names"]
        }
        ours = {
            service.name
            for service in services().values()
            if service.ours and (service.reelgate_command() or [""])[0] in {"api", "worker"}
        }
        assert scraped == ours
        reached = set(services()["prometheus"].spec["networks"])
        for name in scraped:
            assert reached & set(services()[name].spec["networks"]), name
            if name != "api":
                assert services()[name].environment["REELGATE_WORKER_HEALTH_HOST"] == "0.0.0.0", name  # noqa: S104 - compared with

    def test_panels_have_titles_of_their_own_and_do_not_overlap(self) -> None:
        taken: set[tuple[int, int]] = set()
        for panel in panels():
            at = panel["gridPos"]
            cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
            assert not cells & taken, panel["title"]
            taken |= cells
        assert len({panel["id"] for panel in panels()}) == len(panels())


async def test_a_worker_whose_sdk_metrics_do_not_answer_still_shows_its_own(tmp_path: Path) -> None:
    registry = process_registry("control", Settings(data_dir=tmp_path))
    page = await worker_page(registry, f"127.0.0.1:{free_port()}")()
    assert b'reelgate_build_info{process="control"' in page
    assert b"temporal_" not in page


def test_the_rules_file_is_the_one_that_prometheus_is_told_to_read() -> None:
    assert yaml.safe_load(CONFIG.read_text())["rule_files"] == [ALERTS.name]
