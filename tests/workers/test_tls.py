"""TLS, client certificates and API keys towards Temporal: right ones connect, wrong ones are said within seconds."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temporalio.testing import WorkflowEnvironment

from tests.certificates import CertificateAuthority
from workers.codec import create_key_file
from workers.connection import ConnectionFailedError, connect
from workers.settings import Settings

SECONDS = 6.0
"""The limit of these tests is 2 s, and one SDK call may outlive it by its own 3 s."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority()


@pytest.fixture
def trusting(tmp_path: Path, authority: CertificateAuthority) -> Settings:
    """Settings that trust the authority; the address comes later."""
    create_key_file(tmp_path / "codec.keys")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    return Settings(data_dir=tmp_path, temporal_tls_ca_file=tmp_path / "ca.pem")


@asynccontextmanager
async def listening(serve: Serve, authority: CertificateAuthority, *, mutual: bool = False) -> AsyncIterator[str]:
    """A TLS server; with `mutual` it wants a certificate of the same authority."""
    context = authority.server_context("127.0.0.1")
    context.set_alpn_protocols(["h2"])
    if mutual:
        context.load_verify_locations(cadata=authority.pem.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def passing_on(temporal: WorkflowEnvironment) -> Serve:
    """Takes TLS off in front of the real server."""
    host, _, port = temporal.client.service_client.config.target_host.partition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65_536):
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_upstream = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, to_upstream), copy(upstream, writer))

    return serve


def header(name: bytes, value: bytes) -> bytes:
    """An HPACK literal without indexing."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def refusing(status: int, message: bytes) -> Serve:
    """Answers each gRPC call with a status, as a server does that does not take a key."""
    refusal = b"\x88" + header(b"content-type", b"application/grpc")
    refusal += header(b"grpc-status", str(status).encode()) + header(b"grpc-message", message)
    headers, settings, ping = 1, 4, 6

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
            writer.write(frame(settings, 0, 0))
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind in (settings, ping) and not flags & 1:
                    writer.write(frame(kind, 1, 0, payload if kind == ping else b""))
                elif kind == headers:
                    writer.write(frame(headers, 5, stream, refusal))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    return serve


def certified(settings: Settings, folder: Path, by: CertificateAuthority) -> Settings:
    certificate, key = by.issue("worker.test")
    (folder / "client.pem").write_bytes(certificate)
    (folder / "client.key").write_bytes(key)
    return settings.model_copy(
        update={"temporal_tls_cert_file": folder / "client.pem", "temporal_tls_key_file": folder / "client.key"}
    )


async def assert_refused(settings: Settings, address: str, match: str) -> str:
    began = time.monotonic()
    with pytest.raises(ConnectionFailedError, match=match) as raised:
        await connect(settings.model_copy(update={"temporal_address": address, "temporal_connect_timeout_seconds": 2}))
    assert time.monotonic() - began < SECONDS
    return str(raised.value)


async def test_tls_with_a_private_authority_connects(
    temporal: WorkflowEnvironment, trusting: Settings, authority: CertificateAuthority
) -> None:
    async with listening(passing_on(temporal), authority) as address:
        client = await connect(trusting.model_copy(update={"temporal_address": address}))
        assert await client.count_workflows("WorkflowId = 'nobody'")


async def test_the_standard_temporal_variables_switch_tls_on(
    temporal: WorkflowEnvironment, trusting: Settings, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(passing_on(temporal), authority) as address:
        monkeypatch.setenv("TEMPORAL_ADDRESS", address)
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(trusting.temporal_tls_ca_file))
        standard = Settings(data_dir=trusting.data_dir)
        assert (standard.temporal_address, standard.temporal_tls_ca_file) == (address, None)
        await connect(standard)


async def test_an_authority_that_is_not_trusted_is_said(
    temporal: WorkflowEnvironment, trusting: Settings, tmp_path: Path
) -> None:
    async with listening(passing_on(temporal), CertificateAuthority()) as address:
        await assert_refused(trusting, address, "REELGATE_TEMPORAL_TLS")


async def test_a_client_certificate_opens_what_is_closed_without_one_or_with_a_strange_one(
    temporal: WorkflowEnvironment, trusting: Settings, authority: CertificateAuthority, tmp_path: Path
) -> None:
    async with listening(passing_on(temporal), authority, mutual=True) as address:
        await assert_refused(trusting, address, "REELGATE_TEMPORAL_TLS")
        await assert_refused(certified(trusting, tmp_path, CertificateAuthority()), address, "REELGATE_TEMPORAL_TLS")
        right = certified(trusting, tmp_path, authority).model_copy(update={"temporal_address": address})
        await connect(right)


@pytest.mark.parametrize(("status", "word"), [(16, b"invalid key"), (7, b"not for you")])
async def test_a_wrong_api_key_is_said_at_once_without_being_shown(
    trusting: Settings, authority: CertificateAuthority, status: int, word: bytes
) -> None:
    keyed = Settings.model_validate({**trusting.model_dump(), "temporal_api_key": "marked-wrong-key"})
    async with listening(refusing(status, word), authority) as address:
        began = time.monotonic()
        said = await assert_refused(keyed, address, f"(?s)REELGATE_TEMPORAL_API_KEY.*{word.decode()}")
        assert time.monotonic() - began < 4, "there is nothing to wait for"
        assert "marked-wrong-key" not in said
