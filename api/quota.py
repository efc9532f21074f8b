"""What an admission says of a user's quota, and the operator's reset of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio.client import Client, WorkflowQueryRejectedError
from temporalio.common import QueryRejectCondition, WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from api.problems import ControlUnavailableError, TemporalUnavailableError
from api.temporal_calls import bounded
from workflows.admission import AdmissionWorkflow
from workflows.naming import CONTROL_QUEUE, admission_id, tenant_admission_id, user_hash
from workflows.quotas import AdmissionInput, Usage
from workflows.tasks import User

QUOTA_TIMEOUT: Final = timedelta(seconds=3)


async def read_usage(client: Client, user: User, *, tenant: bool = False, limit: timedelta = QUOTA_TIMEOUT) -> Usage:
    """Read what a user holds, has left and has used.

    A query: an update or a memo kept up to date would cost an event and an action per task, for a number that is
    seldom read. An admission that is not open has nothing that still counts, so it needs no worker to say so.

    Args:
        client: a connected client.
        user: whose quota.
        tenant: read the one that all end users of the user's tenant share instead.
        limit: of the whole call.

    Raises:
        ControlUnavailableError: it is open, but no worker answered.
    """
    now = datetime.now(UTC)
    handle = client.get_workflow_handle(tenant_admission_id(user.tenant) if tenant else admission_id(user))
    try:
        return await bounded(
            lambda: handle.query(AdmissionWorkflow.usage, now, reject_condition=QueryRejectCondition.NOT_OPEN),
            limit=limit,
        )
    except WorkflowQueryRejectedError:
        return Usage(at=now)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return Usage(at=now)
        raise
    except TemporalUnavailableError as error:
        raise ControlUnavailableError("The admission did not answer in time; is a control worker running?") from error


async def reset_quota(client: Client, user: User, *, tenant: bool = False, limit: timedelta = QUOTA_TIMEOUT) -> None:
    """Operator: fill the bucket, forget the used amount and count the running tasks again. Needs no worker.

    Args:
        client: a connected client.
        user: whose quota.
        tenant: reset the one that all end users of the user's tenant share instead.
        limit: of the whole call.

    Raises:
        TemporalUnavailableError: the server did not answer in time.
    """
    await bounded(
        lambda: client.start_workflow(
            AdmissionWorkflow.run,
            AdmissionInput(user_hash="" if tenant else user_hash(user)),
            id=tenant_admission_id(user.tenant) if tenant else admission_id(user),
            task_queue=CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            start_signal="reset_quota",
        ),
        limit=limit,
    )
