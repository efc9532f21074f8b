"""`reelgate callbacks`: what receivers were sent, sending it again, and trying a receiver out."""

# ruff: noqa: PLC0415 - each command imports its own world

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli_output import EXIT_NO_DELIVERY, err, out

if TYPE_CHECKING:
    from api.callback_schemas import CallbackDelivery, RedeliveryItem, RedeliveryPage, TaskCallback
    from api.cli_client import Gateway

app = typer.Typer(help="Callbacks: attempts, redelivery, samples.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
EndedId = Annotated[str, typer.Argument(metavar="ID", help="A task or a batch.")]
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
    typer.Option(parser=moment, metavar="TIME", help="What ended from then on: 2026-01-31T12:00:00Z, or 2h."),
]
Until = Annotated[datetime | None, typer.Option(parser=moment, metavar="TIME", help="And before then; default: now.")]


@app.command()
def show(of: EndedId, as_json: AsJson = False) -> None:
    """Show the deliveries of a task or batch: every attempt, and the body as it was sent."""
    from api.cli_tasks import gateway

    with gateway() as gate:
        found = gate.callback(of)
    _show(found, as_json=as_json)


@app.command()
def redeliver(
    *,
    of: Annotated[str | None, typer.Argument(metavar="ID", help="One task or batch; or a range by --since.")] = None,
    since: Since = None,
    until: Until = None,
    failed_only: Annotated[bool, typer.Option(help="Only callbacks that were given up.")] = False,
    delivered_too: Annotated[bool, typer.Option("--all", help="Those that were taken, too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether that is meant.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send the callback of a task or batch again, or those of all that ended in a time."""
    from api.cli_tasks import gateway

    if (of is None) == (since is None):
        raise typer.BadParameter("give the ID of a task or batch, or --since TIME")
    with gateway() as gate:
        if of is not None:
            _show(gate.redeliver(of), as_json=as_json)
            return
        wanted = {
            "since": (since or datetime.now(UTC)).isoformat(),
            "until": (until or datetime.now(UTC)).isoformat(),
            "status": "failed" if failed_only else "all" if delivered_too else "undelivered",
        }
        if not yes:
            planned = [item for page in _pages(gate, wanted, dry_run=True) for item in page.items]
            if as_json:
                _print_items(planned, dry_run=True)
                return
            for item in planned:
                err.print(f"{item.task_id or item.batch_id}  {item.status}  {item.action}", markup=False)
            if not planned:
                err.print("no callback in this time is to be sent")
                return
            typer.confirm(f"Send {len(planned)} callbacks?", abort=True, err=True)
        items = [item for page in _pages(gate, wanted, dry_run=False) for item in page.items]
    if as_json:
        _print_items(items, dry_run=False)
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


def _print_items(items: Iterable[RedeliveryItem], *, dry_run: bool) -> None:
    out.print_json(data={"dry_run": dry_run, "items": [item.model_dump(mode="json") for item in items]})


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
