"""Everything on one machine, as child processes: Temporal, control, callback and GPU worker, API.

State is in one folder and survives a restart. The folder is locked, so that two stacks never share it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

import httpx

from api.cli_client import CLIENT_FILE, AccessFile
from workers.codec import create_key_file
from workers.devserver import ENVIRONMENT, DevServer, free_port
from workers.errors import ConfigurationError
from workers.keys import KeyRing, Scope
from workers.keys_admin import create_key
from workers.links import create_secret
from workers.secret_files import replace_secret_file
from workers.settings import Settings
from workers.supervisor import Program, Supervisor

TENANT: Final = "dev"
"""Tenant of the key that a stack makes for itself."""
HOST: Final = "127.0.0.1"
DEV_MODELS: Final = "tiny-wan,tiny-ltx,tiny-ltx-i2v"
"""Built-in models switched on beside the default one."""
DRAIN_SECONDS: Final = "5"
"""A person who pressed Ctrl-C waits; what was running is handed back and goes on at the next start."""

_REELGATE: Final = (sys.executable, "-P", "-m", "api.cli")
"""-P: a folder named `api` where the command was typed must not stand in for ours."""
_READY_WITHIN: Final = timedelta(seconds=60)
_STOP_GRACE: Final = timedelta(seconds=15)


class StackFailedError(ConfigurationError):
    """The stack did not come up."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where the parts listen; 0 takes a free port."""

    api: int
    temporal: int
    ui: int

    def chosen(self) -> Ports:
        """The same with free ports for zeros."""
        return Ports(api=self.api or free_port(), temporal=self.temporal or free_port(), ui=self.ui or free_port())


@dataclass(frozen=True, kw_only=True)
class DevStack:
    """A stack that runs."""

    settings: Settings
    access: AccessFile
    callback_secret: str = field(repr=False)
    new_key: bool
    """The key was made now, so it is shown; later it is only in the client file."""


@asynccontextmanager
async def running_stack(data_dir: Path, ports: Ports, supervisor: Supervisor) -> AsyncIterator[DevStack]:
    """Start everything, wait until the API is ready, and stop in order at the end.

    Args:
        data_dir: folder of all state.
        ports: where to listen.
        supervisor: a fresh one; it runs the programs.

    Raises:
        ConfigurationError: a port is taken, the folder is in use, or a part does not come up.
    """
    with _locked(data_dir):
        chosen = ports.chosen()
        settings = _settings(data_dir, chosen)
        access, new_key = _prepare_files(settings)
        # The Web UI has no log-in: what it shows in clear text, it gets by this token, a new one at each start.
        codec_token = secrets.token_urlsafe(32)
        server = DevServer(
            state_file=settings.data_dir / "temporal.db",
            port=chosen.temporal,
            ui_port=chosen.ui,
            host=HOST,
            ui_codec_endpoint=f"{settings.public_url}/api/v1/codec/{codec_token}",
        )
        await server.check_ports()
        try:
            environment = _environment(settings)
            api_environment = {**environment, "REELGATE_CODEC_PATH_TOKEN": codec_token}
            await supervisor.start(_program("temporal", server.command(), {**ENVIRONMENT, **environment}, level=0))
            await server.wait_until_ready(timeout=_READY_WITHIN)
            await server.prepare(retention=settings.retention)
            for name in ("control", "callback", "gpu"):
                await supervisor.start(_program(name, (*_REELGATE, "worker", name), environment, level=1))
            await supervisor.start(_program("api", (*_REELGATE, "api"), api_environment, level=2))
            await _wait_until_ready(settings)
            yield DevStack(
                settings=settings,
                access=access,
                callback_secret=KeyRing(settings.keys_file).callback_secrets(TENANT)[0],
                new_key=new_key,
            )
        finally:
            await supervisor.stop()


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        # Keys and clips are in here.
        (data_dir / ".gitignore").write_text("*\n", encoding="utf-8")
        lock = (data_dir / "dev.lock").open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot use the folder {data_dir} (--data-dir): {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another `reelgate dev` uses {data_dir}; stop it or choose another --data-dir"
            ) from error
        yield


def _settings(data_dir: Path, ports: Ports) -> Settings:
    """Settings of all programs: what a stack decides, and else the environment."""
    folder = data_dir.absolute()
    return Settings(
        environment="development",
        data_dir=folder,
        temporal_address=f"{HOST}:{ports.temporal}",
        namespace="default",
        host=HOST,
        port=ports.api,
        public_url=f"http://{HOST}:{ports.api}",
        web_ui_url=f"http://{HOST}:{ports.ui}",
    )


def _environment(settings: Settings) -> Mapping[str, str]:
    # Temporal's variables and profile file are for other servers than ours: their TLS and keys would not fit it.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")}
    defaults = {
        "REELGATE_EXTRA_MODELS": DEV_MODELS,
        "REELGATE_WORKER_DRAIN_SECONDS": DRAIN_SECONDS,
        "REELGATE_WORKER_HEALTH_PORT": "0",
    }
    decided = {
        "REELGATE_ENVIRONMENT": settings.environment,
        "REELGATE_DATA_DIR": str(settings.data_dir),
        "REELGATE_TEMPORAL_ADDRESS": settings.temporal_address,
        "REELGATE_NAMESPACE": settings.namespace,
        "REELGATE_HOST": settings.host,
        "REELGATE_PORT": str(settings.port),
        "REELGATE_PUBLIC_URL": settings.public_url,
        "REELGATE_WEB_UI_URL": settings.web_ui_url,
        "REELGATE_LOG_FORMAT": "json",
        "TEMPORAL_CONFIG_FILE": os.devnull,
        "PYTHONUNBUFFERED": "1",
    }
    return {**defaults, **inherited, **decided}


def _prepare_files(settings: Settings) -> tuple[AccessFile, bool]:
    """Make what is missing: payload key, link secret, an operator key for the person at this machine."""
    create_key_file(settings.codec_key_file)
    create_secret(settings.link_secret_file)
    known = _known_key(settings)
    key = known or create_key(settings.keys_file, tenant=TENANT, scope=Scope.OPERATOR).token
    access = AccessFile(
        url=settings.public_url,
        api_key=key,
        web_ui_url=settings.web_ui_url,
        temporal_address=settings.temporal_address,
    )
    replace_secret_file(settings.data_dir / CLIENT_FILE, access.model_dump_json(indent=2) + "\n")
    return access, known is None


def _known_key(settings: Settings) -> str | None:
    """The key that the client file has from an earlier start, if it still opens."""
    try:
        key = AccessFile.model_validate_json((settings.data_dir / CLIENT_FILE).read_bytes()).api_key
    except (OSError, ValueError):
        return None
    opened = KeyRing(settings.keys_file).authenticate(key) if settings.keys_file.exists() else None
    return key if opened is not None and opened.scope is Scope.OPERATOR else None


def _program(name: str, command: Sequence[str], environment: Mapping[str, str], *, level: int) -> Program:
    return Program(name=name, command=command, environment=environment, stop_grace=_STOP_GRACE, level=level)


async def _wait_until_ready(settings: Settings) -> None:
    try:
        async with asyncio.timeout(_READY_WITHIN.total_seconds()), httpx.AsyncClient(trust_env=False) as http:
            while not await _is_ready(http, settings):  # noqa: ASYNC110 - another process: there is no event to wait for
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise StackFailedError(f"the API did not become ready within {_READY_WITHIN.total_seconds():g} s") from error


async def _is_ready(http: httpx.AsyncClient, settings: Settings) -> bool:
    try:
        return (await http.get(f"http://{settings.host}:{settings.port}/readyz", timeout=2)).is_success
    except httpx.HTTPError:
        return False
