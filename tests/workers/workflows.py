"""Small workflows for the tests of this folder, and a worker that runs them."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker


@workflow.defn
class FailingWorkflow:
    """Fails with its input in the message."""

    @workflow.run
    async def run(self, text: str) -> None:
        """Fail."""
        raise ApplicationError(f"cannot make {text}", non_retryable=True)


@workflow.defn
class FailingLaterWorkflow:
    """Fails like that once it is told to, with what it was told."""

    def __init__(self) -> None:
        self._told = ""

    @workflow.run
    async def run(self, text: str) -> None:
        """Wait and fail."""
        await workflow.wait_condition(lambda: bool(self._told))
        raise ApplicationError(f"cannot make {text} because of {self._told}", non_retryable=True)

    @workflow.signal
    def tell(self, text: str) -> None:
        """Go on."""
        self._told = text


@workflow.defn
class LoggingWorkflow:
    """Logs a transition as `GenerationWorkflow` does."""

    @workflow.run
    async def run(self, task_id: str) -> None:
        """Log."""
        workflow.logger.info(
            "task_transition",
            extra={
                "task_id": task_id,
                "user_id": "u1",
                "status": "PROCESSING",
                "from_status": "QUEUED",
                "attempt": 2,
                "worker_id": "host/cpu:0",
                "prompt": "a red circle moving right",
            },
        )


@workflow.defn
class ClockReadingWorkflow:
    """Breaks determinism."""

    @workflow.run
    async def run(self) -> float:
        """Read the machine's clock."""
        return time.time()


@activity.defn
async def upcase(text: str) -> str:
    """Its input in capitals."""
    return text.upper()


@workflow.defn
class UpcasingWorkflow:
    """Has an activity do the work."""

    @workflow.run
    async def run(self, text: str) -> str:
        """Hand it over."""
        return await workflow.execute_activity(upcase, text, start_to_close_timeout=timedelta(seconds=10))


@asynccontextmanager
async def worker_for(client: Client, *workflows: type) -> AsyncIterator[str]:
    """Run workflows on a queue of their own; yields its name."""
    queue = f"test-{uuid.uuid4()}"
    async with Worker(client, task_queue=queue, workflows=workflows):
        yield queue
