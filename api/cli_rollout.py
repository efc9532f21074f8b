"""`reelgate deploy rollout`: a new version of a GPU pool takes a share, is compared, and is promoted or goes again."""

# ruff: noqa: PLC0415 - each command imports its own world

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from api.cli_output import EXIT_REFUSED, CommandError, out

if TYPE_CHECKING:
    from temporalio.client import Client

    from api.rollouts import RolloutReading, Rollouts
    from workers.settings import Settings
    from workflows.canary_rule import Comparison
    from workflows.rollouts import RolloutRecord

app = typer.Typer(help="Canary releases of GPU pools. POOL is the name of a pool, e.g. default.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_HOUR = 3600.0

Pool = Annotated[str, typer.Argument(help="Name of the pool, e.g. default.")]


@app.command()
def start(
    *,
    pool: Pool,
    build_id: Annotated[str, typer.Argument(help="The new version; one of its workers must have polled.")],
    percent: Annotated[float, typer.Option(min=0.1, max=50, help="Share of new tasks.")] = 5.0,
    observe_hours: Annotated[float, typer.Option(min=0.0001, help="How long before it is decided.")] = 4.0,
    extensions: Annotated[int, typer.Option(min=0, help="How often it is extended before an operator is asked.")] = 1,
    min_tasks: Annotated[int, typer.Option(min=1, help="Tasks of each version before it is promoted.")] = 200,
    max_error_points: Annotated[float, typer.Option(min=0, help="Tolerated difference of the error rates.")] = 0.1,
    max_delay_percent: Annotated[float, typer.Option(min=0, help="Tolerated difference of the durations.")] = 5.0,
    look_seconds: Annotated[float, typer.Option(min=0.1, help="Time between two looks.")] = 60.0,
    leave_out_seconds: Annotated[float, typer.Option(min=0, help="What ended this recently waits.")] = 60.0,
    overdue_seconds: Annotated[float, typer.Option(min=0.1, help="An attempt that runs longer is overdue.")] = 300.0,
) -> None:
    """Give a new version its share of a pool and watch it."""
    from workflows.canary_rule import CanaryRule
    from workflows.rollouts import RolloutInput

    given = RolloutInput(
        pool=pool,
        canary=build_id,
        percentage=percent,
        observe_seconds=observe_hours * _HOUR,
        max_extensions=extensions,
        look_seconds=look_seconds,
        leave_out_seconds=leave_out_seconds,
        overdue_seconds=overdue_seconds,
        rule=CanaryRule(
            max_error_difference=max_error_points / 100,
            max_delay_difference=max_delay_percent / 100,
            min_tasks=min_tasks,
        ),
    )

    async def begin(rollouts: Rollouts) -> None:
        _show(await rollouts.start(given))

    _with_rollouts("deploy rollout start", begin)


@app.command()
def status(pool: Pool, as_json: AsJson = False) -> None:
    """Show the running rollout of a pool, else its last one, with every decision and its numbers."""

    async def show(rollouts: Rollouts) -> None:
        _show_reading(await rollouts.read(pool), as_json=as_json)

    _with_rollouts("deploy rollout status", show)


@app.command()
def pause(pool: Pool) -> None:
    """Take the share away and decide nothing until it is resumed."""
    _steer(pool, "pause", "paused")


@app.command()
def resume(pool: Pool) -> None:
    """Give the share back and go on observing."""
    _steer(pool, "resume", "resumed")


@app.command()
def abort(pool: Pool) -> None:
    """Take the share away and end the rollout."""
    _steer(pool, "abort")


@app.command()
def promote(pool: Pool) -> None:
    """Make the new version the current one now, whatever the numbers say."""
    _steer(pool, "decide", arguments=(True,))


def _steer(pool: str, update: str, said: str | None = None, *, arguments: tuple[bool, ...] = ()) -> NoReturn:
    """Send an update; without `said` it ends the rollout, and the end is shown."""

    async def steer(rollouts: Rollouts) -> None:
        await rollouts.steer(pool, update, *arguments)
        if said is not None:
            out.print(f"the rollout of pool {pool} is {said}", markup=False)
            return
        _show_reading(await rollouts.until_ended(pool), as_json=False)

    _with_rollouts(f"deploy rollout {update}", steer)


def _with_rollouts(name: str, act: Callable[[Rollouts], Awaitable[None]]) -> NoReturn:
    from api.cli_temporal import with_temporal
    from api.rollouts import Rollouts

    async def acting(client: Client, _settings: Settings) -> None:
        await act(Rollouts(client))

    with_temporal(name, acting)


def _show_reading(reading: RolloutReading, *, as_json: bool) -> None:
    from dataclasses import asdict

    from pydantic_core import to_json

    if reading.record is None:
        raise CommandError("the rollout has not begun", EXIT_REFUSED)
    if as_json:
        out.print_json(to_json({"open": reading.open, **asdict(reading.record)}).decode())
        return
    _show(reading.record)
    if not reading.open and reading.record.phase not in _ended():
        out.print(
            f"ended from outside ({reading.run_status}): the share stays until `reelgate deploy ramp` or a new rollout",
            markup=False,
        )


def _ended() -> frozenset[str]:
    from workflows.rollouts import ENDED_ROLLOUT

    return ENDED_ROLLOUT


def _show(record: RolloutRecord) -> None:
    from rich.table import Table

    out.print(f"{record.canary} against {record.current} in pool {record.pool}: {record.phase}", markup=False)
    out.print(
        f"gets {record.percentage:g} % of new tasks; observed for {_hours(record.observed_seconds)} "
        f"of {_hours(record.observe_until_seconds)}",
        markup=False,
    )
    if record.comparison is not None:
        out.print(f"now: {_numbers(record.comparison)}", markup=False)
    table = Table("at", "decision", "why", "numbers", box=None)
    for decision in record.decisions:
        found = decision.comparison
        table.add_row(f"{decision.at:%F %T}", decision.action, decision.reason, _numbers(found) if found else "")
    out.print(table)


def _numbers(found: Comparison) -> str:
    text = (
        f"failed {found.canary_failed} of {found.canary_tasks} against {found.current_failed} of "
        f"{found.current_tasks} (p {found.error_p:.2g})"
    )
    if found.delay_difference is not None:
        text += f", delay {found.delay_difference:+.1%} (p {found.delay_p:.2g})"
    if found.canary_overdue or found.current_overdue:
        text += f", overdue {found.canary_overdue} against {found.current_overdue} (p {found.overdue_p:.2g})"
    return text


def _hours(seconds: float) -> str:
    return f"{seconds / _HOUR:.1f} h" if seconds >= _HOUR else f"{seconds:.0f} s"
