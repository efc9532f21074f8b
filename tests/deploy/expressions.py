"""PromQL expressions of the alerts and of the dashboard, and the series and labels that they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from tests.deploy.compose import ROOT

ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana/reelgate.json"
DOCUMENT = ROOT / "docs/observability.md"

ADDED_BY_PROMETHEUS = frozenset({"instance", "job"})
"""Labels of every series that Prometheus has read."""

_CHILDREN = ("lhs", "rhs", "expr", "param", "vector_selector")
_TABLE_ROW = re.compile(r"^\| `(reelgate_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def rules() -> list[dict[str, Any]]:
    """All alerts."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard that show something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Every expression, by where it is."""
    alerts = {f"alert {rule['alert']}": str(rule["expr"]) for rule in rules()}
    shown = {
        f"panel {panel['title']} {target['refId']}": str(target["expr"]).replace("$__rate_interval", "5m")
        for panel in panels()
        for target in panel["targets"]
    }
    return alerts | shown


def asked_for(expression: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The series that an expression selects, each with the labels that the expression expects it to have."""
    for node, labels in _walk(promql_parser.parse(expression), frozenset()):
        if isinstance(node, promql_parser.VectorSelector):
            yield str(node.name), labels | {matcher.name for matcher in node.matchers.matchers}


def _walk(node: Any, labels: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:  # noqa: ANN401 - a parser's own types
    yield node, labels
    modifier = getattr(node, "modifier", None)
    labels |= set(getattr(modifier, "labels", None) or ())
    children = [getattr(node, name, None) for name in _CHILDREN] + list(getattr(node, "args", None) or ())
    for child in children:
        if child is not None:
            yield from _walk(child, labels)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of every series that the document lists."""
    rows = _TABLE_ROW.findall(Path(DOCUMENT).read_text())
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
