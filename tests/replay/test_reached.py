"""Every branch of every workflow is in a stored history: their replay reaches every line of the workflow classes."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import pytest
from temporalio.worker import UnsandboxedWorkflowRunner

import workflows
from tests.replay.replaying import replay_failures
from workers.registry import WORKFLOWS

NOT_REPLAYED: Final = frozenset({"refuse", "refuse_decision", "usage"})
"""Validators and queries: a replay calls none, and they issue no commands."""

UNREACHED: Final[Mapping[str, frozenset[str]]] = {
    "GenerationWorkflow": frozenset(
        {
            # Answers of updates in a moment that cannot be met on purpose; no command follows.
            "return SoftCancelReply.ENDED",
            "return False",
            # Cancelled before the server knew of the activity: the same commands as with the row below it.
            "return RoundOutcome(gpu_seconds=self._elapsed_seconds())",
        }
    ),
    "CallbackWorkflow": frozenset(
        {
            # A cancel that met a finished attempt: a race, with the commands of `callback-canceled-waiting`.
            "raise asyncio.CancelledError  # noqa: TRY301 - ends like the cancels that do raise",
        }
    ),
    "AdmissionWorkflow": frozenset(
        {
            # A race between a listing and two admits; no command follows.
            "raise _error(confirmed)",
            # Places that may have leaked are counted again: the listing of `admission-withdrawn`, an hour later.
            "self._recount = True",
            # Long again at once, and a recount that nobody waits for: the loop goes on without a command.
            "continue",
            "self._ledger.end_listing()",
        }
    ),
    "BatchWorkflow": frozenset(
        {
            # A cancel while a step hangs: the commands of `batch-canceled-hard`, earlier.
            "await self._stop_items()",
            # After a `reset` only, and a store that is down at the end; no command follows.
            "except WorkflowAlreadyStartedError:",
            'workflow.logger.info("callback_exists", extra={"batch_id": given.batch_id})',
            "except ActivityError:",
            'workflow.logger.warning("batch_items_kept", extra={"batch_id": self._given.batch_id})',
        }
    ),
    "RolloutWorkflow": frozenset(
        {
            # After a hundred decisions; no command follows.
            "decisions = (decisions[0], *decisions[-(MAX_DECISIONS - 1) :])",
        }
    ),
}
"""By workflow: lines that no stored history reaches, and why that is no gap."""


class _Reached:
    """Lines of the workflow files that ran."""

    def __init__(self) -> None:
        self.lines: defaultdict[str, set[int]] = defaultdict(set)
        self._folder = str(Path(workflows.__file__).parent)

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """Follow the functions of the workflow files."""
        file = frame.f_code.co_filename
        if not file.startswith(self._folder):
            return None
        seen = self.lines[file]
        seen.add(frame.f_lineno)

        def line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            seen.add(frame.f_lineno)
            return line

        return line

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """In this thread and in every one that is started meanwhile: a replayer has threads of its own."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(None)


def lines_of(code: CodeType) -> set[int]:
    """Lines of a function and of those inside it, less the one with its name."""
    found = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
    return found.union(*(lines_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def methods_of(kind: type) -> Iterator[FunctionType]:
    """Methods that are written in a workflow's own class."""
    for name, member in vars(kind).items():
        function = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else None
        if isinstance(function, FunctionType) and name not in NOT_REPLAYED:
            yield function


def unreached(kind: type, reached: _Reached) -> list[str]:
    """Lines of a workflow class that did not run and are not known as such."""
    file = str(inspect.getsourcefile(kind))
    source = Path(file).read_text().splitlines()
    wanted = {line for method in methods_of(kind) for line in lines_of(method.__code__)}
    texts = {line: source[line - 1].strip() for line in sorted(wanted - reached.lines[file])}
    allowed = UNREACHED.get(kind.__name__, frozenset())
    return [f"line {line}: {text}" for line, text in texts.items() if text not in allowed]


@pytest.mark.timeout(240)
async def test_the_stored_histories_reach_every_branch_of_every_workflow() -> None:
    reached = _Reached()
    with reached.tracing():
        failures = await replay_failures(workflow_runner=UnsandboxedWorkflowRunner())
    assert not any(failures.values()), failures
    missing = {kind.__name__: unreached(kind, reached) for kind in WORKFLOWS}
    assert not any(missing.values()), f"record a history that gets there: {missing}"
