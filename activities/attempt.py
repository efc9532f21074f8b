"""One attempt at a clip on a leased device: input image, inference, encoding, publication, and its scratch folder.

Knows nothing of Temporal. Cancelling `make` is how an attempt is stopped: the device is stopped at its next step or
its process is killed, what was put is removed, the scratch folder goes, and then the cancellation comes through.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from activities.artifacts import ArtifactRepository
from activities.inference.leases import Lease
from activities.inference.run import InferenceError, InferenceRun, InferenceStoppedError
from activities.inference.specs import ModelSpec
from activities.storage import ObjectNotFoundError, ObjectStore
from workflows.failures import FailureCode
from workflows.tasks import Artifact, GenerateClipInput, GenerationParameters, Phase, Progress

if TYPE_CHECKING:
    from activities.video import EncodedClip

TICK_SECONDS: Final = 0.1
ENCODER_WAIT_SECONDS: Final = 2.0
"""How long a stopped attempt waits for an encoder that cannot be interrupted."""

# What of an attempt is done when a phase begins, in percent; the steps share the part up to the decoding.
_PERCENT_AT: Final = {
    Phase.LOAD: 0.0,
    Phase.ENCODE_PROMPT: 3.0,
    Phase.STEP: 5.0,
    Phase.DECODE: 90.0,
    Phase.ENCODE_VIDEO: 95.0,
    Phase.STORE: 98.0,
}


class AttemptError(Exception):
    """An attempt failed for a reason that has a code. The message is safe to show to the client."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class SafetyChecker(Protocol):
    """Looks at what goes in and what comes out. Off unless the worker is given one."""

    async def prompt_refusal(self, parameters: GenerationParameters) -> str | None:
        """Why the request is refused, in words for the client, or None. Called before the GPU is used."""

    async def clip_refusal(self, frames: Path, parameters: GenerationParameters) -> str | None:
        """Why the result is refused, or None. `frames` is a .npy file, uint8 [T, H, W, 3]."""


@dataclass(frozen=True, kw_only=True)
class AttemptParts:
    """What every attempt of a worker works with."""

    store: ObjectStore
    artifacts: ArtifactRepository
    scratch: Path
    safety: SafetyChecker | None = None


class Attempt:
    """One attempt. `progress` may be asked at any time."""

    def __init__(self, asked: GenerateClipInput, lease: Lease, parts: AttemptParts) -> None:
        self._asked = asked
        self._lease = lease
        self._parts = parts
        self._phase: Phase | None = None
        self._run: InferenceRun | None = None
        self._encoding: asyncio.Task[EncodedClip] | None = None

    @property
    def phase(self) -> Phase | None:
        """Where it is; None before the model is asked for."""
        return self._run.phase if self._phase is None and self._run is not None else self._phase

    @property
    def gpu_seconds(self) -> float:
        """Busy time of the inference process so far."""
        return 0.0 if self._run is None else self._run.gpu_seconds

    def progress(self) -> Progress:
        """What the heartbeat tells."""
        phase, run = self.phase or Phase.LOAD, self._run
        percent = _PERCENT_AT[phase]
        if run is not None and phase is Phase.STEP and run.total_steps:
            percent += (_PERCENT_AT[Phase.DECODE] - percent) * run.step / run.total_steps
        return Progress(
            attempt=self._asked.attempt,
            worker_id=self._lease.device.worker_id,
            phase=phase,
            step=0 if run is None else run.step,
            total_steps=self._asked.parameters.num_inference_steps if run is None else run.total_steps,
            percent=round(percent, 1),
            eta_seconds=run.remaining_step_seconds if run is not None and phase is Phase.STEP else None,
            gpu_seconds=self.gpu_seconds,
        )

    async def make(self, spec: ModelSpec, *, may_publish: Callable[[], Awaitable[bool]]) -> Artifact:
        """Make and publish the clip. Gives the lease back as soon as the frames are on the host.

        Raises:
            AttemptError: with the code of what went wrong.
            InferenceError: likewise, from the inference process.
            DeviceNotReadyError: the device cannot start now.
            PublishRefusedError: `may_publish` said no.
            StoreUnavailableError: the store did not answer.
        """
        self._parts.scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="attempt-", dir=self._parts.scratch))
        published: Artifact | None = None
        try:
            await self._refuse_prompt()
            frames = folder / "frames.npy"
            await self._infer(spec, await self._image(folder), frames)
            await self._refuse_clip(frames)
            published = await self._publish(frames, folder, may_publish)
            return published
        finally:
            removing = asyncio.create_task(self._remove(folder))
            try:
                await asyncio.shield(removing)
            except asyncio.CancelledError:
                await removing
                # A stop that comes when the clip is out comes too late: the result must not be lost with it.
                if published is None:
                    raise

    async def _image(self, folder: Path) -> Path | None:
        key = self._asked.parameters.image_key
        if key is None:
            return None
        path = folder / "image"
        try:
            await asyncio.to_thread(path.write_bytes, await self._parts.store.get(key))
        except ObjectNotFoundError:
            raise AttemptError(FailureCode.INPUT_GONE, "It was removed, or its retention has ended.") from None
        return path

    async def _infer(self, spec: ModelSpec, image: Path | None, frames: Path) -> None:
        asked = self._asked
        run = self._run = self._lease.device.begin(
            spec, asked.parameters, image=image, frames=frames, limits=asked.limits
        )
        too_slow = False
        try:
            while not await run.wait(TICK_SECONDS):
                if not too_slow and self._is_too_slow(run):
                    too_slow = True
                    run.stop()
        finally:
            # Also when this task is cancelled: the lease goes back when the device is free, not before.
            run.stop()
            while not await run.wait(TICK_SECONDS):
                pass
            self._lease.release()
        try:
            run.result()
        except InferenceStoppedError:
            code = FailureCode.PROCESSING_TIMEOUT
            message = f"Stopped after {run.step} of {run.total_steps} steps in {run.gpu_seconds:.0f} s."
            raise AttemptError(code, message) from None
        except InferenceError:
            self._phase = run.phase
            raise

    def _is_too_slow(self, run: InferenceRun) -> bool:
        """Past the soft limit, unless the measured step rate says that the rest fits into the grace."""
        if run.loaded is None:
            return False
        limits = self._asked.limits
        over = time.monotonic() - run.loaded - limits.processing_timeout_seconds
        if over < 0:
            return False
        remaining = run.remaining_step_seconds
        return remaining is None or remaining > limits.processing_grace_seconds - over

    async def _publish(self, frames: Path, folder: Path, may_publish: Callable[[], Awaitable[bool]]) -> Artifact:
        limit = self._asked.limits.encode_store_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                self._phase = Phase.ENCODE_VIDEO
                clip = await self._encode(frames, folder)
                self._phase = Phase.STORE
                return await self._parts.artifacts.publish(clip, self._asked, may_publish=may_publish)
        except TimeoutError:
            message = f"Encoding and storing did not end within {limit:g} s."
            raise AttemptError(FailureCode.PHASE_TIMEOUT, message) from None

    async def _encode(self, frames: Path, folder: Path) -> EncodedClip:
        fps, max_bytes = self._asked.parameters.fps, self._asked.limits.max_video_bytes
        self._encoding = asyncio.create_task(asyncio.to_thread(_encoded, frames, fps, folder, max_bytes))
        return await asyncio.shield(self._encoding)

    async def _refuse_prompt(self) -> None:
        if self._parts.safety is not None:
            _refuse(await self._parts.safety.prompt_refusal(self._asked.parameters))

    async def _refuse_clip(self, frames: Path) -> None:
        if self._parts.safety is not None:
            _refuse(await self._parts.safety.clip_refusal(frames, self._asked.parameters))

    async def _remove(self, folder: Path) -> None:
        encoding = self._encoding
        if encoding is not None and not encoding.done():
            await asyncio.wait({encoding}, timeout=ENCODER_WAIT_SECONDS)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if encoding is not None and not encoding.done():
            encoding.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise AttemptError(FailureCode.SAFETY_REJECTED, reason)


def _encoded(frames: Path, fps: float, folder: Path, max_bytes: int) -> EncodedClip:
    # Only here, in a thread of a GPU worker: the module needs numpy and PyAV.
    import numpy as np  # noqa: PLC0415

    from activities.video import ClipTooLargeError, encode_clip  # noqa: PLC0415

    try:
        return encode_clip(np.load(frames), fps=fps, folder=folder, max_video_bytes=max_bytes)
    except ClipTooLargeError as error:
        raise AttemptError(FailureCode.ARTIFACT_TOO_LARGE, str(error)) from None
