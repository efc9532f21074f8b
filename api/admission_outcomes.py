"""Admission and backlog that tell what new tasks were told."""

from __future__ import annotations

from collections.abc import Callable

from api.admission import Admission
from api.admission_client import Grant
from api.auth import Caller
from api.backlog import Backlog
from api.metrics import ADMITTED
from api.problems import GatewayError, QueueFullError
from api.queue_statistics import Queues
from workflows.tasks import GenerationInput


class CountedAdmission:
    """An admission whose answers are counted.

    Args:
        admission: decides.
        count: takes `ADMITTED` or the code of the refusal.
    """

    def __init__(self, admission: Admission, count: Callable[[str], None]) -> None:
        self._admission = admission
        self._count = count

    async def admit(self, caller: Caller, request: GenerationInput) -> Grant:
        """Take the places for a task.

        Raises:
            GatewayError: as the admission does.
        """
        try:
            grant = await self._admission.admit(caller, request)
        except GatewayError as error:
            self._count(error.code)
            raise
        self._count(ADMITTED)
        return grant

    async def withdraw(self, grant: Grant) -> None:
        """Give places back."""
        await self._admission.withdraw(grant)


class CountedBacklog(Backlog):
    """A backlog whose refusals are counted.

    Args:
        queues, max_backlog: as for `Backlog`.
        count: takes the code of the refusal.
    """

    def __init__(self, queues: Queues, *, max_backlog: int, count: Callable[[str], None]) -> None:
        super().__init__(queues, max_backlog=max_backlog)
        self._count = count

    async def check(self, request: GenerationInput, *, share: float = 1.0, more: int = 0) -> None:
        """Let a new task in.

        Raises:
            QueueFullError: as the backlog does.
        """
        try:
            await super().check(request, share=share, more=more)
        except QueueFullError as error:
            self._count(error.code)
            raise
