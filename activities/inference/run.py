"""One generation on a device as the worker sees it: where it is, how fast it goes, and how to stop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

from activities.inference.messages import Generate
from workflows.failures import FailureCode
from workflows.tasks import Limits, Phase


class InferenceError(Exception):
    """A generation failed. The message is safe to show to the client."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class InferenceStoppedError(Exception):
    """A generation was stopped as asked; the device is free or its process is being restarted."""


class InferenceRun:
    """A generation under way. Times are of the monotonic clock."""

    def __init__(
        self,
        job: Generate,
        limits: Limits,
        *,
        send_stop: Callable[[int], None],
        on_step: Callable[[str, float], None] | None = None,
    ) -> None:
        self.job = job
        self.limits = limits
        self.phase = Phase.LOAD
        self.step = 0
        self.total_steps = job.parameters.num_inference_steps
        self.started = time.monotonic()
        self.loaded: float | None = None
        """When the load phase ended."""
        self.ended: float | None = None
        self.stopping = False
        self._send_stop = send_stop
        self._on_step = on_step
        self._first_step_started: float | None = None
        self._last_step_ended: float | None = None
        # The process is idle: it answers at once or it hangs.
        self._deadline = self.started + limits.kill_grace_seconds
        self._watchdog: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def gpu_seconds(self) -> float:
        """Busy time of the inference process so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    @property
    def seconds_per_step(self) -> float | None:
        """Mean of the steps done; None before the first has ended."""
        if self.step == 0 or self._first_step_started is None or self._last_step_ended is None:
            return None
        return (self._last_step_ended - self._first_step_started) / self.step

    @property
    def remaining_step_seconds(self) -> float | None:
        """Estimate for the steps still to come; None while there is nothing to estimate from."""
        if self.phase is Phase.DECODE:
            return 0.0
        pace = self.seconds_per_step
        if pace is None or self._last_step_ended is None:
            return None
        spent_on_this_step = time.monotonic() - self._last_step_ended
        return (self.total_steps - self.step) * pace - min(spent_on_this_step, pace)

    def stop(self) -> None:
        """Ask for an end at the next denoising step or phase boundary.

        A phase that does not come to one within the kill grace is ended with its process; only the decoding,
        which cannot be interrupted and is nearly the end, gets its own limit.
        """
        if self.stopping or self._task is None or self._task.done():
            return
        self.stopping = True
        self._send_stop(self.job.job)
        if self.phase is not Phase.DECODE:
            self._set_deadline(time.monotonic() + self.limits.kill_grace_seconds)

    def drive(self, conversation: Coroutine[None, None, None]) -> None:
        """Start the conversation with the process that moves this run on."""
        self._task = asyncio.create_task(conversation)
        self._task.add_done_callback(self._note_end)

    async def wait(self, timeout: float) -> bool:
        """Wait for the end, at most `timeout` seconds, and tell whether it came. A cancelled wait stops nothing."""
        if self._task is None:
            raise RuntimeError("the run was never started")
        return bool((await asyncio.wait({self._task}, timeout=timeout))[0])

    def result(self) -> None:
        """Return if the frames file is complete; called after the end.

        Raises:
            InferenceError: the generation failed.
            InferenceStoppedError: it was stopped.
        """
        if self._task is None:
            raise RuntimeError("the run was never started")
        self._task.result()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self.ended = time.monotonic()
        if not task.cancelled():
            task.exception()  # Looked at, or the loop would complain when nobody asks for the result.

    @contextmanager
    def watched_by(self, watchdog: asyncio.Timeout) -> Iterator[None]:
        """Let `watchdog` expire when a phase is past its limit."""
        self._watchdog = watchdog
        self._set_deadline(self._deadline)
        try:
            yield
        finally:
            self._watchdog = None

    def enter(self, phase: Phase) -> None:
        """Note that a phase began."""
        now = time.monotonic()
        if phase is Phase.ENCODE_PROMPT and self.loaded is None:
            self.loaded = now
        if phase is Phase.STEP:
            self.step = 0
            self._first_step_started = now
        self.phase = phase
        self._extend(now)

    def advance(self, step: int, total_steps: int) -> None:
        """Note that a step ended."""
        now, began = time.monotonic(), self._first_step_started if self.step == 0 else self._last_step_ended
        if self._on_step is not None and began is not None:
            self._on_step(self.job.spec.name, now - began)
        self.step, self.total_steps = step, total_steps
        self._last_step_ended = now
        self._extend(now)

    def _extend(self, now: float) -> None:
        if not self.stopping or self.phase is Phase.DECODE:
            self._set_deadline(now + phase_limit(self.limits, self.phase))

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._watchdog is not None and not self._watchdog.expired():
            # The event loop's clock is the monotonic clock with another zero on some platforms.
            self._watchdog.reschedule(asyncio.get_running_loop().time() + deadline - time.monotonic())


def phase_limit(limits: Limits, phase: Phase) -> float:
    """How long a phase of the inference process, or one denoising step, may take, in seconds."""
    match phase:
        case Phase.LOAD:
            return limits.load_timeout_seconds
        case Phase.ENCODE_PROMPT:
            return limits.encode_prompt_timeout_seconds
        case Phase.STEP:
            return limits.step_timeout_seconds
        case Phase.DECODE:
            return limits.decode_timeout_seconds
        case Phase.ENCODE_VIDEO | Phase.STORE:
            return limits.encode_store_timeout_seconds
