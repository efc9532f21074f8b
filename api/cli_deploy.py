"""`reelgate deploy`: which version of the workers gets the work.

Talks to Temporal itself, with the settings of the workers (REELGATE_TEMPORAL_ADDRESS, REELGATE_NAMESPACE, ...).
"""

# ruff: noqa: PLC0415 - each command imports its own world

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from api.cli_output import out
from api.cli_rollout import app as rollout_app

if TYPE_CHECKING:
    from temporalio.client import Client

    from api.deployments import DeploymentState, Releases
    from workers.settings import Settings

app = typer.Typer(help="Versions of the workers: which of them gets the work.", no_args_is_help=True)
app.add_typer(rollout_app, name="rollout")


def _queue(name: str) -> str:
    from api.deployments import queue_of

    try:
        return queue_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Deployment = Annotated[str, typer.Argument(parser=_queue, metavar="DEPLOYMENT", help="control, callback or gpu-POOL.")]
BuildId = Annotated[str, typer.Argument(help="The version; `deploy status` lists them.")]
Force = Annotated[bool, typer.Option("--force", help="Even if none of its workers asks for work.")]


@app.command()
def status(
    deployment: Annotated[
        str | None, typer.Argument(parser=_queue, metavar="DEPLOYMENT", help="Default: all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the versions: who gets new tasks, who still holds work."""

    async def show(releases: Releases) -> None:
        queues = [deployment] if deployment else await releases.task_queues()
        states = [await releases.state(queue) for queue in queues]
        if as_json:
            _print_json(states)
        else:
            _print(states)

    _with_releases("deploy status", show)


@app.command()
def current(
    deployment: Deployment,
    build_id: Annotated[str | None, typer.Argument(help="The version; `deploy status` lists them.")] = None,
    unversioned: Annotated[
        bool, typer.Option("--unversioned", help="Instead: workers without REELGATE_WORKER_VERSIONING.")
    ] = False,
    force: Force = False,
) -> None:
    """Send all new tasks to a version; runs in progress go on under it."""
    if (build_id is None) != unversioned:
        raise typer.BadParameter("give a BUILD_ID or --unversioned")

    async def change(releases: Releases) -> None:
        await releases.make_current(deployment, build_id or "", without_workers=force)
        out.print(f"{build_id or 'unversioned'} is the current version of {deployment}", markup=False)

    _with_releases("deploy current", change)


@app.command()
def ramp(
    deployment: Deployment,
    build_id: BuildId,
    percent: Annotated[float, typer.Argument(min=0, max=100, help="Share of new tasks; 0 ends the ramp.")],
    force: Force = False,
) -> None:
    """Send a share of the new tasks to a version. A running rollout of the pool stands down at that."""

    async def change(releases: Releases) -> None:
        await releases.ramp(deployment, build_id, percent, without_workers=force)
        out.print(f"{build_id} gets {percent:g} % of the new tasks of {deployment}", markup=False)

    _with_releases("deploy ramp", change)


@app.command()
def retire(deployment: Deployment, build_id: BuildId) -> None:
    """Forget a version; refused while it holds work."""

    async def change(releases: Releases) -> None:
        await releases.retire(deployment, build_id)
        out.print(f"{build_id} of {deployment} is retired", markup=False)

    _with_releases("deploy retire", change)


def _with_releases(name: str, act: Callable[[Releases], Awaitable[None]]) -> NoReturn:
    from datetime import timedelta

    from api.cli_temporal import with_temporal
    from api.deployments import Releases

    async def acting(client: Client, settings: Settings) -> None:
        await act(Releases(client, heartbeat=timedelta(seconds=settings.worker_heartbeat_seconds)))

    with_temporal(name, acting)


def _print_json(states: list[DeploymentState]) -> None:
    from dataclasses import asdict

    out.print_json(data={"items": [asdict(state) for state in states]})


def _print(states: list[DeploymentState]) -> None:
    from rich.table import Column, Table

    if not states:
        out.print("no worker has polled with REELGATE_WORKER_VERSIONING=true", markup=False)
        return
    table = Table(
        Column("deployment", no_wrap=True),
        Column("version", no_wrap=True),
        "role",
        "share",
        "workers",
        "in work",
        "waiting",
        box=None,
    )
    for state in states:
        for version in state.versions:
            table.add_row(
                state.task_queue,
                version.build_id or "(unversioned)",
                version.role,
                f"{version.percentage:g} %",
                str(version.workers),
                str(version.in_work),
                str(version.waiting),
            )
    out.print(table)
