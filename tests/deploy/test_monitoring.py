"""Alerts, dashboard, configuration of Prometheus and document agree.

What a running stack tells is held against them in `tests/cli/test_dev.py`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.deploy.compose import ROOT, services
from tests.deploy.expressions import (
    ALERTS,
    documented,
    expressions,
    panels,
    rules,
)
from workers.devserver import free_port
from workers.metrics import process_registry, worker_page
from workers.settings import Settings

PROMTOOL = shutil.which("promtool")
CONFIG = ROOT / "deploy/prometheus/prometheus.yml"

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; it comes with Prometheus")


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


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
