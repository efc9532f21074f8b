"""`reelgate batch`: many clips from a file of requests."""

# ruff: noqa: PLC0415 - each command imports its own world

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from api.batch_files import ItemsFileError, ItemsFormat, format_of, read_items
from api.cli_output import EXIT_CONFIGURATION, EXIT_NO_CLIP, CommandError, err, out
from workflows.states import ENDED, TaskStatus
from workflows.tasks import CancelMode

if TYPE_CHECKING:
    from api.batch_schemas import Batch
    from api.cli_client import Gateway

app = typer.Typer(help="Batches: many clips from a file, each a task of its own.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the batch to its end; exit code 1 if a clip is missing.")]
_STANDARD_INPUT: Final = Path("-")


@app.command()
def submit(
    *,
    file: Annotated[
        Path, typer.Argument(help="JSON Lines, or CSV (*.csv) with the fields as header; `-`: standard input.")
    ],
    written_as: Annotated[
        ItemsFormat | None, typer.Option("--format", help="Default: by the name of the file.")
    ] = None,
    skip_invalid: Annotated[bool, typer.Option(help="Leave items out that break rules.")] = False,
    callback_url: Annotated[str | None, typer.Option(help="Gets one call when every item has ended.")] = None,
    deadline_seconds: Annotated[float | None, typer.Option(help="The rest is canceled then.")] = None,
    idempotency_key: Annotated[str | None, typer.Option()] = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Submit a batch. Submitted again after its end, only the items without a clip run again."""
    from api.cli_tasks import gateway

    fields: dict[str, object] = {"items": _items(file, written_as)}
    if skip_invalid:
        fields["on_invalid"] = "skip"
    if callback_url is not None:
        fields["callback_url"] = callback_url
    if deadline_seconds is not None:
        fields["deadline_seconds"] = deadline_seconds
    with gateway() as gate:
        batch, existed = gate.submit_batch(fields, idempotency_key=idempotency_key)
        if not as_json:
            err.print(f"batch [bold]{batch.batch_id}[/bold] {'existed already' if existed else 'accepted'}")
        if wait:
            batch = _follow(gate, batch, quiet=as_json)
    _finish(batch, wait=wait, as_json=as_json)


@app.command()
def status(batch_id: str, wait: Wait = False, as_json: AsJson = False) -> None:
    """Show a batch."""
    from api.cli_tasks import gateway

    with gateway() as gate:
        batch, _ = gate.batch(batch_id)
        if wait:
            batch = _follow(gate, batch, quiet=as_json)
    _finish(batch, wait=wait, as_json=as_json)


@app.command()
def cancel(
    batch_id: str,
    mode: Annotated[CancelMode, typer.Option(help="soft: running clips are still made and kept; hard: stop them.")] = (
        CancelMode.SOFT
    ),
    as_json: AsJson = False,
) -> None:
    """Cancel the rest of a batch."""
    from api.cli_tasks import gateway

    with gateway() as gate:
        batch = gate.cancel_batch(batch_id, mode)
    _show(batch, as_json=as_json)


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=100, help="Batches on a page.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="From the page before.")] = None,
    as_json: AsJson = False,
) -> None:
    """List your batches: open ones by newest start, then ended ones by newest end."""
    from rich.table import Column, Table

    from api.cli_tasks import gateway

    with gateway() as gate:
        found = gate.batches({"limit": str(limit), **({"cursor": cursor} if cursor else {})})
    if as_json:
        out.print_json(found.model_dump_json())
        return
    batch_id = Column("batch", no_wrap=True, min_width=27)
    table = Table(batch_id, "status", "ended", "clips", "items", Column("created", no_wrap=True), box=None)
    for batch in found.items:
        table.add_row(
            batch.batch_id,
            batch.status,
            str(sum(batch.counts[state] for state in ENDED)),
            str(batch.counts[TaskStatus.SUCCEEDED]),
            str(sum(batch.counts.values())),
            f"{batch.created_at:%m-%d %T}",
        )
    out.print(table)
    if found.next_cursor is not None:
        out.print(f"more: --cursor {found.next_cursor}", markup=False)


@app.command()
def delete(
    batch_id: str, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether that is meant.")] = False
) -> None:
    """Delete a batch for good, with every task that it started and their clips."""
    import time

    from api.cli_tasks import gateway

    if not yes:
        typer.confirm(f"Delete {batch_id} with all its tasks and clips, for good?", abort=True)
    with gateway() as gate:
        while not gate.delete_batch(batch_id):
            time.sleep(1)
    out.print(f"deleted {batch_id}", markup=False)


def _items(file: Path, written_as: ItemsFormat | None) -> list[dict[str, object]]:
    """The items of a file; images that are named by path are read.

    Raises:
        CommandError: the file, or an image, cannot be read.
    """
    from api.cli_tasks import image_field

    try:
        body = sys.stdin.buffer.read() if file == _STANDARD_INPUT else file.read_bytes()
        items = read_items(body.decode("utf-8-sig"), written_as or format_of(file))
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}", EXIT_CONFIGURATION) from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{file} is not UTF-8", EXIT_CONFIGURATION) from error
    except ItemsFileError as error:
        raise CommandError(f"{file}: {error}", EXIT_CONFIGURATION) from error
    for item in items:
        image = item.get("image")
        if isinstance(image, str) and not image.lower().startswith(("data:", "http:", "https:")):
            item["image"] = image_field(file.parent / image)
    return items


def _follow(gate: Gateway, batch: Batch, *, quiet: bool) -> Batch:
    """Poll a batch until it has ended, with a progress bar on stderr."""
    import time

    from api.cli_follow import EAGER_INTERVAL, EAGER_SECONDS, patiently, progress_bar

    began = time.monotonic()
    with progress_bar(quiet=quiet) as progress:
        accepted = sum(batch.counts.values())
        bar = progress.add_task("", total=max(1, accepted))
        while True:
            done = sum(batch.counts[state] for state in ENDED)
            progress.update(bar, completed=done, description=f"{done} of {accepted} ended{_troubles(batch)}")
            if batch.is_terminal:
                return batch
            young = time.monotonic() - began < EAGER_SECONDS
            batch, retry_after = patiently(partial(gate.batch, batch.batch_id))
            if not batch.is_terminal:
                time.sleep(EAGER_INTERVAL if young else retry_after or EAGER_INTERVAL)


def _troubles(batch: Batch) -> str:
    failed = sum(batch.counts[state] for state in ENDED - {TaskStatus.SUCCEEDED})
    return f", {failed} without a clip" if failed else ""


def _finish(batch: Batch, *, wait: bool, as_json: bool) -> None:
    _show(batch, as_json=as_json)
    complete = batch.rejected == 0 and batch.counts[TaskStatus.SUCCEEDED] == len(batch.items)
    raise typer.Exit(EXIT_NO_CLIP if wait and not complete else 0)


def _show(batch: Batch, *, as_json: bool) -> None:
    if as_json:
        out.print_json(batch.model_dump_json())
        return
    counts = ", ".join(f"{state} {count}" for state, count in batch.counts.items() if count)
    rows = [
        ("batch", batch.batch_id),
        ("status", f"{batch.status}{f' ({batch.error_code})' if batch.error_code else ''}"),
        ("items", counts + (f", rejected {batch.rejected}" if batch.rejected else "")),
        ("callback", str(batch.callback_status) if batch.callback_status else None),
        ("tasks", batch.links.tasks),
        ("Web UI", batch.links.web_ui),
    ]
    for name, value in rows:
        if value is not None:
            out.print(f"{name:>8}  ", style="dim", end="")
            out.print(value, markup=False)
    for item in batch.items:
        for broken in item.errors or ():
            err.print(f"item {item.index}: {broken.field} ({broken.rule}): {broken.message}", markup=False)
