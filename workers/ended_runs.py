"""Hears of every task and callback when the run of its workflow closes, once per run.

An interceptor, so that no workflow knows of metrics and no command changes. It reads the final record from the memo
of the run that closes and hands it out of the sandbox. A replay tells nothing; a last workflow task that is done
again by this process (it was refused, or its answer was late) is told by its run id. A terminated run runs no code,
so nobody hears of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from temporalio import workflow
from temporalio.worker import (
    ExecuteWorkflowInput,
    Interceptor,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
)

from activities.memory import remember
from workflows.naming import MEMO_RECORD
from workflows.tasks import CallbackRecord, CallbackStatus, TaskRecord

Ended = TaskRecord | CallbackRecord

_EXTERN: Final = "__reelgate_run_ended"
_REMEMBERED_RUNS: Final = 10_000
_CALLBACK_ENDS: Final = frozenset({CallbackStatus.SUCCEEDED, CallbackStatus.FAILED})
_RECORDS: Final[Mapping[str, type[Ended]]] = {"GenerationWorkflow": TaskRecord, "CallbackWorkflow": CallbackRecord}


class EndedRuns(Interceptor):
    """Tells of every run of a task or a callback that closes in this worker.

    Args:
        task: hears of tasks.
        callback: hears of callbacks.
    """

    def __init__(
        self,
        *,
        task: Callable[[TaskRecord], None] | None = None,
        callback: Callable[[CallbackRecord], None] | None = None,
    ) -> None:
        self._task = task
        self._callback = callback
        self._told: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def workflow_interceptor_class(self, input: WorkflowInterceptorClassInput) -> type[WorkflowInboundInterceptor]:  # noqa: A002 - the SDK's name
        """The part inside the sandbox; `tell` is called outside of it."""
        input.unsafe_extern_functions[_EXTERN] = self.tell
        return _EndedRun

    def tell(self, run_id: str, record: Ended) -> None:
        """Pass on what ended, once per run. Called on the threads that run workflow tasks."""
        with self._lock:
            if run_id in self._told:
                return
            remember(self._told, run_id, None, at_most=_REMEMBERED_RUNS)
        if isinstance(record, CallbackRecord):
            if self._callback is not None:
                self._callback(record)
        elif self._task is not None:
            self._task(record)


class _EndedRun(WorkflowInboundInterceptor):
    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:  # noqa: A002, ANN401 - the SDK's signature
        """Run, and tell when the run closes. An eviction and a continue-as-new are other kinds of exceptions."""
        try:
            result = await super().execute_workflow(input)
        except (Exception, asyncio.CancelledError):
            self._tell()
            raise
        self._tell()
        return result

    def _tell(self) -> None:
        kind = _RECORDS.get(workflow.info().workflow_type)
        if kind is None or workflow.unsafe.is_replaying():
            return
        record = workflow.memo_value(MEMO_RECORD, None, type_hint=kind)
        if record is not None and _is_final(record):
            tell = cast("Callable[[str, Ended], None]", workflow.extern_functions()[_EXTERN])
            tell(workflow.info().run_id, record)


def _is_final(record: Ended) -> bool:
    if isinstance(record, CallbackRecord):
        return record.status in _CALLBACK_ENDS
    return record.finished_at is not None
