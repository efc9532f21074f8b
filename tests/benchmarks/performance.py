"""Run the benchmarks and write their figures into `docs/performance.md`.

`python -m tests.benchmarks.performance [NAME...]` runs all, or `attempts`, `callbacks`, `events`, `get`, `growth`,
`memory`, `submit`, `task`, `throughput`. What each last printed is kept in `docs/performance.json` with the commit and
the time; the tables of the page are made from it, between the two marks. Text outside of the marks is left alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "docs" / "performance.json"
BEGIN, END = "<!-- figures: made by tests.benchmarks.performance -->", "<!-- end of figures -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table of targets."""

    title: str
    bench: str
    figure: str
    unit: str = ""
    target: str
    """As text, since some depend on what was measured."""


TARGETS: Sequence[Row] = (
    Row(title="submit, idle, p50: user known", bench="submit", figure="warm_user_p50_ms", unit=" ms", target="≤ 40 ms"),
    Row(title="… against bare `describe` + `start`", bench="submit", figure="warm_ratio", unit="x", target="≤ 3x"),
    Row(
        title="submit, idle, p50: first task of a user",
        bench="submit",
        figure="first_task_p50_ms",
        unit=" ms",
        target="≤ 60 ms",
    ),
    Row(
        title="submissions at concurrency 16 against bare starts",
        bench="submit",
        figure="throughput_ratio",
        unit="x",
        target="≥ 0.5x",
    ),
    Row(
        title="task without GPU time, to its delivered callback, against a bare two-activity workflow",
        bench="throughput",
        figure="throughput_ratio",
        unit="x",
        target="≥ 0.5x",
    ),
    Row(
        title="terminal state → callback received, idle, p50",
        bench="throughput",
        figure="terminal_to_callback_p50_ms",
        unit=" ms",
        target="≤ 60 ms",
    ),
    Row(
        title="GET of an ended task against a constant FastAPI route",
        bench="get",
        figure="ratio",
        unit="x",
        target="≥ 0.8x",
    ),
    Row(
        title="device idle while tasks wait in its queue",
        bench="attempts",
        figure="gpu_idle_between_queued_tasks_share",
        target="≤ 0.02",
    ),
    Row(
        title="hard cancel → device works on the next task",
        bench="attempts",
        figure="hard_cancel_to_gpu_free_seconds",
        unit=" s",
        target="≤ one step + 2 s",
    ),
    Row(
        title="hung step (limit 2 s, grace 2 s) → killed",
        bench="attempts",
        figure="hang_to_killed_seconds",
        unit=" s",
        target="≤ 6 s",
    ),
    Row(
        title="GPU worker SIGKILLed → attempt runs elsewhere (heartbeat timeout 3 s)",
        bench="attempts",
        figure="worker_killed_to_running_elsewhere_seconds",
        unit=" s",
        target="≤ 5 s",
    ),
    Row(
        title="callback sender against a plain httpx client",
        bench="callbacks",
        figure="sender_ratio",
        unit="x",
        target="≥ 0.8x",
    ),
    Row(
        title="requests for 1,000 deliveries that meet in a window of 100",
        bench="callbacks",
        figure="merged_requests",
        target="≤ 11",
    ),
    Row(
        title="p95 of a healthy endpoint beside 1,000 tasks for a dead one, against alone",
        bench="callbacks",
        figure="healthy_beside_dead_ratio",
        unit="x",
        target="≤ 2x",
    ),
    Row(
        title="billable actions of a plain task, heartbeats apart",
        bench="throughput",
        figure="plain_billable_actions",
        target="≤ 14",
    ),
)


def run(bench: str) -> dict[str, float]:
    """Run one benchmark; its last line is its figures as JSON."""
    command = [sys.executable, "-m", f"tests.benchmarks.bench_{bench}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        last = ""
        for line in running.stdout:
            print(line, end="", flush=True)  # noqa: T201 - what the benchmark says is what people wait for
            last = line
    if running.returncode != 0:
        raise SystemExit(f"bench_{bench} ended with {running.returncode}")
    figures = json.loads(last)
    figures.pop("bench", None)
    return dict(figures)


def machine() -> str:
    """What the figures were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    cores = len([line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("processor")])
    server = subprocess.run(
        [Path(sys.executable).parent / "temporal", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return (
        f"{cores} cores ({model}), no GPU; Python {platform.python_version()}, SDK {version('temporalio')}, "
        f"torch {version('torch')}, {server}; every process on this one machine."
    )


def page(results: Mapping[str, Any]) -> str:
    """The generated part."""
    lines = [BEGIN, "", machine(), "", "| figure | measured | target | command |", "|---|---|---|---|"]
    for row in TARGETS:
        found = results.get(row.bench)
        measured = f"{found['figures'][row.figure]:g}{row.unit}" if found else "not measured"
        lines.append(f"| {row.title} | {measured} | {row.target} | `bench_{row.bench}` |")
    for bench, result in sorted(results.items()):
        lines += ["", f"### bench_{bench}", "", f"Commit {result['commit']}, {result['measured_at']}.", ""]
        lines += ["| figure | value |", "|---|---|"]
        lines += [f"| {name.replace('_', ' ')} | {value:g} |" for name, value in result["figures"].items()]
    return "\n".join([*lines, "", END])


def write(results: Mapping[str, Any]) -> None:
    """Put the figures into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + page(results) + rest.split(END)[1])


def main() -> None:
    """Run, keep, write."""
    benches = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*benches, []], help="which ones; all by default")
    names = parser.parse_args().names or benches
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        results[name] = {
            "commit": commit,
            "measured_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "figures": run(name),
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write(results)


if __name__ == "__main__":
    main()
