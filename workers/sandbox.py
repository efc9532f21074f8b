"""The SDK's workflow sandbox, with less work for each run.

Every restriction stays on: a workflow that reads the clock, draws a random number or opens a file is refused as ever.
What goes is work that is the same each time:

- The modules of a workflow are run once per worker, not once per run. They hold no state that runs could share, which
  `tests/workers/test_sandbox.py` holds them to.
- The few lines that enter the sandbox are compiled once, not at each entrance.
- Nobody enters it to ask for a serialization context or a storage context, once for each payload of a command: our
  codec reads neither, and no payload goes to an external store.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cache
from types import CodeType

from temporalio.converter import SerializationContext, StorageDriverStoreContext
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails, WorkflowRunner
from temporalio.worker._command_aware_visitor import CommandInfo
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

# No public names of the SDK; its version is held below the next minor one in pyproject.toml.
from temporalio.worker.workflow_sandbox._importer import Importer
from temporalio.worker.workflow_sandbox._restrictions import RestrictionContext
from temporalio.worker.workflow_sandbox._runner import _Instance


@cache
def _compiled(code: str) -> CodeType:
    return compile(code, "workflow_sandbox.py", "exec")


class _ContextOfThread(RestrictionContext):
    """Whether workflow code runs, for each thread by itself: runs that share their modules run side by side."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        super().__init__()

    @property
    def is_runtime(self) -> bool:
        """Workflow code runs, as opposed to its modules being imported."""
        return bool(getattr(self._of_thread, "is_runtime", False))

    @is_runtime.setter
    def is_runtime(self, value: bool) -> None:
        self._of_thread.is_runtime = value

    @property
    def in_activation(self) -> bool:
        """An activation is worked on."""
        return bool(getattr(self._of_thread, "in_activation", False))

    @in_activation.setter
    def in_activation(self, value: bool) -> None:
        self._of_thread.in_activation = value


class _LeanInstance(_Instance):
    def __init__(
        self, details: WorkflowInstanceDetails, runner_class: type[WorkflowRunner], importer: Importer
    ) -> None:
        # Not calling the parent, which would make an importer: the rest is the same.
        self.instance_details = details
        self.runner_class = runner_class
        self.importer = importer
        self._current_thread_id: int | None = None
        self.globals_and_locals = {"__file__": "workflow_sandbox.py"}
        self._create_instance()

    def _run_code(self, code: str, **extra_globals: object) -> None:
        # exec() takes code objects as well as text.
        super()._run_code(_compiled(code), **extra_globals)  # type: ignore[arg-type]

    def get_serialization_context(self, command_info: CommandInfo | None) -> SerializationContext | None:
        return None

    def get_external_store_context(self, command_info: CommandInfo | None) -> StorageDriverStoreContext:
        return StorageDriverStoreContext()


@dataclass(frozen=True)
class LeanSandbox(SandboxedWorkflowRunner):
    """A `SandboxedWorkflowRunner` for workflow modules without state and data converters without contexts."""

    _importers: dict[str, Importer] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By workflow module."""

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        """Make the sandbox of one run."""
        module = det.defn.cls.__module__
        importer = self._importers.get(module)
        if importer is None:
            importer = Importer(self.restrictions, _ContextOfThread(), workflow_module_name=module)
            self._importers[module] = importer
        return _LeanInstance(det, self.runner_class, importer)
