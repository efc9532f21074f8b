"""The gateway as the commands use it: a small HTTP client whose errors read well in a terminal."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from api.batch_schemas import Batch, BatchList
from api.callback_schemas import CallbackTestResult, RedeliveryPage, TaskCallback
from api.problems import Problem
from api.redrive_schemas import RedrivePage
from api.request_signing import MalformedSignatureError, RequestSigner
from api.schemas import ModelList, Task, TaskList
from api.statistics_schemas import QueueList, Stats, WorkerList
from api.timeline_schemas import TaskTimeline
from api.usage_schemas import Quota, Usage
from workflows.tasks import CancelMode

CLIENT_FILE: Final = "client.json"
"""In the data folder: URL and key that `reelgate dev` leaves for the other commands, mode 0600."""
DEFAULT_URL: Final = "http://127.0.0.1:8080"

Shape = TypeVar("Shape", bound=BaseModel)

_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)


class AccessFile(BaseModel):
    """Content of the client file."""

    url: str
    api_key: str = Field(repr=False)
    web_ui_url: str = ""
    temporal_address: str = ""


class GatewayRefusedError(Exception):
    """The gateway answered with a problem."""

    def __init__(self, problem: Problem, *, retry_after: str | None = None) -> None:
        lines = [f"{problem.code}: {problem.detail}"]
        lines += [f"  {broken.field} ({broken.rule}): {broken.message}" for broken in problem.errors or ()]
        if problem.task_ids:
            lines.append(f"  tasks: {', '.join(problem.task_ids)}")
        if retry_after is not None:
            lines.append(f"  try again in {retry_after} s")
        super().__init__("\n".join(lines))
        self.status = problem.status


class GatewayUnreachableError(Exception):
    """There is no gateway at the address, or what answers is none."""


class MissingKeyError(Exception):
    """No key to ask with, or a signing key that is none."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where the gateway is and with which key to ask."""

    url: str
    api_key: str | None = field(repr=False)
    signing_key: str | None = field(default=None, repr=False)
    """`<key id>:<signing secret>`; with it requests are signed, and no key travels."""

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Access:
        """`REELGATE_URL` and `REELGATE_SIGNING_KEY` or `REELGATE_API_KEY`, else what `reelgate dev` left.

        Raises:
            MissingKeyError: there is no key in either place.
        """
        file = Path(environment.get("REELGATE_DATA_DIR") or ".reelgate") / CLIENT_FILE
        left = _read(file)
        signing_key = environment.get("REELGATE_SIGNING_KEY")
        key = environment.get("REELGATE_API_KEY") or (left.api_key if left else None)
        if not key and not signing_key:
            raise MissingKeyError(
                "no API key: set REELGATE_API_KEY or REELGATE_SIGNING_KEY (and REELGATE_URL), or start `reelgate dev`; "
                f"no {file}"
            )
        return cls(
            url=(environment.get("REELGATE_URL") or (left.url if left else DEFAULT_URL)).rstrip("/"),
            api_key=key,
            signing_key=signing_key,
        )

    def auth(self) -> httpx.Auth:
        """What shows the gateway who asks.

        Raises:
            MissingKeyError: the signing key is malformed.
        """
        if self.signing_key is None:
            return _Bearer(self.api_key or "")
        try:
            return RequestSigner(self.signing_key)
        except MalformedSignatureError as error:
            raise MissingKeyError(f"REELGATE_SIGNING_KEY: {error}") from error


class _Bearer(httpx.Auth):
    """Shows the key itself."""

    def __init__(self, api_key: str) -> None:
        self._api_key = api_key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the key."""
        request.headers["Authorization"] = f"Bearer {self._api_key}"
        yield request


def _read(file: Path) -> AccessFile | None:
    try:
        return AccessFile.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise MissingKeyError(
            f"{file} is not readable as a client file; set REELGATE_URL and REELGATE_API_KEY"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One answer of a poll."""

    task: Task
    etag: str | None
    retry_after: float | None
    """Seconds that the gateway suggests until the next one."""


@dataclass(frozen=True, kw_only=True)
class StreamedEvent:
    """One event of a stream."""

    id: str
    name: str
    data: str
    """JSON."""


class Gateway:
    """Calls of the HTTP API.

    Every call raises GatewayRefusedError when the gateway answers with a problem, and GatewayUnreachableError when
    nothing (or something else) answers.
    """

    def __init__(self, access: Access) -> None:
        self._url = access.url
        self._http = httpx.Client(
            base_url=f"{access.url}/api/v1",
            auth=access.auth(),
            timeout=_TIMEOUT,
            # The key goes to the gateway and nowhere else.
            follow_redirects=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def submit(self, fields: Mapping[str, object], *, idempotency_key: str | None = None) -> tuple[Task, bool]:
        """Submit a request; returns the task and whether it is one that existed before."""
        headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
        reply = self._call("POST", "/tasks", json=fields, headers=headers)
        return self._parse(Task, reply), reply.headers.get("idempotency-replayed") == "true"

    def read(self, task_id: str, last: Reading | None = None) -> Reading:
        """Read a task; with the last reading, an unchanged one costs next to nothing."""
        headers = {"if-none-match": last.etag} if last and last.etag else {}
        reply = self._call("GET", f"/tasks/{task_id}", headers=headers)
        unchanged = last is not None and reply.status_code == HTTPStatus.NOT_MODIFIED
        return Reading(
            task=last.task if last is not None and unchanged else self._parse(Task, reply),
            etag=reply.headers.get("etag"),
            retry_after=_seconds(reply.headers.get("retry-after")),
        )

    def cancel(self, task_id: str, mode: CancelMode) -> Task:
        """Cancel a task; returns it as it is then."""
        return self._parse(Task, self._call("POST", f"/tasks/{task_id}/cancel", json={"mode": mode}))

    def retry(self, task_id: str) -> tuple[Task, bool]:
        """Run an ended task again; returns the new task and whether it had been started before."""
        reply = self._call("POST", f"/tasks/{task_id}/retry")
        return self._parse(Task, reply), reply.headers.get("idempotency-replayed") == "true"

    def delete(self, task_id: str) -> None:
        """Delete a task."""
        self._call("DELETE", f"/tasks/{task_id}")

    def timeline(self, task_id: str) -> TaskTimeline:
        """The way of a task."""
        return self._parse(TaskTimeline, self._call("GET", f"/tasks/{task_id}/timeline"))

    def callback(self, of: str) -> TaskCallback:
        """The deliveries of a task or batch, by its id."""
        return self._parse(TaskCallback, self._call("GET", f"{_path(of)}/callback"))

    def redeliver(self, of: str) -> TaskCallback:
        """Send the callback of a task or batch again, by its id."""
        return self._parse(TaskCallback, self._call("POST", f"{_path(of)}/callback/redeliver"))

    def redeliver_range(self, wanted: Mapping[str, object]) -> RedeliveryPage:
        """Send one page of the callbacks of a time again."""
        return self._parse(RedeliveryPage, self._call("POST", "/callbacks/redeliver", json=wanted))

    def redrive(self, wanted: Mapping[str, object]) -> RedrivePage:
        """Run one page of dead letters again; for operators."""
        return self._parse(RedrivePage, self._call("POST", "/redrive", json=wanted))

    def test_callback(self, url: str) -> CallbackTestResult:
        """Send a signed sample."""
        return self._parse(CallbackTestResult, self._call("POST", "/callbacks/test", json={"url": url}))

    def submit_batch(self, fields: Mapping[str, object], *, idempotency_key: str | None = None) -> tuple[Batch, bool]:
        """Submit a batch; returns it and whether it is one that existed before."""
        headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
        reply = self._call("POST", "/batches", json=fields, headers=headers)
        return self._parse(Batch, reply), reply.headers.get("idempotency-replayed") == "true"

    def batch(self, batch_id: str) -> tuple[Batch, float | None]:
        """Read a batch; returns it and the seconds that the gateway suggests until the next time."""
        reply = self._call("GET", f"/batches/{batch_id}")
        return self._parse(Batch, reply), _seconds(reply.headers.get("retry-after"))

    def cancel_batch(self, batch_id: str, mode: CancelMode) -> Batch:
        """Cancel the rest of a batch; returns it as it is then."""
        return self._parse(Batch, self._call("POST", f"/batches/{batch_id}/cancel", json={"mode": mode}))

    def batches(self, query: Mapping[str, str]) -> BatchList:
        """One page of the key's own batches."""
        return self._parse(BatchList, self._call("GET", "/batches", params=query))

    def delete_batch(self, batch_id: str) -> bool:
        """Delete a batch with its tasks; False: some are left, ask again."""
        return self._call("DELETE", f"/batches/{batch_id}").status_code != HTTPStatus.ACCEPTED

    def models(self) -> ModelList:
        """The catalogue."""
        return self._parse(ModelList, self._call("GET", "/models"))

    def tasks(self, query: Mapping[str, str]) -> TaskList:
        """One page of the key's own tasks."""
        return self._parse(TaskList, self._call("GET", "/tasks", params=query))

    def queues(self) -> QueueList:
        """What waits for GPUs."""
        return self._parse(QueueList, self._call("GET", "/queues"))

    def stats(self) -> Stats:
        """Tasks by state."""
        return self._parse(Stats, self._call("GET", "/stats"))

    def workers(self) -> WorkerList:
        """All workers; for operators."""
        return self._parse(WorkerList, self._call("GET", "/workers"))

    def events(self, task_id: str, last: str | None = None) -> Iterator[StreamedEvent]:
        """Events of a task as they come, from the beginning or behind `last`, until the gateway ends the stream."""
        headers = {"last-event-id": last} if last else {}
        with self._explained(), self._http.stream("GET", f"/tasks/{task_id}/events", headers=headers) as reply:
            if reply.is_error:
                reply.read()
                raise self._problem(reply)
            fields: dict[str, str] = {}
            for line in reply.iter_lines():
                name, _, value = line.partition(": ")
                if name:
                    fields[name] = value
                elif line == "" and "data" in fields:
                    yield StreamedEvent(id=fields.get("id", ""), name=fields.get("event", ""), data=fields["data"])
                    fields = {}

    def usage(self) -> Usage:
        """What the key's own user holds, has left and has used."""
        return self._parse(Usage, self._call("GET", "/usage"))

    def quota(self, tenant: str, end_user: str | None, *, shared: bool) -> Quota:
        """A user's account, or the one above all end users of a tenant; for operators."""
        return self._parse(Quota, self._call("GET", "/quota", params=_account(tenant, end_user, shared=shared)))

    def reset_quota(self, tenant: str, end_user: str | None, *, shared: bool) -> None:
        """Reset such an account."""
        self._call("POST", "/quota/reset", params=_account(tenant, end_user, shared=shared))

    def download(self, url: str, file: Path) -> int:
        """Save what a result link leads to; the file appears when it is whole. Returns its size in bytes."""
        part = file.with_name(f".{file.name}.part")
        # A signed link needs no key, and on S3 it leads to another host, which must not see ours.
        with self._explained(), httpx.stream("GET", url, timeout=_TIMEOUT, follow_redirects=True) as reply:
            if reply.is_error:
                reply.read()
                raise self._problem(reply)
            try:
                with part.open("wb") as out:
                    for piece in reply.iter_bytes():
                        out.write(piece)
                    size = out.tell()
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
        return size

    def _call(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        with self._explained():
            reply = self._http.request(method, path, json=json, headers=headers, params=params)
        if reply.is_success or reply.status_code == HTTPStatus.NOT_MODIFIED:
            return reply
        raise self._problem(reply)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise GatewayUnreachableError(f"no gateway at {self._url} (REELGATE_URL): {why}") from error

    def _problem(self, reply: httpx.Response) -> GatewayRefusedError | GatewayUnreachableError:
        try:
            return GatewayRefusedError(
                Problem.model_validate_json(reply.content), retry_after=reply.headers.get("retry-after")
            )
        except ValidationError:
            return GatewayUnreachableError(
                f"{self._url} (REELGATE_URL) answered {reply.status_code} and is no Reelgate gateway"
            )

    def _parse(self, shape: type[Shape], reply: httpx.Response) -> Shape:
        try:
            return shape.model_validate_json(reply.content)
        except ValidationError as error:
            raise GatewayUnreachableError(
                f"{self._url} (REELGATE_URL) did not answer with a {shape.__name__}; is its version another?"
            ) from error


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isascii() and header.isdigit() else None


def _path(of: str) -> str:
    """Where a task or a batch is; their ids differ in the first letter."""
    return f"/batches/{of}" if of.startswith("b") else f"/tasks/{of}"


def _account(tenant: str, end_user: str | None, *, shared: bool) -> dict[str, str]:
    return {
        "tenant": tenant,
        **({"end_user": end_user} if end_user is not None else {}),
        **({"shared": "true"} if shared else {}),
    }
