"""How a round of the attempt loop ended, and how the whole task does."""

from __future__ import annotations

from dataclasses import dataclass

from workflows.failures import FailureCode
from workflows.states import TaskStatus
from workflows.tasks import Artifact


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """How one round ended."""

    artifact: Artifact | None = None
    failure: FailureCode | None = None
    """None with no artifact: the round was stopped on our own request."""
    detail: str | None = None
    gpu_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the task ends."""

    status: TaskStatus
    artifact: Artifact | None = None
    code: FailureCode | None = None
    message: str | None = None
