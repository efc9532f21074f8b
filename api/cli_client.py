"""The gateway as the commands use it: a small HTTP client whose errors read well in a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from api.problems import Problem
from api.schemas import ModelList, Task
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
    api_key: str
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
    """No API key to ask with."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where the gateway is and with which key to ask."""

    url: str
    api_key: str = field(repr=False)

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Access:
        """`REELGATE_URL` and `REELGATE_API_KEY`, else what `reelgate dev` left in the data folder.

        Raises:
            MissingKeyError: there is no key in either place.
        """
        file = Path(environment.get("REELGATE_DATA_DIR") or ".reelgate") / CLIENT_FILE
        left = _read(file)
        key = environment.get("REELGATE_API_KEY") or (left.api_key if left else None)
        if not key:
            raise MissingKeyError(
                f"no API key: set REELGATE_API_KEY (and REELGATE_URL), or start `reelgate dev`; no {file}"
            )
        return cls(
            url=(environment.get("REELGATE_URL") or (left.url if left else DEFAULT_URL)).rstrip("/"), api_key=key
        )


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


class Gateway:
    """Calls of the HTTP API.

    Every call raises GatewayRefusedError when the gateway answers with a problem, and GatewayUnreachableError when
    nothing (or something else) answers.
    """

    def __init__(self, access: Access) -> None:
        self._url = access.url
        self._http = httpx.Client(
            base_url=f"{access.url}/api/v1",
            headers={"authorization": f"Bearer {access.api_key}"},
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

    def models(self) -> ModelList:
        """The catalogue."""
        return self._parse(ModelList, self._call("GET", "/models"))

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


def _account(tenant: str, end_user: str | None, *, shared: bool) -> dict[str, str]:
    return {
        "tenant": tenant,
        **({"end_user": end_user} if end_user is not None else {}),
        **({"shared": "true"} if shared else {}),
    }
