"""What the supervisor and its inference process say to each other, and how it is framed on their socket pair.

One channel carries everything, the stop request included: a shared event would leave its lock held when the
process is killed at the wrong moment, and the supervisor would hang on it.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
from dataclasses import dataclass
from typing import Final

from activities.inference.health import ModelState
from activities.inference.specs import ModelSpec
from workflows.failures import FailureCode
from workflows.tasks import GenerationParameters, Phase

_LENGTH: Final = struct.Struct("!I")


@dataclass(frozen=True, kw_only=True)
class Configure:
    """First message to the process."""

    device: str
    weights: str
    """Folder of the weights that come with the product."""
    cache: str
    """Folder of the tiny pipelines built on the spot."""
    max_loaded_models: int
    threads: int | None
    """torch threads; None leaves torch's choice."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load a model ahead of its first task; answered by `ModelChanged`."""

    spec: ModelSpec


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate one clip; answered phase by phase, last by `Finished`, `Failed` or `Stopped`."""

    job: int
    spec: ModelSpec
    parameters: GenerationParameters
    image: str | None
    """Path of the input image."""
    frames: str
    """Path of the .npy file to write: uint8 [T, H, W, 3]."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop a job at the next denoising step or phase boundary."""

    job: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The device can be used."""

    description: str


@dataclass(frozen=True, kw_only=True)
class SetupFailed:
    """The device cannot be used."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelChanged:
    """A model was loaded, unloaded, or failed to load."""

    name: str
    state: ModelState
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseStarted:
    """A job entered a phase. `LOAD` is also the acknowledgement of the job."""

    job: int
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A denoising step ended; `step` of `total_steps` are done."""

    job: int
    step: int
    total_steps: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The frames file is complete."""

    job: int


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The job was stopped as asked; nothing was written."""

    job: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The job failed."""

    job: int
    code: FailureCode
    message: str
    """Safe to show to the client."""
    trace: str
    """Stack without the exception's own text, for the worker's log."""
    fatal: bool = False
    """The process cannot go on and exits."""


ToProcess = Configure | Load | Generate | Stop
FromProcess = Ready | SetupFailed | ModelChanged | PhaseStarted | StepDone | Finished | Stopped | Failed


def framed(message: ToProcess | FromProcess) -> bytes:
    """A message as bytes on the wire."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> FromProcess:
    """The next message from the process.

    Raises:
        EOFError: the process is gone.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: FromProcess = pickle.loads(await reader.readexactly(length))  # noqa: S301 - from our own process
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
    return message


class SupervisorGoneError(Exception):
    """The other end of the channel is closed: the worker ended or was killed."""


class Channel:
    """The process's end: blocking, used by one thread. Every method raises `SupervisorGoneError`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: FromProcess) -> None:
        """Send a message."""
        try:
            self._socket.sendall(framed(message))
        except OSError as error:
            raise SupervisorGoneError from error

    def receive(self) -> ToProcess:
        """Wait for the next message."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        message: ToProcess = pickle.loads(self._exactly(length))  # noqa: S301 - from our own supervisor
        return message

    def pending(self) -> bool:
        """Whether a message waits to be received."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def _exactly(self, size: int) -> bytes:
        try:
            data = self._socket.recv(size, socket.MSG_WAITALL)
        except OSError as error:
            raise SupervisorGoneError from error
        if len(data) < size:
            raise SupervisorGoneError
        return data
