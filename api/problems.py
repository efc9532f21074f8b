"""Every error a client can get: one code each, answered as RFC 9457 problem+json.

`GatewayError` is the root; a subclass fixes status, code and title, an instance adds the detail of the case. Details
name the object and what would change the outcome, and never carry a prompt, a key or an internal message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Any, ClassVar, Final

from pydantic import BaseModel, Field
from starlette.responses import Response

from api.schemas import Task

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"


class ProblemCode(StrEnum):
    """Stable `code` of a problem; programs branch on this."""

    VALIDATION_FAILED = "VALIDATION_FAILED"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    IDEMPOTENCY_KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
    MALFORMED_JSON = "MALFORMED_JSON"
    UNSUPPORTED_MEDIA_TYPE = "UNSUPPORTED_MEDIA_TYPE"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"
    PRIORITY_NOT_ALLOWED = "PRIORITY_NOT_ALLOWED"
    NOT_FOUND = "NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    TASK_NOT_FOUND = "TASK_NOT_FOUND"
    TASK_TERMINAL = "TASK_TERMINAL"
    TASK_NOT_TERMINAL = "TASK_NOT_TERMINAL"
    BATCH_NOT_FOUND = "BATCH_NOT_FOUND"
    BATCH_TERMINAL = "BATCH_TERMINAL"
    BATCH_NOT_TERMINAL = "BATCH_NOT_TERMINAL"
    CALLBACK_NOT_FOUND = "CALLBACK_NOT_FOUND"
    RESULT_NOT_FOUND = "RESULT_NOT_FOUND"
    RESULT_EXPIRED = "RESULT_EXPIRED"
    RANGE_NOT_SATISFIABLE = "RANGE_NOT_SATISFIABLE"
    PAYLOAD_UNREADABLE = "PAYLOAD_UNREADABLE"
    TOO_MANY_PENDING_TASKS = "TOO_MANY_PENDING_TASKS"
    RATE_LIMITED = "RATE_LIMITED"
    QUOTA_EXHAUSTED = "QUOTA_EXHAUSTED"
    QUEUE_FULL = "QUEUE_FULL"
    TEMPORAL_UNAVAILABLE = "TEMPORAL_UNAVAILABLE"
    CONTROL_UNAVAILABLE = "CONTROL_UNAVAILABLE"
    ADMISSION_UNAVAILABLE = "ADMISSION_UNAVAILABLE"
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    INTERNAL = "INTERNAL"


class FieldError(BaseModel):
    """One broken rule of a request."""

    field: str = Field(description="Path of the field in the body, or the name of the header or parameter.")
    rule: str = Field(description="Stable name of the rule.")
    message: str


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str = Field(description="URN of the kind of problem.")
    title: str
    status: int
    detail: str
    code: ProblemCode
    errors: list[FieldError] | None = Field(default=None, description="Every broken rule, when fields are at fault.")
    task: Task | None = Field(
        default=None, description="The task in its present state, when that is what stands against it."
    )
    task_ids: list[str] | None = Field(default=None, description="Tasks that stand against the request.")


class GatewayError(Exception):
    """A request that ends in a problem."""

    status: ClassVar[HTTPStatus]
    code: ClassVar[ProblemCode]
    title: ClassVar[str]

    def __init__(
        self,
        detail: str,
        *,
        errors: Iterable[FieldError] = (),
        retry_after_seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
        task: Task | None = None,
        task_ids: Iterable[str] = (),
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})
        self.task = task
        self.task_ids = tuple(task_ids)
        if retry_after_seconds is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_seconds)))

    def response(self) -> Response:
        """The answer to the client."""
        problem = Problem(
            type=f"urn:reelgate:problem:{self.code.lower().replace('_', '-')}",
            title=self.title,
            status=self.status,
            detail=self.detail,
            code=self.code,
            errors=list(self.errors) or None,
            task=self.task,
            task_ids=list(self.task_ids) or None,
        )
        absent = {name for name in ("errors", "task", "task_ids") if getattr(problem, name) is None}
        return Response(
            problem.model_dump_json(exclude=absent),
            status_code=self.status,
            media_type=PROBLEM_MEDIA_TYPE,
            headers=self.headers,
        )


class ValidationFailedError(GatewayError):
    """Fields of the request break rules; all of them are named."""

    status, code, title = HTTPStatus.UNPROCESSABLE_ENTITY, ProblemCode.VALIDATION_FAILED, "The request is not valid"

    @classmethod
    def of(cls, field: str, rule: str, message: str) -> ValidationFailedError:
        """For a single broken rule."""
        return cls(f"{field}: {message}", errors=[FieldError(field=field, rule=rule, message=message)])


class UnknownModelError(ValidationFailedError):
    """`model` is not in the catalogue."""

    code, title = ProblemCode.UNKNOWN_MODEL, "There is no such model"


class IdempotencyKeyReusedError(GatewayError):
    """The key belongs to a request with another body."""

    status, code = HTTPStatus.UNPROCESSABLE_ENTITY, ProblemCode.IDEMPOTENCY_KEY_REUSED
    title = "The idempotency key was used for another request"


class MalformedJsonError(GatewayError):
    """The body is not JSON."""

    status, code, title = HTTPStatus.BAD_REQUEST, ProblemCode.MALFORMED_JSON, "The body is not valid JSON"


class UnsupportedMediaTypeError(GatewayError):
    """The body is not announced as JSON."""

    status, code = HTTPStatus.UNSUPPORTED_MEDIA_TYPE, ProblemCode.UNSUPPORTED_MEDIA_TYPE
    title = "The body must be application/json"


class BodyTooLargeError(GatewayError):
    """The body is over the limit; it was not read further."""

    status, code = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, ProblemCode.BODY_TOO_LARGE
    title = "The request body is too large"


class UnauthenticatedError(GatewayError):
    """No key, or none that is known."""

    status, code, title = HTTPStatus.UNAUTHORIZED, ProblemCode.UNAUTHENTICATED, "An API key is required"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": 'Bearer realm="reelgate", HMAC-SHA256 realm="reelgate"'})


class ForbiddenError(GatewayError):
    """The key may not do this."""

    status, code, title = HTTPStatus.FORBIDDEN, ProblemCode.FORBIDDEN, "Not allowed"


class PriorityNotAllowedError(GatewayError):
    """The tier of the key does not reach the priority asked for."""

    status, code = HTTPStatus.FORBIDDEN, ProblemCode.PRIORITY_NOT_ALLOWED
    title = "The priority is above what the key's tier allows"


class NotFoundError(GatewayError):
    """No such route."""

    status, code, title = HTTPStatus.NOT_FOUND, ProblemCode.NOT_FOUND, "Not found"


class MethodNotAllowedError(GatewayError):
    """The route exists, the method does not."""

    status, code, title = HTTPStatus.METHOD_NOT_ALLOWED, ProblemCode.METHOD_NOT_ALLOWED, "Method not allowed"


class TaskNotFoundError(GatewayError):
    """No such task, or another user's."""

    status, code, title = HTTPStatus.NOT_FOUND, ProblemCode.TASK_NOT_FOUND, "There is no such task"

    def __init__(self) -> None:
        super().__init__("No task of yours has this id, or it is older than the retention.")


class TaskTerminalError(GatewayError):
    """The task has ended already."""

    status, code, title = HTTPStatus.CONFLICT, ProblemCode.TASK_TERMINAL, "The task has ended"


class TaskNotTerminalError(GatewayError):
    """The task has not ended yet."""

    status, code, title = HTTPStatus.CONFLICT, ProblemCode.TASK_NOT_TERMINAL, "The task has not ended"


class BatchNotFoundError(GatewayError):
    """No such batch, or another user's."""

    status, code, title = HTTPStatus.NOT_FOUND, ProblemCode.BATCH_NOT_FOUND, "There is no such batch"

    def __init__(self) -> None:
        super().__init__("No batch of yours has this id, or it is older than the retention.")


class BatchTerminalError(GatewayError):
    """The batch has ended already."""

    status, code, title = HTTPStatus.CONFLICT, ProblemCode.BATCH_TERMINAL, "The batch has ended"


class BatchNotTerminalError(GatewayError):
    """The batch has not ended yet."""

    status, code, title = HTTPStatus.CONFLICT, ProblemCode.BATCH_NOT_TERMINAL, "The batch has not ended"


class CallbackNotFoundError(GatewayError):
    """The task or batch has no callback."""

    status, code, title = HTTPStatus.NOT_FOUND, ProblemCode.CALLBACK_NOT_FOUND, "There is no callback"


class ResultNotFoundError(GatewayError):
    """The task ended without a clip."""

    status, code, title = HTTPStatus.NOT_FOUND, ProblemCode.RESULT_NOT_FOUND, "The task has no result"


class ResultExpiredError(GatewayError):
    """The clip was removed, by retention or by its owner."""

    status, code, title = HTTPStatus.GONE, ProblemCode.RESULT_EXPIRED, "The result is no longer stored"


class RangeNotSatisfiableError(GatewayError):
    """The range lies behind the end of the file."""

    status, code = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, ProblemCode.RANGE_NOT_SATISFIABLE
    title = "The range lies behind the end of the file"


class PayloadUnreadableError(GatewayError):
    """A payload was encrypted with a key that is not here, or was tampered with."""

    status, code, title = HTTPStatus.UNPROCESSABLE_ENTITY, ProblemCode.PAYLOAD_UNREADABLE, "A payload does not decode"


class TooManyPendingTasksError(GatewayError):
    """All places of the user are taken; `task_ids` hold them."""

    status, code = HTTPStatus.TOO_MANY_REQUESTS, ProblemCode.TOO_MANY_PENDING_TASKS
    title = "Too many unfinished tasks"


class RateLimitedError(GatewayError):
    """Too many requests in too short a time."""

    status, code, title = HTTPStatus.TOO_MANY_REQUESTS, ProblemCode.RATE_LIMITED, "Too many requests"


class QuotaExhaustedError(GatewayError):
    """The allowance of the period is used up."""

    status, code = HTTPStatus.TOO_MANY_REQUESTS, ProblemCode.QUOTA_EXHAUSTED
    title = "The allowance is used up"


class QueueFullError(GatewayError):
    """More tasks wait than can be served in time."""

    status, code, title = HTTPStatus.SERVICE_UNAVAILABLE, ProblemCode.QUEUE_FULL, "The queue is full"


class TemporalUnavailableError(GatewayError):
    """Temporal did not answer in time. A submission may still have been accepted: the same key finds it."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, ProblemCode.TEMPORAL_UNAVAILABLE
    title = "The workflow service does not answer"

    def __init__(self, detail: str = "Temporal did not answer in time; repeat the same request.") -> None:
        super().__init__(detail, retry_after_seconds=2)


class ControlUnavailableError(GatewayError):
    """No control worker answered in time."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, ProblemCode.CONTROL_UNAVAILABLE
    title = "No control worker answers"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, retry_after_seconds=5)


class AdmissionUnavailableError(GatewayError):
    """No control worker decided on the admission in time."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, ProblemCode.ADMISSION_UNAVAILABLE
    title = "Admission does not answer"

    def __init__(self, detail: str = "No control worker answered in time; repeat the same request.") -> None:
        super().__init__(detail, retry_after_seconds=5)


class StorageUnavailableError(GatewayError):
    """The object store did not answer."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, ProblemCode.STORAGE_UNAVAILABLE
    title = "The object store does not answer"

    def __init__(self, detail: str = "The object store did not answer; try again.") -> None:
        super().__init__(detail, retry_after_seconds=5)


class InternalError(GatewayError):
    """A bug here. The cause is in our log under the request id, not in the answer."""

    status, code, title = HTTPStatus.INTERNAL_SERVER_ERROR, ProblemCode.INTERNAL, "Internal error"

    def __init__(self, request_id: str | None = None) -> None:
        super().__init__(
            f"The request failed here; request id {request_id}." if request_id else "The request failed here."
        )


def problem_responses(*kinds: type[GatewayError]) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route: the problems it can answer with, one OpenAPI entry per status."""
    by_status: dict[int | str, list[type[GatewayError]]] = {}
    for kind in dict.fromkeys(kinds):
        by_status.setdefault(int(kind.status), []).append(kind)
    return {
        status: {
            "description": " · ".join(f"`{kind.code}` {kind.title}" for kind in same),
            "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status, same in by_status.items()
    }
