"""`reelgate callbacks`: what receivers were sent, sending it again, and trying a receiver out."""

# ruff: noqa: PLC0415 - each command imports its own world

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli_output import EXIT_NO_DELIVERY, err, out

if TYPE_CHECKING:
    from api.callback_schemas import CallbackDelivery, RedeliveryPage, TaskCallback
    from api.cli_client import Gateway

app = typer.Typer(help="Callbacks: attempts, redelivery, samples.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def moment(text: str) -> datetime:
    """A time: RFC 3339 (without an offset: UTC), or how long ago, e.g. `90m`, `2h`, `3d`."""
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS and number.isascii() and number.isdigit():
        return datetime.now(UTC) - timedelta(**{_UNITS[unit]: int(number)})
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a time like 2026-01-31T12:00:00Z nor an age like 2h") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


Since = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="TIME", help="Tasks that ended from then on: 2026-01-31T12:00:00Z, or 2h."),
]
Until = Annotated[datetime | None, typer.Option(parser=moment, metavar="TIME", help="And before then; default: now.")]


@app.command()
def show(task_id: str, as_json: AsJson = False) -> None:
    """Show the deliveries of a task: every attempt, and the body as it was sent."""
    from api.cli_tasks import gateway

    with gateway() as gate:
        found = gate.callback(task_id)
    _show(found, as_json=as_json)


@app.command()
def redeliver(
    *,
    task_id: Annotated[str | None, typer.Argument(help="One task; or a range by --since.")] = None,
    since: Since = None,
    until: Until = None,
    failed_only: Annotated[bool, typer.Option(help="Only callbacks that were given up.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether that is meant.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send the callback of a task again, or those of all tasks that ended in a time."""
    from api.cli_tasks import gateway

    if (task_id is None) == (since is None):
        raise typer.BadParameter("give a TASK_ID or --since TIME")
    with gateway() as gate:
        if task_id is not None:
            _show(gate.redeliver(task_id), as_json=as_json)
            return
        wanted = {
            "since": (since or datetime.now(UTC)).isoformat(),
            "until": (until or datetime.now(UTC)).isoformat(),
            "status": "failed" if failed_only else "all",
        }
        if not yes:
            planned = [item for page in _pages(gate, wanted, dry_run=True) for item in page.items]
            for item in planned:
                err.print(f"{item.task_id}  {item.status}  {item.action}", markup=False)
            if not planned:
                err.print("no callback in this time is to be sent")
                return
            typer.confirm(f"Send {len(planned)} callbacks?", abort=True, err=True)
        items = [item for page in _pages(gate, wanted, dry_run=False) for item in page.items]
    if as_json:
        out.print_json(data={"items": [item.model_dump(mode="json") for item in items]})
    else:
        out.print(f"{len(items)} callbacks are on their way", markup=False)


@app.command("test")
def send_sample(url: str, as_json: AsJson = False) -> None:
    """Send a signed sample to a URL, once, and show what came back. Exit code 1: it was not taken."""
    from api.cli_tasks import gateway
    from workflows.tasks import CallbackStatus

    with gateway() as gate:
        result = gate.test_callback(url)
    attempt = result.attempt
    if as_json:
        out.print_json(result.model_dump_json())
    else:
        answer = attempt.status_code or attempt.error_code
        out.print(f"{result.status}  {answer} after {attempt.duration_ms} ms", markup=False)
        if attempt.status_code and attempt.error_code:
            out.print(f"reason  {attempt.error_code}", markup=False)
        if attempt.reply:
            out.print(f"reply   {attempt.reply}", markup=False)
    raise typer.Exit(0 if result.status is CallbackStatus.SUCCEEDED else EXIT_NO_DELIVERY)


def _pages(gate: Gateway, wanted: Mapping[str, object], *, dry_run: bool) -> Iterator[RedeliveryPage]:
    cursor: str | None = None
    while True:
        page = gate.redeliver_range({**wanted, "dry_run": dry_run, **({"cursor": cursor} if cursor else {})})
        yield page
        cursor = page.next_cursor
        if cursor is None:
            return


def _show(found: TaskCallback, *, as_json: bool) -> None:
    if as_json:
        out.print_json(found.model_dump_json())
        return
    out.print(f"to      {found.url}", markup=False)
    _show_delivery("callback", found)
    for delivery in found.redeliveries:
        _show_delivery(f"redelivery {delivery.number}", delivery)
    if found.body is not None:
        out.print(f"body    {found.body}", markup=False)


def _show_delivery(name: str, delivery: CallbackDelivery) -> None:
    from rich.table import Table

    following = f", next attempt {delivery.next_attempt_at:%F %T}" if delivery.next_attempt_at else ""
    out.print(f"{name}: {delivery.status}{following}", markup=False)
    if not delivery.attempts:
        return
    table = Table("attempt", "at", "ms", "status", "reason", "reply", box=None)
    for attempt in delivery.attempts:
        table.add_row(
            str(attempt.number),
            f"{attempt.started_at:%F %T}",
            str(attempt.duration_ms),
            str(attempt.status_code or "-"),
            attempt.error_code or "",
            " ".join((attempt.reply or "").split())[:60],
        )
    out.print(table)
