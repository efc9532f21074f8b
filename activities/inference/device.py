"""Keeps the inference process of one device alive and runs one generation at a time on it.

Whatever the process does, the worker goes on: a phase past its limit, a process that dies, a device that cannot be
used are states and errors here, and a new process is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from activities.inference.builtin_weights import WEIGHTS
from activities.inference.child import Child, ChildEndedError
from activities.inference.health import DeviceHealth, DeviceState, ModelHealth, ModelState
from activities.inference.messages import (
    Configure,
    Failed,
    Finished,
    FromProcess,
    Generate,
    Load,
    ModelChanged,
    PhaseStarted,
    Ready,
    SetupFailed,
    StepDone,
    Stop,
    Stopped,
)
from activities.inference.run import InferenceError, InferenceRun, InferenceStoppedError
from activities.inference.specs import ModelSpec
from workflows.failures import FailureCode
from workflows.tasks import GenerationParameters, Limits

SETUP_RETRY_MAX_SECONDS: Final = 30.0
KILL_WAIT_SECONDS: Final = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """How the inference processes of a pool are set up."""

    cache: Path
    """Folder of the tiny pipelines built on the spot."""
    weights: Path = WEIGHTS
    """Folder of the weights that come with the product."""
    max_loaded_models: int = 2
    threads: int | None = None
    setup_timeout_seconds: float = 120.0
    preload_timeout_seconds: float = 600.0


class DeviceNotReadyError(Exception):
    """No generation can start on the device now."""


class _SetupError(Exception):
    """The process cannot be used; the message says why."""


class _FatalFaultError(Exception):
    """A failure that the process does not survive."""


class InferenceDevice:
    """One device, its inference process, and what runs on it."""

    def __init__(
        self,
        *,
        device: str,
        worker_id: str,
        models: Sequence[ModelSpec],
        preload: Sequence[ModelSpec],
        options: ProcessOptions,
        on_change: Callable[[], None],
        on_step: Callable[[str, float], None] | None = None,
    ) -> None:
        self.device = device
        self.worker_id = worker_id
        self.leased = False
        self._preload = preload
        self._options = options
        self._on_change = on_change
        self._on_step = on_step
        self._state = DeviceState.STARTING
        self._reason: str | None = None
        self._models = {spec.name: ModelHealth(name=spec.name) for spec in models}
        self._child: Child | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._busy_seconds = 0.0
        self._tasks = 0
        self._restarts = 0
        self._jobs = 0
        self._end_reason: str | None = None
        """Why the running process is being ended, when we end it."""

    @property
    def ready(self) -> bool:
        """Whether a generation can start now."""
        return self._state is DeviceState.READY

    def check_ready(self) -> Child:
        """The process, if a generation can start now.

        Raises:
            DeviceNotReadyError: none can.
        """
        if not self.ready or self._child is None:
            raise DeviceNotReadyError(f"device {self.device} is {self._state}")
        return self._child

    def health(self) -> DeviceHealth:
        """A snapshot."""
        return DeviceHealth(
            device=self.device,
            worker_id=self.worker_id,
            state=self._state,
            reason=self._reason,
            pid=None if self._child is None else self._child.pid,
            leased=self.leased,
            busy_seconds=self._busy_seconds,
            tasks=self._tasks,
            restarts=self._restarts,
            models=tuple(self._models.values()),
        )

    def start(self) -> None:
        """Start the process, and from then on start it again whenever it is gone."""
        self._keeper = asyncio.create_task(self._keep(), name=f"inference-{self.device}")

    async def close(self) -> None:
        """End the process for good."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper

    def begin(
        self, spec: ModelSpec, parameters: GenerationParameters, *, image: Path | None, frames: Path, limits: Limits
    ) -> InferenceRun:
        """Start a generation.

        Args:
            spec: the model.
            parameters: legal for the model.
            image: input image, for image-to-video.
            frames: where the process writes the frames: .npy, uint8 [T, H, W, 3].
            limits: time limits of the phases.

        Raises:
            DeviceNotReadyError: no generation can start now.
        """
        child = self.check_ready()
        self._jobs += 1
        job = Generate(
            job=self._jobs,
            spec=spec,
            parameters=parameters,
            image=None if image is None else str(image),
            frames=str(frames),
        )
        run = InferenceRun(job, limits, send_stop=lambda number: child.send(Stop(job=number)), on_step=self._on_step)
        self._set(DeviceState.BUSY)
        child.send(job)  # Now, not when the conversation gets its turn: a stop may be asked for before that.
        run.drive(self._converse(child, run))
        return run

    async def _converse(self, child: Child, run: InferenceRun) -> None:
        try:
            async with asyncio.timeout(None) as watchdog:
                with run.watched_by(watchdog):
                    while not self._follow(await child.receive(), run):
                        pass
        except TimeoutError:
            what = f"{run.phase} did not end within its limit"
            await self._abandon(child, what)
            if run.stopping:
                raise InferenceStoppedError(what) from None
            raise InferenceError(FailureCode.PHASE_TIMEOUT, f"The phase {what}.") from None
        except ChildEndedError as error:
            await self._abandon(child, f"it {error}")
            if run.stopping:
                raise InferenceStoppedError(str(error)) from None
            raise InferenceError(FailureCode.DRIVER_FAULT, f"The process {error} in phase {run.phase}.") from None
        except _FatalFaultError as error:
            await self._abandon(child, str(error))
            raise InferenceError(FailureCode.DRIVER_FAULT, str(error)) from None
        finally:
            self._busy_seconds += run.gpu_seconds
            self._tasks += 1
            if self._child is child and self._state in {DeviceState.BUSY, DeviceState.LOADING}:
                self._set(DeviceState.READY)

    def _follow(self, message: FromProcess, run: InferenceRun) -> bool:
        """Take note of a message; True when it was the last one of a job that succeeded."""
        match message:
            case ModelChanged():
                self._note_model(message)
                self._set(DeviceState.LOADING if message.state is ModelState.LOADING else DeviceState.BUSY)
            case PhaseStarted(phase=phase):
                run.enter(phase)
            case StepDone(step=step, total_steps=total):
                run.advance(step, total)
            case Finished():
                return True
            case Stopped():
                raise InferenceStoppedError("stopped as asked")
            case Failed(code=code, message=text, trace=trace, fatal=fatal):
                logger.warning("generation failed on %s: %s\n%s", self.device, code, trace)
                raise _FatalFaultError(text) if fatal else InferenceError(code, text)
        return False

    async def _abandon(self, child: Child, reason: str) -> None:
        """End the process; the keeper starts a new one."""
        self._end_reason = reason
        self._set(DeviceState.RESTARTING, reason)
        # A process that hangs inside the driver may not even die; its device stays out of service until it does.
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_SECONDS):
                await child.end()

    async def _keep(self) -> None:
        failures = 0
        while True:
            try:
                child = await self._bring_up()
            except Exception as error:  # Whatever it is, the next try may go better, and the health says why.
                failures += 1
                logger.exception("inference process for %s cannot be set up", self.device)
                self._set(DeviceState.SETUP_FAILED, str(error))
                await asyncio.sleep(min(2.0**failures, SETUP_RETRY_MAX_SECONDS))
                continue
            failures = 0
            try:
                self._child = child
                self._set(DeviceState.READY)
                how = await child.ended()
            finally:
                self._child = None
                await child.end()
            self._restarts += 1
            reason, self._end_reason = self._end_reason or f"it {how}", None
            logger.error("inference process for %s is started again: %s", self.device, reason)
            self._forget_models()
            self._set(DeviceState.RESTARTING, reason)

    async def _bring_up(self) -> Child:
        """Start a process and load what is loaded ahead.

        Raises:
            _SetupError: it cannot be used.
            OSError: it cannot be started.
        """
        options = self._options
        child = await Child.start(threads=options.threads)
        try:
            child.send(
                Configure(
                    device=self.device,
                    weights=str(options.weights),
                    cache=str(options.cache),
                    max_loaded_models=options.max_loaded_models,
                    threads=options.threads,
                )
            )
            async with asyncio.timeout(options.setup_timeout_seconds):
                await self._greeting(child)
            for spec in self._preload:
                self._set(DeviceState.LOADING)
                async with asyncio.timeout(options.preload_timeout_seconds):
                    await self._load_ahead(child, spec)
        except BaseException as error:
            await child.end()
            if isinstance(error, TimeoutError):
                raise _SetupError("it did not come up in time") from error
            if isinstance(error, ChildEndedError):
                raise _SetupError(f"it {error}") from error
            raise
        return child

    async def _greeting(self, child: Child) -> None:
        match await child.receive():
            case Ready(description=description):
                logger.info("inference process for %s is up: %s", self.device, description)
            case SetupFailed(reason=reason):
                raise _SetupError(reason)
            case other:
                raise _SetupError(f"it said {type(other).__name__} first")

    async def _load_ahead(self, child: Child, spec: ModelSpec) -> None:
        child.send(Load(spec=spec))
        while True:
            message = await child.receive()
            if isinstance(message, ModelChanged):
                self._note_model(message)
                if message.name == spec.name and message.state in {ModelState.READY, ModelState.FAILED}:
                    return

    def _note_model(self, changed: ModelChanged) -> None:
        self._models[changed.name] = ModelHealth(name=changed.name, state=changed.state, reason=changed.reason)

    def _forget_models(self) -> None:
        for name, model in self._models.items():
            if model.state is not ModelState.FAILED:
                self._models[name] = ModelHealth(name=name)

    def _set(self, state: DeviceState, reason: str | None = None) -> None:
        self._state, self._reason = state, reason
        self._on_change()
