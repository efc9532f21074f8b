"""The tasks of one idempotency key: the first, and what was run again after it, linked by their ids.

The id of each link is a hash that includes the one before, so a chain can only be walked from its start. A client that
repeats a failing request for days makes a long one; of those the newest ended link is remembered, and the walk goes
on from there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from activities.memory import remember
from api.jobs import Job, Jobs
from workflows import naming
from workflows.tasks import User

LONG: Final = 8
"""Links after which a chain is worth remembering."""
MAX_REMEMBERED: Final = 10_000
MAX_HEARD: Final = 50_000
"""Keys; 8 MB."""


class Chains:
    """Finds the links of a key."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._newest_ended: OrderedDict[str, str] = OrderedDict()
        self._heard: OrderedDict[str, None] = OrderedDict()

    def is_first_heard(self, user: User, key: str) -> bool:
        """Whether this process hears of a key for the first time, as far as it remembers; from now on it does."""
        first = naming.task_id(user, key)
        known = first in self._heard
        remember(self._heard, first, None, at_most=MAX_HEARD)
        return not known

    async def links(self, user: User, key: str) -> list[Job]:
        """The links that exist, oldest first; of a long chain the newest ones. Only the last can be open.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        first = naming.task_id(user, key)
        start = self._newest_ended.get(first, first)
        links = await self._walk(user, key, start)
        if not links and start != first:
            # Removed by retention or by its owner.
            del self._newest_ended[first]
            links = await self._walk(user, key, first)
        self._remember(first, links)
        return links

    async def links_from(self, job: Job) -> list[Job]:
        """A job and the links after it, oldest first. Only the last can be open.

        Raises:
            TemporalUnavailableError: no answer in time.
        """
        request = job.request
        following = naming.task_id(request.user, request.idempotency_key, after=request.task_id)
        return [job, *await self._walk(request.user, request.idempotency_key, following)]

    async def _walk(self, user: User, key: str, start: str) -> list[Job]:
        links: list[Job] = []
        task_id = start
        while (job := await self._jobs.describe(task_id)) is not None:
            links.append(job)
            if job.closing is None:
                break
            task_id = naming.task_id(user, key, after=task_id)
        return links

    def _remember(self, first: str, links: list[Job]) -> None:
        if len(links) <= LONG and first not in self._newest_ended:
            return
        ended = [job.request.task_id for job in links if job.closing is not None]
        if ended:
            remember(self._newest_ended, first, ended[-1], at_most=MAX_REMEMBERED)
