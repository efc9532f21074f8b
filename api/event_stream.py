"""Event streams of tasks: one upstream watch per task, however many clients listen.

Clients are cursors over what the watch knows, so nothing is queued per client: a slow one skips progress, never a
state, and costs no memory. Listening changes nothing: a client that goes away cancels nothing, and the last one that
leaves ends the watch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Final

from temporalio.client import Client

from api.auth import Caller
from api.jobs import Jobs
from api.problems import RateLimitedError, TaskNotFoundError
from api.readings import Readings, is_task_id
from api.task_events import BEGINNING, LINE_END, EventId
from api.task_history import TaskHistory
from api.task_watch import TaskWatch
from workflows.tasks import User

PROGRESS_INTERVAL: Final = timedelta(seconds=1)
"""Workers beat every 2 s at most; a describe per second and watched task shows a beat soon after it came."""
MAX_STREAMS: Final = 2_000
"""Streams per process. Each costs a socket and about 55 KB; past this, others could no longer be answered."""
MAX_STREAMS_OF_A_USER: Final = 1_000
"""One user, whose task may have a large audience, takes no more than half of them."""
RECONNECT_MILLISECONDS: Final = 2_000
"""Told to clients: after a cut, e.g. by a deploy, they come back soon, but do not hammer a server that boots."""

_RECONNECT: Final = f"retry: {RECONNECT_MILLISECONDS}{LINE_END}{LINE_END}".encode("ascii")
_BUSY_SECONDS: Final = 5


class EventHub:
    """The watches of one API process.

    Args:
        client: asked for histories.
        jobs: describes jobs.
        readings: turns a job into what clients see.
        call_limit: time for one call to Temporal that waits for nothing.
        interval: between two looks at the progress of a task.
    """

    def __init__(
        self,
        client: Client,
        *,
        jobs: Jobs,
        readings: Readings,
        call_limit: timedelta,
        interval: timedelta = PROGRESS_INTERVAL,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._readings = readings
        self._limit = call_limit
        self._interval = interval
        self._watches: dict[str, TaskWatch] = {}
        self._streams = Counter[User]()
        """By whose they are."""

    @property
    def watched(self) -> int:
        """Tasks that somebody listens to."""
        return len(self._watches)

    async def join(self, caller: Caller, task_id: str, last: EventId | None) -> EventStream:
        """Listen to the caller's task; the stream must be left in the end.

        Args:
            caller: who asks.
            task_id: the task.
            last: the last event the client has; it gets what came after. One that this run never gave, e.g. from
                before an operator's reset, starts from the beginning.

        Raises:
            TaskNotFoundError: there is none, or it is another user's.
            RateLimitedError: too many streams in this process.
            TemporalUnavailableError: no answer in time.
        """
        user = caller.user
        if not is_task_id(task_id):
            raise TaskNotFoundError
        if self._streams.total() >= MAX_STREAMS:
            raise RateLimitedError("Too many event streams are open here.", retry_after_seconds=_BUSY_SECONDS)
        if self._streams[user] >= MAX_STREAMS_OF_A_USER:
            raise RateLimitedError(
                f"You have {MAX_STREAMS_OF_A_USER} event streams open here.", retry_after_seconds=_BUSY_SECONDS
            )
        watch = self._watch(task_id)
        watch.listeners += 1
        self._streams[user] += 1
        stream = EventStream(watch, on_leave=lambda: self._left(task_id, user, watch))
        try:
            await watch.opened(user)
        except BaseException:
            stream.leave()
            raise
        stream.seek(last)
        return stream

    def _watch(self, task_id: str) -> TaskWatch:
        watch = self._watches.get(task_id)
        if watch is None or watch.is_stale:
            history = TaskHistory(self._client, task_id, call_limit=self._limit)
            watch = TaskWatch(
                task_id, history=history, jobs=self._jobs, readings=self._readings, interval=self._interval
            )
            self._watches[task_id] = watch
        return watch

    def _left(self, task_id: str, user: User, watch: TaskWatch) -> None:
        self._streams[user] -= 1
        if not self._streams[user]:
            del self._streams[user]
        watch.listeners -= 1
        if watch.listeners == 0:
            watch.stop()
            if self._watches.get(task_id) is watch:
                del self._watches[task_id]


class EventStream:
    """One client's place in the events of a task."""

    def __init__(self, watch: TaskWatch, *, on_leave: Callable[[], None]) -> None:
        self._watch = watch
        self._on_leave: Callable[[], None] | None = on_leave
        self._sent = BEGINNING

    def seek(self, last: EventId | None) -> None:
        """Go on behind an event."""
        self._sent = last if last is not None and self._watch.has_state(last.state) else BEGINNING

    @property
    def is_over(self) -> bool:
        """The client has the last event of a closed run."""
        return self._watch.is_terminal and self._sent.state == self._watch.last_state

    async def frames(self) -> AsyncIterator[bytes]:
        """Encoded events: first all that the client lacks, then as they come, until the run is closed."""
        yield _RECONNECT
        while True:
            # Taken before looking, so that nothing slips in between.
            news = self._watch.news
            for event in self._watch.after(self._sent):
                self._sent = event.id
                yield event.frame
            if news is self._watch.news:
                if self._watch.has_ended:
                    return
                await news.wait()

    def leave(self) -> None:
        """Stop listening. Doing it twice is harmless."""
        leave, self._on_leave = self._on_leave, None
        if leave is not None:
            leave()
