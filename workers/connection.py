"""The one way to a Temporal client: encrypted, checked and with an error that says what to change.

The SDK alone would hang or fail obscurely: a dead server raises a bare `RuntimeError`, a wrong namespace lets a
worker poll for ever, and upserting an unregistered search attribute hangs a job for good. All three are found here,
within seconds, before any work starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from types import MappingProxyType
from typing import Final

import structlog
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, Interceptor, TLSConfig
from temporalio.converter import DataConverter
from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)
from temporalio.service import RPCError, RPCStatusCode

from workers.codec import codec_from, data_converter
from workers.errors import ConfigurationError
from workers.settings import Settings, temporal_profile
from workflows.naming import SEARCH_ATTRIBUTES

_RPC_TIMEOUT: Final = timedelta(seconds=3)
_RETRY_PAUSE_SECONDS: Final = 0.25
_NOT_YET: Final = frozenset({RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED})
_REFUSED: Final = frozenset({RPCStatusCode.UNAUTHENTICATED, RPCStatusCode.PERMISSION_DENIED})

SEARCH_ATTRIBUTE_TYPES: Final = MappingProxyType(
    {
        key.name: {
            IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD: "Keyword",
            IndexedValueType.INDEXED_VALUE_TYPE_DATETIME: "Datetime",
        }[IndexedValueType.ValueType(int(key.indexed_value_type))]
        for key in SEARCH_ATTRIBUTES
    }
)
"""Our search attributes and the names of their types on command lines."""

_log = structlog.stdlib.get_logger(__name__)


class ConnectionFailedError(ConfigurationError):
    """There is no usable Temporal server; the message names the address and the setting to look at."""


def host_name(settings: Settings) -> str:
    """Name of this machine in worker ids and identities."""
    return settings.worker_name or socket.gethostname()


@cache
def process_runtime(heartbeat: timedelta, metrics_bind: str | None) -> Runtime:
    """The SDK runtime of this process: made once, since each owns threads and, with metrics, a port.

    Raises:
        ConfigurationError: the port is taken.
    """
    try:
        return _runtime(heartbeat, metrics_bind)
    except ValueError as error:
        raise ConfigurationError(f"cannot listen on {metrics_bind} (REELGATE_METRICS_BIND): {error}") from error


def _runtime(heartbeat: timedelta, metrics_bind: str | None) -> Runtime:
    return Runtime(
        telemetry=TelemetryConfig(
            # Forwarded, so that the core's warnings are lines of our log and not text of its own between them.
            logging=LoggingConfig(
                filter=TelemetryFilter(core_level="WARN", other_level="ERROR"),
                forwarding=LogForwardingConfig(
                    logger=logging.getLogger("temporalio.core"),
                    append_target_to_name=False,
                    prepend_target_on_message=False,
                    append_log_fields_to_message=False,
                ),
            ),
            metrics=PrometheusConfig(bind_address=metrics_bind, durations_as_seconds=True) if metrics_bind else None,
        ),
        worker_heartbeat_interval=heartbeat,
    )


async def connect(
    settings: Settings,
    *,
    identity: str | None = None,
    timeout: timedelta | None = None,
    register_search_attributes: bool = False,
    interceptors: Sequence[Interceptor] = (),
) -> Client:
    """Connect, waiting for a server that is still booting, and check that it can carry our workflows.

    Args:
        settings: address, namespace, TLS, payload keys.
        identity: name of this process in histories and fleet views; None: `pid@host`.
        timeout: how long to wait for the server; None: `temporal_connect_timeout_seconds`.
        register_search_attributes: add the ones that are missing (deploy step, `dev`, tests) instead of refusing.
        interceptors: round the client's calls; workers that use the client have them too.

    Raises:
        ConnectionFailedError: no server, no access, no such namespace, or search attributes missing.
        CodecKeyError: no payload keys.
    """
    limit = timeout or timedelta(seconds=settings.temporal_connect_timeout_seconds)
    trouble: RuntimeError | RPCError | None = None
    try:
        # The SDK's own limits do not cover a server that accepts connections and says nothing.
        async with asyncio.timeout(limit.total_seconds()):
            while True:
                try:
                    return await _connect_checked(settings, identity, interceptors, register=register_search_attributes)
                except (RuntimeError, RPCError) as error:
                    if not _may_come_up(error):
                        raise _explained(settings, error) from error
                    trouble = error
                await asyncio.sleep(_RETRY_PAUSE_SECONDS)
    except TimeoutError as error:
        raise _explained(settings, trouble) from trouble or error


async def connect_bare(settings: Settings, *, timeout: timedelta) -> Client:
    """A client without payload keys and without checks, to look at a server that may not be as it should.

    Raises:
        ConnectionFailedError: no server, or no access.
    """
    bare = settings.model_copy(update={"metrics_bind": None})
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            return await _connect_once(bare, None, DataConverter.default)
    except (RuntimeError, RPCError) as error:
        raise _explained(settings, error) from error
    except TimeoutError as error:
        raise _explained(settings, None) from error


async def _connect_checked(
    settings: Settings, identity: str | None, interceptors: Sequence[Interceptor], *, register: bool
) -> Client:
    client = await _connect_once(settings, identity, data_converter(codec_from(settings)), interceptors)
    await _check_namespace(client, settings)
    await (ensure_search_attributes(client) if register else check_search_attributes(client))
    return client


async def _connect_once(
    settings: Settings, identity: str | None, converter: DataConverter, interceptors: Sequence[Interceptor] = ()
) -> Client:
    return await Client.connect(
        settings.temporal_address,
        namespace=settings.namespace,
        api_key=settings.temporal_api_key.get_secret_value() if settings.temporal_api_key else None,
        tls=_tls(settings),
        rpc_metadata=temporal_profile().grpc_meta,
        identity=identity or f"{os.getpid()}@{host_name(settings)}",
        data_converter=converter,
        connect_timeout=_RPC_TIMEOUT,
        interceptors=interceptors,
        runtime=process_runtime(timedelta(seconds=settings.worker_heartbeat_seconds), settings.metrics_bind),
    )


def _tls(settings: Settings) -> bool | TLSConfig | None:
    files = (settings.temporal_tls_ca_file, settings.temporal_tls_cert_file, settings.temporal_tls_key_file)
    if not any(files) and settings.temporal_tls_server_name is None:
        if settings.temporal_tls:
            return True
        # The standard TEMPORAL_TLS_* variables and profile; None: on when there is an API key.
        try:
            return temporal_profile().to_client_connect_config().get("tls")
        except OSError as error:
            raise ConnectionFailedError(f"cannot read {error.filename} (TEMPORAL_TLS_*): {error.strerror}") from error
    try:
        authority, certificate, key = (file.read_bytes() if file else None for file in files)
    except OSError as error:
        raise ConnectionFailedError(
            f"cannot read {error.filename} (REELGATE_TEMPORAL_TLS_*): {error.strerror}"
        ) from error
    return TLSConfig(
        server_root_ca_cert=authority,
        client_cert=certificate,
        client_private_key=key,
        domain=settings.temporal_tls_server_name,
    )


async def _check_namespace(client: Client, settings: Settings) -> None:
    reply = await client.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=settings.namespace), timeout=_RPC_TIMEOUT
    )
    kept = reply.config.workflow_execution_retention_ttl.ToTimedelta()
    if kept < settings.retention:
        # Records would vanish before their clips, and idempotency keys with them.
        _log.warning(
            "namespace_retention_short",
            namespace=settings.namespace,
            retention_days=kept / timedelta(days=1),
            wanted_days=settings.retention_days,
        )


async def check_search_attributes(client: Client) -> None:
    """Refuse a namespace in which our search attributes are not registered with their types.

    Raises:
        ConnectionFailedError: some are missing or of another type; the message has the command.
    """
    if missing := await _missing_search_attributes(client):
        command = " ".join(f"--name {name} --type {SEARCH_ATTRIBUTE_TYPES[name]}" for name in missing)
        raise ConnectionFailedError(
            f"namespace {client.namespace!r} lacks search attributes: "
            f"temporal operator search-attribute create --namespace {client.namespace} {command}"
        )


async def ensure_search_attributes(client: Client) -> None:
    """Register the search attributes that are missing, and wait until the server takes them.

    Raises:
        ConnectionFailedError: one exists with another type.
    """
    missing = await _missing_search_attributes(client)
    if not missing:
        return
    while missing:
        try:
            await client.operator_service.add_search_attributes(
                AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing), timeout=_RPC_TIMEOUT
            )
        except RPCError as error:
            # Another process registers them in the same moment.
            if error.status is not RPCStatusCode.ALREADY_EXISTS:
                raise
        await asyncio.sleep(0.1)
        missing = await _missing_search_attributes(client)
    # It lists them at once and refuses them until it has read the namespace again, a few seconds later.
    asked = " AND ".join(f"{key.name} IS NULL" for key in SEARCH_ATTRIBUTES)
    while not await _takes(client, asked):  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0.1)


async def _takes(client: Client, query: str) -> bool:
    try:
        await client.count_workflows(query, rpc_timeout=_RPC_TIMEOUT)
    except RPCError as error:
        if error.status is not RPCStatusCode.INVALID_ARGUMENT:
            raise
        return False
    return True


async def _missing_search_attributes(client: Client) -> dict[str, IndexedValueType.ValueType]:
    reply = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace), timeout=_RPC_TIMEOUT
    )
    missing: dict[str, IndexedValueType.ValueType] = {}
    for key in SEARCH_ATTRIBUTES:
        wanted = IndexedValueType.ValueType(int(key.indexed_value_type))
        found = reply.custom_attributes.get(key.name)
        if found is None:
            missing[key.name] = wanted
        elif found != wanted:
            raise ConnectionFailedError(
                f"search attribute {key.name} of namespace {client.namespace!r} is "
                f"{IndexedValueType.Name(found)}, not {IndexedValueType.Name(wanted)}"
            )
    return missing


def _may_come_up(error: RuntimeError | RPCError) -> bool:
    if isinstance(error, RPCError):
        return error.status in _NOT_YET
    # Client.connect wraps whatever went wrong in a RuntimeError; only its text tells a refusal from a silent server.
    return not (_is_refusal(error) or "InvalidArgument" in str(error))


def _is_refusal(error: RuntimeError) -> bool:
    return any(word in str(error) for word in ("Unauthenticated", "PermissionDenied"))


def _explained(settings: Settings, error: RuntimeError | RPCError | None) -> ConnectionFailedError:
    where = f"Temporal at {settings.temporal_address}"
    if error is None:
        return ConnectionFailedError(f"{where} accepts connections but does not answer (REELGATE_TEMPORAL_ADDRESS)")
    if isinstance(error, RPCError):
        if error.status is RPCStatusCode.NOT_FOUND:
            return ConnectionFailedError(f"{where} has no namespace {settings.namespace!r} (REELGATE_NAMESPACE)")
        if error.status in _REFUSED:
            return ConnectionFailedError(f"{where} refused access (REELGATE_TEMPORAL_API_KEY): {error.message}")
        return ConnectionFailedError(f"{where} does not answer (REELGATE_TEMPORAL_ADDRESS): {error.message}")
    if _is_refusal(error):
        return ConnectionFailedError(f"{where} refused access (REELGATE_TEMPORAL_API_KEY): {error}")
    return ConnectionFailedError(
        f"cannot connect to {where} (REELGATE_TEMPORAL_ADDRESS, REELGATE_TEMPORAL_TLS): {error}"
    )
