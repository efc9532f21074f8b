"""Connecting: a server that boots, one that is dead, one that is not ours."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from workers.codec import CodecKeyError, create_key_file
from workers.connection import ConnectionFailedError, connect, ensure_search_attributes, process_runtime
from workers.devserver import DevServer, DevServerError, free_port, temporal_binary
from workers.errors import ConfigurationError
from workers.settings import Settings
from workers.web_server import listen
from workflows.naming import SEARCH_ATTRIBUTES


@pytest.fixture
def settings(temporal: WorkflowEnvironment, tmp_path: Path) -> Settings:
    create_key_file(tmp_path / "codec.keys")
    return Settings(data_dir=tmp_path, temporal_address=temporal.client.service_client.config.target_host)


def _with(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update=changes)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


async def test_connects_with_encryption_and_a_name(settings: Settings) -> None:
    client = await connect(settings, identity="host/cpu:0")
    assert client.identity == "host/cpu:0"
    assert client.data_converter.payload_codec is not None
    payload = (await client.data_converter.encode(["a red circle"]))[0]
    assert payload.metadata["encoding"] == b"binary/encrypted"


async def test_a_wrong_namespace_is_said_at_once(settings: Settings) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionFailedError, match="no namespace 'videos' \\(REELGATE_NAMESPACE\\)"):
        await connect(_with(settings, namespace="videos"))
    assert time.monotonic() - began < 3


async def test_a_dead_server_is_said_within_the_limit(settings: Settings) -> None:
    address = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(ConnectionFailedError, match=f"{address} \\(REELGATE_TEMPORAL_ADDRESS"):
        await connect(_with(settings, temporal_address=address), timeout=timedelta(seconds=1))
    assert 0.7 < time.monotonic() - began < 4


async def test_a_server_that_accepts_and_says_nothing_is_said_within_the_limit(
    settings: Settings, silent_port: int
) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionFailedError, match="accepts connections but does not answer"):
        await connect(_with(settings, temporal_address=f"127.0.0.1:{silent_port}"), timeout=timedelta(seconds=1))
    assert time.monotonic() - began < 6


async def test_tls_against_a_plain_server_is_explained(settings: Settings) -> None:
    with pytest.raises(ConnectionFailedError, match="REELGATE_TEMPORAL_TLS"):
        await connect(_with(settings, temporal_tls=True), timeout=timedelta(seconds=0.5))


async def test_a_missing_certificate_file_is_named(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailedError, match=r"ca\.pem"):
        await connect(_with(settings, temporal_tls_ca_file=tmp_path / "ca.pem"))


async def test_a_missing_certificate_file_of_the_temporal_variables_is_named(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(tmp_path / "ca.pem"))
    with pytest.raises(ConnectionFailedError, match=r"ca\.pem \(TEMPORAL_TLS_"):
        await connect(settings)


async def test_headers_of_the_temporal_profile_are_sent(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "temporal.toml"
    profile.write_text('[profile.video.grpc_meta]\nx-tenant = "acme"\n')
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(profile))
    monkeypatch.setenv("TEMPORAL_PROFILE", "video")
    assert (await connect(settings)).rpc_metadata["x-tenant"] == "acme"


async def test_without_payload_keys_nothing_is_sent(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(CodecKeyError, match="REELGATE_CODEC_KEYS"):
        await connect(_with(settings, codec_key_file=tmp_path / "missing"))


class TestOwnServer:
    """A server with nothing registered."""

    @pytest_asyncio.fixture
    async def bare(self, tmp_path: Path) -> AsyncIterator[Settings]:
        create_key_file(tmp_path / "codec.keys")
        server = DevServer(state_file=tmp_path / "temporal.db", port=free_port(), ui_port=free_port())
        await server.check_ports()
        command = list(server.command())
        while "--search-attribute" in command:
            at = command.index("--search-attribute")
            del command[at : at + 2]
        # It boots while we connect.
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        yield Settings(data_dir=tmp_path, temporal_address=server.address, web_ui_url=server.ui_url)
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)

    async def test_waits_for_boot_and_names_the_missing_search_attributes_until_they_are_registered(
        self, bare: Settings
    ) -> None:
        with pytest.raises(ConnectionFailedError, match=r"search-attribute create .*--name TaskStatus --type Keyword"):
            await connect(bare)
        client = await connect(bare, register_search_attributes=True)
        assert (await client.count_workflows("TaskStatus = 'QUEUED' AND WorkerId = 'w'")).count == 0, "taken at once"
        await ensure_search_attributes(client)
        await connect(bare)
        listed = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
        assert {key.name for key in SEARCH_ATTRIBUTES} <= listed.custom_attributes.keys()

    async def test_a_search_attribute_of_another_type_is_refused_by_name(self, bare: Settings) -> None:
        await DevServer(state_file=Path(), port=int(bare.temporal_address.split(":")[1]), ui_port=0).wait_until_ready(
            timeout=timedelta(seconds=10)
        )
        client = await Client.connect(bare.temporal_address)
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(
                namespace="default", search_attributes={"TaskStatus": IndexedValueType.INDEXED_VALUE_TYPE_TEXT}
            )
        )
        with pytest.raises(ConnectionFailedError, match=r"TaskStatus .* is INDEXED_VALUE_TYPE_TEXT"):
            await connect(bare, register_search_attributes=True)

    async def test_state_and_settings_of_the_server_survive_a_restart(self, bare: Settings, tmp_path: Path) -> None:
        first = DevServer(state_file=tmp_path / "temporal.db", port=int(bare.temporal_address.split(":")[1]), ui_port=0)
        await first.wait_until_ready(timeout=timedelta(seconds=10))
        with pytest.raises(DevServerError, match=f"port {first.port} is taken by a Temporal server \\(version 1"):
            await first.check_ports()
        await first.prepare(retention=timedelta(days=7))
        await first.prepare(retention=timedelta(days=7))


async def test_a_port_taken_by_something_else_is_said(silent_port: int, tmp_path: Path) -> None:
    server = DevServer(state_file=tmp_path / "t.db", port=free_port(), ui_port=silent_port)
    with pytest.raises(DevServerError, match=f"port {silent_port} is taken by another program; .*--ui-port"):
        await server.check_ports()


def test_the_server_comes_with_the_environment() -> None:
    assert Path(temporal_binary()).is_file()


def test_a_taken_address_for_the_metrics_of_the_sdk_is_named_with_its_setting() -> None:
    with (
        listen("127.0.0.1", 0, setting="port") as taken,
        pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1:\d+ \(REELGATE_METRICS_BIND\)"),
    ):
        process_runtime(timedelta(seconds=7), f"127.0.0.1:{taken.getsockname()[1]}")
