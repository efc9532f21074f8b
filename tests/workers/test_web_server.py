"""The sockets that servers listen on."""

from __future__ import annotations

import socket

import pytest

from workers.errors import ConfigurationError
from workers.web_server import listen


def test_connections_send_small_pieces_at_once() -> None:
    with listen("127.0.0.1", 0, setting="port") as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "an answer would wait 40 ms"


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with listen("127.0.0.1", 0, setting="port") as listening, pytest.raises(ConfigurationError, match="REELGATE_PORT"):
        listen("127.0.0.1", listening.getsockname()[1], setting="REELGATE_PORT")
