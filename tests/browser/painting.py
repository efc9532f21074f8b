"""A generation that paints: real H.264 of a square that moves, with the progress of a real one, and quickly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from activities.artifacts import ArtifactRepository
from activities.video import encode_clip
from workflows.contracts import GENERATE_CLIP, GenerationActivities
from workflows.failures import FailureCode
from workflows.generation import GenerationWorkflow
from workflows.tasks import (
    AttemptStarted,
    GenerateClipInput,
    GenerateClipResult,
    GenerationParameters,
    Phase,
    Progress,
)

WORKER_ID = "easel/cpu:0"
STEP_SECONDS = 0.06


class PaintedGeneration(GenerationActivities):
    """As many steps as asked for; `hold ...` stands still at half of them until it is stopped, `fail ...` fails."""

    def __init__(self, client: Client, artifacts: ArtifactRepository, folder: Path) -> None:
        self._client = client
        self._artifacts = artifacts
        self._folder = folder

    @activity.defn(name=GENERATE_CLIP)
    async def generate_clip(self, attempt: GenerateClipInput) -> GenerateClipResult:
        info = activity.info()
        assert info.workflow_id is not None
        await self._client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id).signal(
            GenerationWorkflow.attempt_started,
            AttemptStarted(
                token=attempt.token,
                worker_id=WORKER_ID,
                started_at=info.started_time,
                queued_at=info.scheduled_time,
                worker_version="test",
            ),
        )
        p = attempt.parameters
        if p.prompt.startswith("fail"):
            raise ApplicationError("frames are NaN", type=FailureCode.INVALID_OUTPUT, non_retryable=True)
        for step in range(1, p.num_inference_steps + 1):
            _beat(attempt, step)
            await asyncio.sleep(STEP_SECONDS)
            while p.prompt.startswith("hold") and step * 2 >= p.num_inference_steps:
                _beat(attempt, step)
                await asyncio.sleep(STEP_SECONDS)
        clip = await asyncio.to_thread(
            encode_clip,
            painted(p),
            fps=p.fps,
            folder=self._folder / attempt.token,
            max_video_bytes=attempt.limits.max_video_bytes,
        )

        async def may_publish() -> bool:
            return True

        artifact = await self._artifacts.publish(clip, attempt, may_publish=may_publish)
        return GenerateClipResult(artifact=artifact, worker_id=WORKER_ID, worker_version="test", gpu_seconds=2.5)


def _beat(attempt: GenerateClipInput, step: int) -> None:
    steps = attempt.parameters.num_inference_steps
    activity.heartbeat(
        Progress(
            attempt=attempt.attempt,
            worker_id=WORKER_ID,
            phase=Phase.STEP,
            step=step,
            total_steps=steps,
            percent=100 * step / steps,
            eta_seconds=(steps - step) * STEP_SECONDS,
            gpu_seconds=step * STEP_SECONDS,
        )
    )


def painted(p: GenerationParameters) -> npt.NDArray[np.uint8]:
    """A light square that crosses a dark picture, shape [frames, height, width, 3]."""
    frames = np.full((p.num_frames, p.height, p.width, 3), (16, 24, 70), dtype=np.uint8)
    side = p.height // 4
    for number, frame in enumerate(frames):
        left = (p.width - side) * number // max(1, p.num_frames - 1)
        frame[side : 2 * side, left : left + side] = (250, 200, 60)
    return frames
