"""Starting the job of a task, from the API for a single task and from a control worker for an item of a batch."""

from __future__ import annotations

from temporalio.client import Client
from temporalio.common import (
    Priority,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError

from activities.job_description import details, summary
from workflows import naming
from workflows.generation import GenerationWorkflow
from workflows.states import TaskStatus
from workflows.tasks import GenerationInput


async def start_job(client: Client, request: GenerationInput) -> bool:
    """Start a job; False when there is a run of this id already, open or closed.

    Raises:
        RPCError: Temporal did not take it, or did not answer; it may have been started nevertheless.
    """
    user = naming.user_hash(request.user)
    attributes = [
        SearchAttributePair(naming.TASK_STATUS, TaskStatus.QUEUED),
        SearchAttributePair(naming.USER_ID, user),
        SearchAttributePair(naming.MODEL, request.parameters.model),
        *([SearchAttributePair(naming.BATCH_ID, request.batch_id)] if request.batch_id else []),
    ]
    try:
        handle = await client.start_workflow(
            GenerationWorkflow.run,
            request,
            id=request.task_id,
            task_queue=naming.CONTROL_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            priority=Priority(
                priority_key=naming.PRIORITY_KEYS[request.priority],
                fairness_key=user,
                fairness_weight=request.fairness_weight,
            ),
            memo={naming.MEMO_REQUEST: request},
            search_attributes=TypedSearchAttributes(attributes),
            static_summary=summary(request),
            static_details=details(request),
        )
    except WorkflowAlreadyStartedError:
        return False
    # Only the raw reply says whether the run is new; a describe to find out would cost a round trip of every
    # submission.
    reply = handle._start_workflow_response  # noqa: SLF001
    return reply is None or reply.started
