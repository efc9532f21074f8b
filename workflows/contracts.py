"""Activities as the workflows see them: names, inputs and results, no implementation.

A workflow calls `execute_activity_method(<Contract>.<method>, ...)`; the implementation in `activities/`
subclasses the contract and registers under the same name, so a drifting signature is a type error and
no workflow ever imports an effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from temporalio import activity

from workflows.batches import BatchStep, BatchStepResult, CancelItemsInput, RemoveItemsInput
from workflows.quotas import ListRunningTasksInput, ListUsedInput, RunningTasks, UsedAmount
from workflows.rollouts import BeginRolloutInput, Observation, ObserveInput, RampInput, SettleInput
from workflows.tasks import (
    Artifact,
    DeliverCallbackInput,
    DeliveryAttempt,
    FindArtifactInput,
    GenerateClipInput,
    GenerateClipResult,
    RemoveArtifactsInput,
    RemoveExpiredInput,
    RemoveExpiredResult,
)

GENERATE_CLIP: Final = "generate_clip"
FIND_ARTIFACT: Final = "find_artifact"
REMOVE_ARTIFACTS: Final = "remove_artifacts"
DELIVER_CALLBACK: Final = "deliver_callback"
REMOVE_EXPIRED: Final = "remove_expired"
LIST_RUNNING_TASKS: Final = "list_running_tasks"
LIST_USED: Final = "list_used"
RUN_BATCH_STEP: Final = "run_batch_step"
CANCEL_BATCH_ITEMS: Final = "cancel_batch_items"
REMOVE_BATCH_ITEMS: Final = "remove_batch_items"
BEGIN_ROLLOUT: Final = "begin_rollout"
SET_CANARY_SHARE: Final = "set_canary_share"
OBSERVE_ROLLOUT: Final = "observe_rollout"
SETTLE_ROLLOUT: Final = "settle_rollout"


class GenerationActivities(ABC):
    """Runs on a GPU pool's queue."""

    @activity.defn(name=GENERATE_CLIP)
    @abstractmethod
    async def generate_clip(self, attempt: GenerateClipInput) -> GenerateClipResult:
        """Make one attempt at a clip: signal `attempt_started`, generate, encode, publish.

        Raises:
            ApplicationError: `type` is a `FailureCode`, first detail an `AttemptFailure`.
        """


class ArtifactActivities(ABC):
    """Runs on the control queue."""

    @activity.defn(name=FIND_ARTIFACT)
    @abstractmethod
    async def find_artifact(self, request: FindArtifactInput) -> Artifact | None:
        """Return the published clip under an artifact key, or None."""

    @activity.defn(name=REMOVE_ARTIFACTS)
    @abstractmethod
    async def remove_artifacts(self, request: RemoveArtifactsInput) -> int:
        """Remove what lost attempts left behind and return the number of objects removed."""


class CallbackActivities(ABC):
    """Runs on the callback queue, first as a local activity: the worker of a delivery must register it."""

    @activity.defn(name=DELIVER_CALLBACK)
    @abstractmethod
    async def deliver_callback(self, delivery: DeliverCallbackInput) -> DeliveryAttempt:
        """Make one HTTP attempt. A refused or failed delivery is a result, not an error."""


class AdmissionActivities(ABC):
    """Runs on the control queue, as local activities at first: the worker of an admission must register it."""

    @activity.defn(name=LIST_RUNNING_TASKS)
    @abstractmethod
    async def list_running_tasks(self, request: ListRunningTasksInput) -> RunningTasks:
        """List the running tasks and batches that hold a place of one admission."""

    @activity.defn(name=LIST_USED)
    @abstractmethod
    async def list_used(self, request: ListUsedInput) -> UsedAmount:
        """Sum up what ended since a time and had held a place of one admission."""


class RetentionActivities(ABC):
    """Runs on the control queue."""

    @activity.defn(name=REMOVE_EXPIRED)
    @abstractmethod
    async def remove_expired(self, batch: RemoveExpiredInput) -> RemoveExpiredResult:
        """Remove what is due in the next part of an area; doing it twice is harmless."""


class BatchActivities(ABC):
    """Runs on the control queue."""

    @activity.defn(name=RUN_BATCH_STEP)
    @abstractmethod
    async def run_batch_step(self, step: BatchStep) -> BatchStepResult:
        """Look at tasks and start some; done twice, it starts nothing twice.

        Raises:
            ApplicationError: `INPUT_GONE`, final: the items are not stored any more.
        """

    @activity.defn(name=CANCEL_BATCH_ITEMS)
    @abstractmethod
    async def cancel_batch_items(self, request: CancelItemsInput) -> None:
        """Pass a cancel on to tasks; those that have ended stay as they are."""

    @activity.defn(name=REMOVE_BATCH_ITEMS)
    @abstractmethod
    async def remove_batch_items(self, request: RemoveItemsInput) -> None:
        """Remove the stored items of a batch."""


class RolloutActivities(ABC):
    """Runs on the control queue."""

    @activity.defn(name=BEGIN_ROLLOUT)
    @abstractmethod
    async def begin_rollout(self, request: BeginRolloutInput) -> str:
        """Give the canary its share of new tasks and return the build id of the current version.

        Raises:
            ApplicationError: `ROLLOUT_REFUSED`, final: there is no such version, or none to compare it with.
        """

    @activity.defn(name=SET_CANARY_SHARE)
    @abstractmethod
    async def set_canary_share(self, request: RampInput) -> bool:
        """Change the share. False: the deployment is not as the rollout left it, and stays as it is."""

    @activity.defn(name=OBSERVE_ROLLOUT)
    @abstractmethod
    async def observe_rollout(self, request: ObserveInput) -> Observation:
        """Count what has ended since the last look, and compare."""

    @activity.defn(name=SETTLE_ROLLOUT)
    @abstractmethod
    async def settle_rollout(self, request: SettleInput) -> bool:
        """Promote or roll back. False: the deployment is not as the rollout left it, and stays as it is."""
