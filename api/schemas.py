"""Wire shapes of the HTTP API: snake_case, times RFC 3339 UTC with milliseconds, unknown request fields refused.

What a request must be whatever the model is checked here; what the model asks for is the catalogue's. Texts are
kept exactly as they were sent, so that a prompt in any script reaches the model and the hash of the request alike.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from workflows.states import TaskStatus
from workflows.tasks import CallbackStatus, CancelMode, Phase, TaskEvent, TaskPriority

MAX_PROMPT_LENGTH: Final = 4_000
"""Code points."""
MAX_LABELS: Final = 16
MAX_LABEL_LENGTH: Final = 64
MAX_URL_LENGTH: Final = 2_048
MAX_SEED: Final = 2**32 - 1
MAX_SIDE: Final = 16_384
MAX_COUNT: Final = 100_000

GENERATION_FIELDS: Final = frozenset(
    {
        *("prompt", "negative_prompt", "model", "image", "width", "height", "num_frames", "fps"),
        *("num_inference_steps", "guidance_scale", "seed"),
    }
)
"""Request fields that decide what the clip looks like."""
UNKEYED_FIELDS: Final = frozenset({"priority", "deadline_seconds", "labels", "regenerate"})
"""Request fields that do not make it another request: left out of the derived idempotency key."""


_RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}")


def _milliseconds(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


UtcTime = Annotated[
    datetime,
    PlainSerializer(_milliseconds, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-01-31T12:00:00.000Z"]}),
]
"""A time on the wire."""


def rfc3339(value: object) -> object:
    """Refuse what is no text with a date and a time; numbers would be taken for Unix time."""
    if not isinstance(value, datetime) and not (isinstance(value, str) and _RFC3339.match(value)):
        raise PydanticCustomError("rfc3339", "must be a time like 2026-01-31T12:00:00Z")
    return value


AskedTime = Annotated[AwareDatetime, BeforeValidator(rfc3339)]


def _text(value: str) -> str:
    # JSON can spell both; neither is text that a hash, a store or a tokenizer takes.
    if "\0" in value:
        raise PydanticCustomError("no_nul", "must not contain the character NUL")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise PydanticCustomError("string_unicode", "must not contain lone surrogates") from None
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("not_blank", "must contain more than white space")
    return value


Prompt = Annotated[
    str, Field(min_length=1, max_length=MAX_PROMPT_LENGTH), AfterValidator(_text), AfterValidator(_not_blank)
]
NegativePrompt = Annotated[str, Field(max_length=MAX_PROMPT_LENGTH), AfterValidator(_text)]
ModelName = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_text)]
ImageSource = Annotated[str, Field(min_length=1), AfterValidator(_text)]
Url = Annotated[str, Field(min_length=1, max_length=MAX_URL_LENGTH), AfterValidator(_text)]
Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_LENGTH), AfterValidator(_text)]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def _refuse(field: str, rule: str, message: str) -> PydanticCustomError:
    # A rule over several fields has no place of its own; `field` carries the blame.
    return PydanticCustomError(rule, "{message}", {"field": field, "message": message})


class Submit(BaseModel):
    """A request for one clip. Absent and null mean the same: the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    prompt: Prompt
    negative_prompt: NegativePrompt | None = None
    model: ModelName | None = None
    image: ImageSource | None = Field(
        default=None,
        description="Input image as `data:image/...;base64,...` or an https URL: PNG, JPEG or WebP, not animated.",
    )
    width: Side | None = None
    height: Side | None = None
    num_frames: Count | None = None
    fps: Annotated[float, Field(gt=0, le=240, allow_inf_nan=False)] | None = None
    num_inference_steps: Count | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=1_000, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    priority: Annotated[TaskPriority, Field(strict=False)] | None = Field(
        default=None, description="The default is `normal`; the tier of the key is the limit."
    )
    regenerate: bool | None = Field(
        default=None, description="A new clip of the same prompt, with another seed, even if there is one already."
    )
    callback_url: Url | None = None
    callback_events: (
        Annotated[list[Annotated[TaskEvent, Field(strict=False)]], Field(min_length=1, max_length=len(TaskEvent))]
        | None
    ) = Field(default=None, description="The default is succeeded, failed and timeout.")
    deadline_seconds: Annotated[float, Field(ge=1, le=604_800, allow_inf_nan=False)] | None = Field(
        default=None, description="Shortens the deadline of the task; it cannot extend it."
    )
    labels: Annotated[list[Label], Field(max_length=MAX_LABELS)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.regenerate and self.seed is not None:
            raise _refuse("regenerate", "excludes_seed", "draws another seed: send either `regenerate` or `seed`")
        if self.callback_events is not None and self.callback_url is None:
            raise _refuse("callback_events", "needs_callback_url", "needs `callback_url`")
        if self.callback_events is not None and len(set(self.callback_events)) != len(self.callback_events):
            raise _refuse("callback_events", "unique", "names an event twice")
        return self

    def sent_fields(self, image_sha256: str | None) -> dict[str, Any]:
        """Every field that was sent, as JSON; an image stands as the hash of its bytes."""
        fields = self.model_dump(mode="json", exclude={"image"}, exclude_none=True)
        if image_sha256 is not None:
            fields["image"] = image_sha256
        return fields


class Cancel(BaseModel):
    """How to cancel; an empty body means soft."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Annotated[CancelMode, Field(strict=False)] = CancelMode.SOFT


class TaskParameters(BaseModel):
    """Effective parameters of the clip."""

    prompt: str
    negative_prompt: str
    width: int
    height: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    seed: int
    image_sha256: str | None


class TaskProgress(BaseModel):
    """How far the running attempt is."""

    phase: Phase
    step: int
    total_steps: int
    percent: float
    eta_seconds: float | None


class TaskQueue(BaseModel):
    """Where a queued task stands."""

    position: int | None = Field(description="Tasks of the pool that were accepted earlier and wait; an estimate.")
    estimated_start_seconds: float | None
    live_slots: int | None = Field(description="Tasks the live workers of the pool take at a time; null: unknown.")


class TaskResult(BaseModel):
    """The published clip. Past `expires_at` it is removed, and `/video` answers 410."""

    sha256: str
    bytes: int
    width: int
    height: int
    num_frames: int
    fps: float
    seed: int
    expires_at: UtcTime


class TaskLinks(BaseModel):
    """Where more is to be found."""

    self: str
    events: str
    timeline: str
    web_ui: str = Field(description="The task in the Temporal Web UI.")


class TaskItem(BaseModel):
    """A task as lists show it."""

    task_id: str
    status: TaskStatus
    is_terminal: bool = Field(description="The run is closed; false for a soft-cancelled task that still generates.")
    cancel_requested: CancelMode | None
    model: str
    priority: TaskPriority
    parameters: TaskParameters
    progress: TaskProgress | None
    queue: TaskQueue | None
    worker_id: str | None
    attempt: int = Field(description="Attempts that a worker started.")
    retry_count: int
    retry_of: str | None
    created_at: UtcTime
    queued_at: UtcTime
    started_at: UtcTime | None
    finished_at: UtcTime | None
    updated_at: UtcTime
    durations: dict[str, float] = Field(
        description="Seconds spent in each state. The present state is counted when it ends."
    )
    gpu_seconds: float
    result_url: str | None = Field(description="Null until there is a clip, and again when it has expired.")
    poster_url: str | None
    result: TaskResult | None
    error_code: str | None
    error_message: str | None
    batch_id: str | None
    labels: list[str]
    links: TaskLinks


class WarningCode(StrEnum):
    """Stable codes of warnings."""

    PROMPT_OUTSIDE_VOCABULARY = "PROMPT_OUTSIDE_VOCABULARY"


class TaskWarning(BaseModel):
    """Something that a client should know about a request that was accepted all the same."""

    code: WarningCode
    message: str


class Task(TaskItem):
    """A task as it stands, with its callback."""

    warnings: list[TaskWarning]
    callback_status: CallbackStatus | None
    callback_attempts: int | None


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}$")]
"""A name in a filter. It goes into a query: nothing that could end a string is let through."""


class TaskQuery(BaseModel):
    """Which tasks to list, and which page."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: TaskStatus | None = None
    created_after: AskedTime | None = Field(default=None, description="Inclusive.")
    created_before: AskedTime | None = Field(default=None, description="Exclusive.")
    model: Name | None = None
    batch_id: Name | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    cursor: Annotated[str, Field(min_length=1, max_length=2_000)] | None = None


class TaskList(BaseModel):
    """One page of tasks: open ones by newest start, then closed ones by newest end."""

    items: list[TaskItem]
    next_cursor: str | None


class PoolState(BaseModel):
    """Who serves a model at present."""

    pool: str
    state: Literal["live", "no_worker", "unknown"] = Field(description="`unknown`: Temporal does not answer.")
    workers: int | None
    slots: int | None = Field(description="Tasks the live workers take at a time; null: unknown.")


class ModelServing(BaseModel):
    """Whether a model is loaded somewhere."""

    state: Literal["READY", "LOADING", "NOT_LOADED", "FAILED", "NO_WORKER", "UNKNOWN"] = Field(
        description="The best over the live workers. `NOT_LOADED` loads with its first task; `UNKNOWN`: no health port."
    )
    reason: str | None = Field(description="Why it cannot be loaded.")


class ModelInfo(BaseModel):
    """A model of the catalogue."""

    name: str
    title: str
    family: str
    kind: str
    revision: str
    default: bool
    parameters: dict[str, Any] = Field(description="What it takes, with its limits and defaults, as JSON Schema.")
    examples: list[str] = Field(description="Prompts that show what it can do.")
    vocabulary: dict[str, list[str]] | None = Field(
        description="The only words that it knows, by topic in the order of a prompt; null: free text."
    )
    serving: PoolState
    loaded: ModelServing


class ModelList(BaseModel):
    """All models of the catalogue."""

    items: list[ModelInfo]


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """What the process depends on."""

    status: Literal["ready", "not_ready"]
    temporal: Literal["ok", "unreachable"]
    store: Literal["ok", "unreachable"]
