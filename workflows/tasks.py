"""The frozen dataclasses that cross a boundary: client to workflow, workflow to activity and back.

They carry numbers, short texts and object keys, never media bytes, local paths or secret values. Durations are
plain seconds (suffix `_seconds`) because they travel as JSON; times are aware UTC. A field added later needs a
default, so that histories recorded before it still decode.
"""

# Without `from __future__ import annotations`: the converter resolves the annotations of every value that it decodes,
# and would compile each that is text.

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from workflows.failures import FailureCode
from workflows.states import TaskStatus


class TaskPriority(StrEnum):
    """Priority names on the wire."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class TaskEvent(StrEnum):
    """Terminal events that a callback can subscribe to."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELED = "canceled"


class CancelMode(StrEnum):
    """How a running task is cancelled."""

    SOFT = "soft"
    """The task reads CANCELED at once; the generation ends in the background and its clip is kept."""
    HARD = "hard"
    """The GPU stops within a denoising step."""


class SoftCancelReply(StrEnum):
    """Answer of the update `cancel_soft`."""

    ACCEPTED = "accepted"
    NOT_STARTED = "not_started"
    """No attempt runs: send a Temporal cancel."""
    ENDED = "ended"


class Phase(StrEnum):
    """Phases of an attempt, in order."""

    LOAD = "load"
    ENCODE_PROMPT = "encode_prompt"
    STEP = "step"
    DECODE = "decode"
    ENCODE_VIDEO = "encode_video"
    STORE = "store"


@dataclass(frozen=True, kw_only=True)
class User:
    """Who a task belongs to: the tenant's key acting for itself (empty end user) or for one of its end users."""

    tenant: str
    end_user: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerationParameters:
    """Effective parameters of one clip; with the model's revision they decide the artifact."""

    model: str
    prompt: str
    width: int
    height: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    seed: int
    negative_prompt: str = ""
    image_key: str | None = None
    """Object key of the input image, `inputs/<user hash>/<sha256>`."""
    image_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every limit of one task in seconds and counts, resolved at submission so that replays do not drift."""

    queue_timeout_seconds: float = 180.0
    max_requeues: int = 2
    processing_timeout_seconds: float = 300.0
    """Soft limit of an attempt, counted from the end of the load phase."""
    processing_grace_seconds: float = 120.0
    """Past the soft limit, for an attempt whose measured step rate says that it will finish in time."""
    load_timeout_seconds: float = 600.0
    encode_prompt_timeout_seconds: float = 60.0
    step_timeout_seconds: float = 60.0
    decode_timeout_seconds: float = 120.0
    encode_store_timeout_seconds: float = 120.0
    kill_grace_seconds: float = 10.0
    heartbeat_timeout_seconds: float = 10.0
    deadline_seconds: float = 1800.0
    max_attempts: int = 3
    max_video_bytes: int = 512 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class CallbackTarget:
    """Where the terminal event goes. The secret is looked up by tenant on the worker, never carried."""

    url: str
    events: tuple[TaskEvent, ...] = (TaskEvent.SUCCEEDED, TaskEvent.FAILED, TaskEvent.TIMEOUT)
    schedule_seconds: tuple[float, ...] = ()
    """Delays before each attempt, see `policies.CALLBACK_SCHEDULE_SECONDS`; empty means that default."""


@dataclass(frozen=True, kw_only=True)
class AdmissionPlace:
    """A place that the task holds in an admission workflow and gives back when it ends."""

    admission_id: str
    token: str


@dataclass(frozen=True, kw_only=True)
class GenerationInput:
    """Input of `GenerationWorkflow`: the request as accepted and the plan resolved from it."""

    task_id: str
    user: User
    parameters: GenerationParameters
    model_revision: str
    pool: str
    artifact_key: str
    accepted_at: datetime
    priority: TaskPriority = TaskPriority.NORMAL
    fairness_weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
    callback: CallbackTarget | None = None
    labels: tuple[str, ...] = ()
    idempotency_key: str = ""
    fingerprint: str = ""
    """Hash of every field the client sent; compared when the same key comes again."""
    retry_of: str | None = None
    redriven: bool = False
    """An operator started it again, not its owner; it holds no places."""
    batch_id: str | None = None
    places: tuple[AdmissionPlace, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A published clip as its manifest names it. Keys are relative to the root of the store."""

    key: str
    """Artifact key: hash of user, model@revision and effective parameters."""
    token: str
    """The attempt that published it."""
    video_key: str
    poster_key: str
    sha256: str
    bytes: int
    poster_sha256: str
    poster_bytes: int
    width: int
    height: int
    num_frames: int
    fps: float
    seed: int
    model: str
    model_revision: str
    created_at: datetime
    expires_at: datetime
    """When retention removes it."""


@dataclass(frozen=True, kw_only=True)
class GenerateClipInput:
    """One attempt."""

    task_id: str
    token: str
    """Drawn by the workflow for this round; also the activity id, and the fence against late attempts."""
    attempt: int
    parameters: GenerationParameters
    model_revision: str
    artifact_key: str
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class AttemptStarted:
    """Signal `attempt_started`: the first act of an attempt on a worker."""

    token: str
    worker_id: str
    started_at: datetime
    queued_at: datetime
    """When this round was scheduled, by the server's clock."""
    worker_version: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Heartbeat of an attempt; `GET /tasks/{id}` shows it."""

    attempt: int
    worker_id: str
    phase: Phase
    step: int = 0
    total_steps: int = 0
    percent: float = 0.0
    """0 to 100 over the whole attempt."""
    eta_seconds: float | None = None
    gpu_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GenerateClipResult:
    """Outcome of an attempt that has a published artifact."""

    artifact: Artifact
    worker_id: str
    worker_version: str
    gpu_seconds: float
    """Busy time of the inference process for this attempt; 0 when the artifact was found."""
    reused: bool = False
    """A complete manifest was found; nothing was generated."""


@dataclass(frozen=True, kw_only=True)
class AttemptFailure:
    """Detail of the `ApplicationError` of a failed or stopped attempt."""

    gpu_seconds: float = 0.0
    phase: Phase | None = None


@dataclass(frozen=True, kw_only=True)
class FindArtifactInput:
    """Look for a complete manifest under an artifact key."""

    artifact_key: str


@dataclass(frozen=True, kw_only=True)
class RemoveArtifactsInput:
    """Remove what named attempts published under an artifact key."""

    artifact_key: str
    tokens: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One attempt as the final record and the timeline show it."""

    number: int
    token: str
    queued_at: datetime
    ended_at: datetime
    started_at: datetime | None = None
    worker_id: str | None = None
    worker_version: str | None = None
    outcome: FailureCode | None = None
    """None: the attempt published its clip."""
    message: str | None = None
    gpu_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """What a run knows about itself: memo `record`, written at the end and after each failed attempt."""

    task_id: str
    status: TaskStatus
    created_at: datetime
    queued_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each state."""
    attempts: tuple[AttemptRecord, ...] = ()
    attempt_count: int = 0
    """Attempts that a worker started."""
    retry_count: int = 0
    requeue_count: int = 0
    gpu_seconds: float = 0.0
    worker_id: str | None = None
    artifact: Artifact | None = None
    error_code: FailureCode | None = None
    error_message: str | None = None
    cancel_requested: CancelMode | None = None
    callback_started: bool = False
    """A CallbackWorkflow was started for the terminal event."""


@dataclass(frozen=True, kw_only=True)
class CallbackEvent:
    """What a callback tells, before it is serialised: the flat body of DESIGN section 5 less the URLs."""

    type: str
    """`task.succeeded`, `task.failed`, `task.timeout` or `task.canceled`."""
    timestamp: datetime
    task_id: str
    status: TaskStatus
    created_at: datetime
    finished_at: datetime
    started_at: datetime | None = None
    artifact_expires_at: datetime | None = None
    """Set when there is a clip to link to."""
    error_code: FailureCode | None = None
    error_message: str | None = None
    labels: tuple[str, ...] = ()


class CallbackStatus(StrEnum):
    """State of a delivery, search attribute `CallbackStatus` of the CallbackWorkflow."""

    PENDING = "PENDING"
    RETRYING = "RETRYING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class DeliveryOutcome(StrEnum):
    """What one delivery attempt means for the schedule."""

    DELIVERED = "delivered"
    RETRY = "retry"
    """Failed; the schedule goes on."""
    DEFERRED = "deferred"
    """Not sent: the endpoint is busy or its breaker is open. Uncounted."""
    GIVE_UP = "give_up"
    """The receiver said never again (410, `webhook-delivery`), or the target can never be reached legally."""


@dataclass(frozen=True, kw_only=True)
class DeliverCallbackInput:
    """One delivery attempt."""

    tenant: str
    url: str
    webhook_id: str
    event: CallbackEvent
    number: int
    body: str | None = None
    """The body of the first attempt, sent again as it was; None on the first."""
    deferrals: int = 0
    """How often in a row this attempt was deferred; a busy endpoint answers with a doubling delay."""
    recall: bool = False
    """Of a local attempt: only tell its outcome if it has been made, and make none."""


@dataclass(frozen=True, kw_only=True)
class DeliveryAttempt:
    """One delivery attempt as made; the attempt log is a list of these."""

    number: int
    outcome: DeliveryOutcome
    started_at: datetime
    duration_ms: int
    status_code: int | None = None
    error_code: str | None = None
    """Why it failed, e.g. `HTTP_STATUS`, `REDIRECT`, `CONNECT_TIMEOUT`, `ADDRESS_REFUSED`."""
    reply: str | None = None
    """First 2 KB of the reply."""
    retry_after_seconds: float | None = None
    """From `Retry-After`, or how long a deferred attempt should wait."""
    body: str | None = None
    """The bytes sent, as text; kept once, in the workflow's own state."""
    webhook_id: str | None = None
    """Id of the merged request that the task travelled in; None when it went alone under its own id."""


@dataclass(frozen=True, kw_only=True)
class CallbackInput:
    """Input of `CallbackWorkflow`; the fields after `schedule_seconds` carry its state over continue-as-new."""

    task_id: str
    tenant: str
    url: str
    webhook_id: str
    event: CallbackEvent
    schedule_seconds: tuple[float, ...]
    body: str | None = None
    attempts: tuple[DeliveryAttempt, ...] = ()
    failures: int = 0
    """Counted failed attempts so far: the index into the schedule."""
    deferrals: int = 0
    """Deferred attempts since the last one that was sent."""
    next_attempt_at: datetime | None = None
    gives_up_at: datetime | None = None
    """However often it was deferred, the delivery is given up then."""


@dataclass(frozen=True, kw_only=True)
class CallbackRecord:
    """Memo `record` and result of a CallbackWorkflow."""

    task_id: str
    status: CallbackStatus
    url: str
    body: str | None = None
    attempts: tuple[DeliveryAttempt, ...] = ()
    next_attempt_at: datetime | None = None


class RetentionArea(StrEnum):
    """Folders of the store that retention sweeps."""

    ARTIFACTS = "artifacts"
    INPUTS = "inputs"


@dataclass(frozen=True, kw_only=True)
class RemoveExpiredInput:
    """One batch of a sweep."""

    area: RetentionArea
    after: str | None = None
    """Where the batch before ended; None for the first."""


@dataclass(frozen=True, kw_only=True)
class RemoveExpiredResult:
    """What one batch did."""

    examined: int
    """Objects looked at."""
    removed: int
    """Objects removed."""
    after: str | None
    """Where the next batch begins; None when the area is done."""
