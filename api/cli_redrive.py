"""`reelgate redrive`: run dead letters again, in batches, a dry run unless told otherwise."""

# ruff: noqa: PLC0415 - each command imports its own world

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from api.cli_callbacks import Since, Until
from api.cli_output import EXIT_REFUSED, CommandError, err, out

if TYPE_CHECKING:
    from api.cli_client import Gateway
    from api.redrive_schemas import RedriveItem, RedrivePage

BATCH: Final = 50


def redrive(
    *,
    query: Annotated[
        str, typer.Option(help="Temporal visibility query, e.g. \"ErrorCode = 'STORAGE_UNAVAILABLE'\"; default: all.")
    ] = "",
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Tasks to start at most, in batches of 50.")] = BATCH,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Error code to run again although its class is final; may be repeated."),
    ] = None,
    again: Annotated[bool, typer.Option(help="Also what a redrive started and failed again.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Start them; without it, only say what would be done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Run tasks again that ended without a clip; for operators. Running it twice starts nothing twice."""
    from api.cli_tasks import gateway

    wanted: dict[str, object] = {"query": query, "also": also or [], "again": again, "dry_run": not yes}
    wanted |= {name: _rfc3339(moment) for name, moment in (("since", since), ("until", until)) if moment is not None}
    done: dict[str, RedriveItem] = {}
    with gateway() as gate:
        for number, page in enumerate(_batches(gate, wanted, limit, done), start=1):
            _keep(done, page.items)
            if not as_json:
                _show(number, page)
            if page.stopped is None:
                continue
            if page.stopped.code == "NO_WORKER":
                raise CommandError(page.stopped.detail, EXIT_REFUSED)
            err.print(f"{page.stopped.detail} Going on in {page.stopped.retry_after_seconds} s.", markup=False)
            time.sleep(page.stopped.retry_after_seconds)
    _report(done, dry_run=not yes, as_json=as_json)


def _batches(
    gate: Gateway, wanted: dict[str, object], limit: int, done: dict[str, RedriveItem]
) -> Iterator[RedrivePage]:
    """Pages until nothing is left or enough are started; a page that was stopped comes again."""
    cursor: str | None = None
    while (left := limit - _started(done.values())) > 0:
        asked = {**wanted, "limit": min(BATCH, left), **({"cursor": cursor} if cursor else {})}
        page = gate.redrive(asked)
        yield page
        if page.stopped is None:
            cursor = page.next_cursor
            if cursor is None:
                return


def _keep(done: dict[str, RedriveItem], items: Iterable[RedriveItem]) -> None:
    """What became of each task; one that this run started reads as retried when its page comes again."""
    for item in items:
        if item.task_id not in done or done[item.task_id].action != "start":
            done[item.task_id] = item


def _started(items: Iterable[RedriveItem]) -> int:
    return sum(item.action == "start" for item in items)


def _show(number: int, page: RedrivePage) -> None:
    for item in page.items:
        what = f"-> {item.new_task_id}" if item.action == "start" else f"skipped: {item.reason}"
        after = f" (by {item.new_task_id})" if item.action == "skip" and item.new_task_id else ""
        out.print(f"{item.task_id}  {item.status or '-':<8}  {item.error_code or '-'}  {what}{after}", markup=False)
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(page.counts.skipped.items()))
    verb = "would be started" if page.dry_run else "started"
    err.print(
        f"batch {number}: {page.counts.started} {verb}; skipped: {skipped or 'none'}; {page.matching} match in all",
        markup=False,
    )


def _report(done: dict[str, RedriveItem], *, dry_run: bool, as_json: bool) -> None:
    items = list(done.values())
    started = _started(items)
    if as_json:
        skipped = Counter(str(item.reason) for item in items if item.reason is not None)
        document = {
            "dry_run": dry_run,
            "started": started,
            "skipped": dict(skipped),
            "items": [item.model_dump(mode="json") for item in items],
        }
        out.print_json(data=document)
    elif dry_run:
        err.print(f"dry run: {started} of {len(items)} tasks would be started; --yes starts them", markup=False)
    else:
        err.print(f"{started} of {len(items)} tasks started", markup=False)


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat()
