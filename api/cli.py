"""The `reelgate` command.

Exit codes: 0 done; 1 the task ended without a clip; 2 wrong usage; 3 the gateway refused the request; 4 the gateway
is not reachable or failed; 5 a setting, a key or the Temporal server is wrong; 130 interrupted.
"""

# ruff: noqa: PLC0415 - each command imports its own world: `submit` needs no worker, a callback worker no web server.

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from api import cli_actions, cli_doctor, cli_redrive, cli_views
from api.cli_batches import app as batch_app
from api.cli_callbacks import app as callbacks_app
from api.cli_deploy import app as deploy_app
from api.cli_output import EXIT_CONFIGURATION, EXIT_INTERRUPTED, CommandError, complain, leave, out
from workers.errors import ConfigurationError

app = typer.Typer(
    help="Durable gateway for text-to-video generation.",
    epilog="Exit codes: 0 done, 1 ended without a clip, 2 usage, 3 refused, 4 unreachable or failed, 5 configuration.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
worker_app = typer.Typer(help="Run one worker process; GPU hosts join by starting one.", no_args_is_help=True)
keys_app = typer.Typer(help="API keys and callback secrets in keys.toml.", no_args_is_help=True)
app.add_typer(worker_app, name="worker")
quota_app = typer.Typer(
    help="Accounts of users, for operators. USER is TENANT or TENANT/END_USER.", no_args_is_help=True
)
app.add_typer(keys_app, name="keys")
app.add_typer(batch_app, name="batch")
app.add_typer(callbacks_app, name="callbacks")
app.add_typer(quota_app, name="quota")
app.add_typer(deploy_app, name="deploy")


class Priority(StrEnum):
    """Priorities on the command line."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class Mode(StrEnum):
    """How to cancel."""

    SOFT = "soft"
    HARD = "hard"


class KeyScope(StrEnum):
    """What a key may do."""

    USER = "user"
    SERVICE = "service"
    OPERATOR = "operator"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
User = Annotated[str, typer.Argument(help="TENANT, or TENANT/END_USER.")]
SharedAccount = Annotated[bool, typer.Option("--shared", help="The account above all end users of the tenant.")]
KeysFileOption = Annotated[
    Path | None, typer.Option("--file", help="keys.toml; default: the setting REELGATE_KEYS_FILE.")
]


def main() -> None:
    """Run the command line; errors become one message and an exit code."""
    try:
        app()
    except CommandError as error:
        complain(str(error))
        sys.exit(error.code)
    except ConfigurationError as error:
        complain(str(error))
        sys.exit(EXIT_CONFIGURATION)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _run_program(program: Callable[[], int]) -> NoReturn:
    """Run what holds connections of the SDK, and end the process with its exit code."""
    try:
        code = program()
    except ConfigurationError as error:
        complain(str(error))
        code = EXIT_CONFIGURATION
    leave(code)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(installed_version("reelgate"), markup=False)


@app.command()
def dev(
    port: Annotated[int, typer.Option(help="Port of the API; 0: a free one.")] = 8080,
    temporal_port: Annotated[int, typer.Option(help="Port of the Temporal server; 0: a free one.")] = 7233,
    ui_port: Annotated[int, typer.Option(help="Port of the Temporal Web UI; 0: a free one.")] = 8233,
    data_dir: Annotated[
        Path, typer.Option(help="Folder of all state; it survives restarts.", envvar="REELGATE_DATA_DIR")
    ] = Path(".reelgate"),
) -> None:
    """Run everything on this machine: Temporal, API and workers. Ctrl-C stops it in order."""
    from api.cli_dev import run_dev

    _run_program(
        lambda: asyncio.run(run_dev(data_dir=data_dir, port=port, temporal_port=temporal_port, ui_port=ui_port))
    )


@app.command(hidden=True)
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the clip and its poster are kept.")] = Path(
        "reelgate-demo"
    ),
) -> None:
    """Show the whole way of a task, signed callback included, and stop again."""
    from api.demo import run_demo

    raise typer.Exit(run_demo(output))


@app.command()
def api() -> None:
    """Serve the HTTP API. Settings: REELGATE_* variables."""
    from api.cli_run import run_api
    from workers.settings import load_settings

    _run_program(lambda: run_api(load_settings()))


def _run_worker(kind: str, **changes: object) -> None:
    import uvloop

    from workers.registry import WorkerKind
    from workers.run import run_worker
    from workers.settings import load_settings

    settings = load_settings(**{name: value for name, value in changes.items() if value is not None})
    _run_program(lambda: uvloop.run(run_worker(WorkerKind(kind), settings)))


@worker_app.command()
def gpu(
    pool: Annotated[str | None, typer.Option(help="GPU pool to serve.")] = None,
    devices: Annotated[str | None, typer.Option(help="Devices, e.g. cuda:0,cuda:1; default: all.")] = None,
) -> None:
    """Generate clips."""
    _run_worker("gpu", pool=pool, devices=devices)


@worker_app.command()
def callback() -> None:
    """Deliver callbacks."""
    _run_worker("callback")


@worker_app.command()
def control() -> None:
    """Run workflows, admission and clean-up."""
    _run_worker("control")


@keys_app.command("create")
def keys_create(
    tenant: Annotated[str, typer.Option(help="Who the key belongs to.")],
    scope: Annotated[KeyScope, typer.Option(help="What the key may do.")] = KeyScope.USER,
    tier: Annotated[str, typer.Option(help="Limits and priorities of the key.")] = "standard",
    signing: Annotated[bool, typer.Option(help="Also make a secret for signed requests.")] = False,
    file: KeysFileOption = None,
) -> None:
    """Create a key. It is shown once."""
    from api import cli_keys
    from workers.keys import Scope

    cli_keys.create(file, tenant=tenant, scope=Scope(scope), tier=tier, signing=signing)


@keys_app.command("list")
def keys_list(file: KeysFileOption = None) -> None:
    """List the keys; what they are is not kept."""
    from api import cli_keys

    cli_keys.show(file)


@keys_app.command("revoke")
def keys_revoke(key_id: Annotated[str, typer.Argument()], file: KeysFileOption = None) -> None:
    """Remove a key; it is refused within 5 seconds."""
    from api import cli_keys

    cli_keys.revoke(file, key_id)


@keys_app.command("rotate")
def keys_rotate(
    key_id: Annotated[str | None, typer.Argument(help="Key to succeed.")] = None,
    callback_secret: Annotated[
        str | None, typer.Option(help="Instead: the tenant whose callback secret to succeed.")
    ] = None,
    overlap_hours: Annotated[float, typer.Option(min=0, help="How long the old key still works.")] = 24.0,
    file: KeysFileOption = None,
) -> None:
    """Make a successor of a key, or of a tenant's callback secret."""
    from api import cli_keys

    if (key_id is None) == (callback_secret is None):
        raise typer.BadParameter("give a KEY_ID or --callback-secret TENANT")
    if key_id is not None:
        cli_keys.rotate(file, key_id, overlap=timedelta(hours=overlap_hours))
    if callback_secret is not None:
        cli_keys.rotate_secret(file, callback_secret)


@app.command()
def submit(
    *,
    prompt: Annotated[str, typer.Argument(help="What the clip shows.")],
    model: Annotated[str | None, typer.Option()] = None,
    negative_prompt: Annotated[str | None, typer.Option()] = None,
    image: Annotated[Path | None, typer.Option(help="Input image (image-to-video models).")] = None,
    width: Annotated[int | None, typer.Option()] = None,
    height: Annotated[int | None, typer.Option()] = None,
    num_frames: Annotated[int | None, typer.Option()] = None,
    fps: Annotated[float | None, typer.Option()] = None,
    num_inference_steps: Annotated[int | None, typer.Option()] = None,
    guidance_scale: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    priority: Annotated[Priority | None, typer.Option()] = None,
    regenerate: Annotated[bool, typer.Option(help="A new clip of the same prompt.")] = False,
    callback_url: Annotated[str | None, typer.Option()] = None,
    callback_event: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    deadline_seconds: Annotated[float | None, typer.Option()] = None,
    label: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    idempotency_key: Annotated[str | None, typer.Option()] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the task to its end and save the clip.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="With --wait: file for the clip.")] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a request. Gateway and key: REELGATE_URL and REELGATE_API_KEY, else what `reelgate dev` left."""
    from api import cli_tasks

    fields: dict[str, object] = {
        "prompt": prompt,
        "model": model,
        "negative_prompt": negative_prompt,
        "width": width,
        "height": height,
        "num_frames": num_frames,
        "fps": fps,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "seed": seed,
        "priority": priority,
        "regenerate": regenerate or None,
        "callback_url": callback_url,
        "callback_events": callback_event or None,
        "deadline_seconds": deadline_seconds,
        "labels": label or None,
    }
    code = cli_tasks.submit(
        fields,
        image=image,
        idempotency_key=idempotency_key,
        wait=wait or output is not None,
        as_json=as_json,
        file=output,
    )
    raise typer.Exit(code)


@app.command()
def status(task_id: str, as_json: AsJson = False) -> None:
    """Show a task."""
    from api import cli_tasks

    raise typer.Exit(cli_tasks.status(task_id, as_json=as_json))


@app.command()
def cancel(
    task_id: str,
    mode: Annotated[Mode, typer.Option(help="soft: the clip is still made and kept; hard: stop the GPU.")] = Mode.SOFT,
    as_json: AsJson = False,
) -> None:
    """Cancel a task."""
    from api import cli_tasks
    from workflows.tasks import CancelMode

    raise typer.Exit(cli_tasks.cancel(task_id, CancelMode(mode), as_json=as_json))


@app.command()
def models(as_json: AsJson = False) -> None:
    """Show the models and who serves them."""
    from api import cli_tasks

    raise typer.Exit(cli_tasks.models(as_json=as_json))


@app.command()
def usage(as_json: AsJson = False) -> None:
    """Show what your key's user holds, has left and has used."""
    from api import cli_quota

    raise typer.Exit(cli_quota.usage(as_json=as_json))


@quota_app.command("show")
def quota_show(user: User, shared: SharedAccount = False, as_json: AsJson = False) -> None:
    """Show a user's account."""
    from api import cli_quota

    raise typer.Exit(cli_quota.show(user, shared=shared, as_json=as_json))


@quota_app.command("reset")
def quota_reset(user: User, shared: SharedAccount = False) -> None:
    """Fill the bucket, forget the used amount and count the running tasks again."""
    from api import cli_quota

    raise typer.Exit(cli_quota.reset(user, shared=shared))


for command in (cli_actions.retry, cli_actions.delete, cli_actions.timeline, cli_actions.replay):
    app.command()(command)
app.command()(cli_redrive.redrive)
app.command()(cli_doctor.doctor)
app.command("list")(cli_views.list_tasks)
for view in (cli_views.queues, cli_views.stats, cli_views.workers):
    app.command()(view)
app.command()(cli_views.events)


if __name__ == "__main__":
    main()
