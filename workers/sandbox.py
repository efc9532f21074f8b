"""The SDK's workflow sandbox, entered only where workflow code runs.

All restrictions stay on. Two costs go: the SDK compiles the few lines that enter the sandbox each time it enters, and
it enters once for each payload of a command to ask for a serialization context, which our codec does not read. Both
together were a third of the CPU time of a control worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import CodeType

from temporalio.converter import SerializationContext
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker._command_aware_visitor import CommandInfo
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

# No public name of the SDK; its version is held below the next minor one in pyproject.toml.
from temporalio.worker.workflow_sandbox._runner import _Instance


@cache
def _compiled(code: str) -> CodeType:
    return compile(code, "workflow_sandbox.py", "exec")


class _LeanInstance(_Instance):
    def _run_code(self, code: str, **extra_globals: object) -> None:
        # exec() takes code objects as well as text.
        super()._run_code(_compiled(code), **extra_globals)  # type: ignore[arg-type]

    def get_serialization_context(self, command_info: CommandInfo | None) -> SerializationContext | None:
        return None


@dataclass(frozen=True)
class LeanSandbox(SandboxedWorkflowRunner):
    """A `SandboxedWorkflowRunner` for data converters that do not use serialization contexts."""

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        """Make the sandbox of one run."""
        return _LeanInstance(det, self.runner_class, self.restrictions)
