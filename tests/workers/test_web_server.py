"""The sockets that servers listen on."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fastapi import FastAPI, Request

from tests.api.stand import http_client
from workers.errors import ConfigurationError
from workers.web_server import embedded_server, listen


def test_connections_send_small_pieces_at_once() -> None:
    with listen("127.0.0.1", 0, setting="port") as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "an answer would wait 40 ms"


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with listen("127.0.0.1", 0, setting="port") as listening, pytest.raises(ConfigurationError, match="REELGATE_PORT"):
        listen("127.0.0.1", listening.getsockname()[1], setting="REELGATE_PORT")


async def test_what_a_connection_says_of_where_it_comes_from_is_left_to_the_app() -> None:
    app = FastAPI()

    @app.get("/")
    async def seen(request: Request) -> list[str]:
        return [request.client.host if request.client else "", request.url.scheme]

    server = embedded_server(app, graceful_seconds=1)
    with listen("127.0.0.1", 0, setting="port") as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        claimed = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https"}
        async with http_client(f"http://127.0.0.1:{listening.getsockname()[1]}", claimed) as http:
            assert (await http.get("/")).json() == ["127.0.0.1", "http"]
        server.stop()
        await serving


async def test_an_idle_connection_outlives_the_seconds_after_which_clients_drop_theirs() -> None:
    server = embedded_server(FastAPI(), graceful_seconds=1)
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with listen("127.0.0.1", 0, setting="port") as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(request)
        await reader.readuntil(b"}")
        await asyncio.sleep(6)
        writer.write(request)
        assert await reader.readuntil(b"}")
        writer.close()
        server.stop()
        await serving
