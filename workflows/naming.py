"""Names that several processes must agree on: task queues, workflow ids, search attributes, object keys.

Ids are hashes over JSON arrays, so that no choice of user, key or prompt can make two different inputs meet.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b32encode
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Final

from temporalio.common import SearchAttributeKey

from workflows.tasks import GenerationParameters, TaskPriority, User

CONTROL_QUEUE: Final = "control"
CALLBACK_QUEUE: Final = "callback"

MEMO_REQUEST: Final = "request"
"""Memo key of the `GenerationInput` or `BatchInput`, written at start."""
MEMO_RECORD: Final = "record"
"""Memo key of a `TaskRecord`, `BatchRecord` or `CallbackRecord`."""

TASK_STATUS: Final = SearchAttributeKey.for_keyword("TaskStatus")
USER_ID: Final = SearchAttributeKey.for_keyword("UserId")
ERROR_CODE: Final = SearchAttributeKey.for_keyword("ErrorCode")
CALLBACK_STATUS: Final = SearchAttributeKey.for_keyword("CallbackStatus")
MODEL: Final = SearchAttributeKey.for_keyword("Model")
BATCH_ID: Final = SearchAttributeKey.for_keyword("BatchId")
WORKER_ID: Final = SearchAttributeKey.for_keyword("WorkerId")
FINISHED_AT: Final = SearchAttributeKey.for_datetime("FinishedAt")

SEARCH_ATTRIBUTES: Final = (
    TASK_STATUS,
    USER_ID,
    ERROR_CODE,
    CALLBACK_STATUS,
    MODEL,
    BATCH_ID,
    WORKER_ID,
    FINISHED_AT,
)
"""Registered by the deploy step, checked when a worker starts: upserting an unregistered one hangs a job."""

PRIORITY_KEYS: Final[Mapping[TaskPriority, int]] = MappingProxyType(
    {TaskPriority.HIGH: 2, TaskPriority.NORMAL: 3, TaskPriority.LOW: 4}
)
"""Temporal priority keys, 1 first. 1 is left for tasks that were requeued from high."""


def gpu_queue(pool: str) -> str:
    """Task queue of a GPU pool. One queue per lease, ever: pools, not model queues."""
    return f"gpu-{pool}"


def deployment_name(task_queue: str) -> str:
    """Worker Deployment of the workers of a task queue; each kind and pool is released by itself."""
    return f"reelgate-{task_queue}"


def rollout_id(pool: str) -> str:
    """Workflow id of the rollout of a GPU pool: one at a time."""
    return f"rollout-{pool}"


def requeued_priority(key: int, requeues: int) -> int:
    """Priority key after `requeues` queue timeouts: one level up each, never above 1."""
    return max(1, key - requeues)


def _digest(*parts: object) -> bytes:
    text = json.dumps(parts, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).digest()


def user_hash(user: User) -> str:
    """32 hex digits naming a user: fairness key (over 64 bytes one hangs the job), search attribute, input folder."""
    return _digest("user", user.tenant, user.end_user).hex()[:32]


def endpoint_hash(tenant: str, url: str) -> str:
    """32 hex digits naming a callback endpoint: the fairness key of its deliveries."""
    return _digest("endpoint", tenant, url).hex()[:32]


def explicit_key(value: str) -> str:
    """Idempotency key that the client sent."""
    return f"explicit:{value}"


def derived_key(fields: Mapping[str, object]) -> str:
    """Idempotency key made of what was sent, for clients that send none."""
    return f"derived:{_digest('fields', dict(fields)).hex()}"


def fingerprint(fields: Mapping[str, object]) -> str:
    """Hash of every field sent, to tell a repeated request from another one under the same key."""
    return _digest("fingerprint", dict(fields)).hex()


def task_id(user: User, key: str, after: str | None = None) -> str:
    """Id of the task for a user's key, or of the next link of its chain after the ended task `after`."""
    parts = ["task", user.tenant, user.end_user, key, *([after] if after else [])]
    return "t" + b32encode(_digest(*parts)).decode("ascii")[:26].lower()


def batch_id(user: User, key: str, after: str | None = None) -> str:
    """Id of the batch for a user's key, or of the next one of its chain after the ended batch `after`."""
    parts = ["batch", user.tenant, user.end_user, key, *([after] if after else [])]
    return "b" + b32encode(_digest(*parts)).decode("ascii")[:26].lower()


def batch_item_key(root_batch: str, index: int, content: str) -> str:
    """Idempotency key of an item: the same in every batch of a chain, so that its done tasks answer."""
    return f"batch:{root_batch}:{index}:{content}"


def batch_item_seed(root_batch: str, index: int, content: str) -> int:
    """Seed for an item that names none: another clip per item, the same in every batch of a chain."""
    return int.from_bytes(_digest("batch-seed", root_batch, index, content)[:4], "big") >> 1


def batch_items_key(user: User, of_batch: str) -> str:
    """Object key of the items of a batch, beside the user's input images."""
    return f"inputs/{user_hash(user)}/{of_batch}-items"


def batch_report_key(user: User, of_batch: str) -> str:
    """Object key of the rules that rejected items of a batch broke."""
    return f"inputs/{user_hash(user)}/{of_batch}-report"


def callback_id(of_task: str, redelivery: int = 0) -> str:
    """Workflow id of a task's delivery, or of its n-th redelivery."""
    return f"callback-{of_task}-r{redelivery}" if redelivery else f"callback-{of_task}"


def admission_id(user: User) -> str:
    """Workflow id of a user's admission."""
    return f"admission-{user_hash(user)}"


def tenant_admission_id(tenant: str) -> str:
    """Workflow id of the admission above the end users of a tenant's service keys."""
    return f"admission-{_digest('tenant', tenant).hex()[:32]}"


def derived_seed(user: User, fields: Mapping[str, object]) -> int:
    """Seed for a request that names none: the same request makes the same clip."""
    return int.from_bytes(_digest("seed", user.tenant, user.end_user, dict(fields))[:4], "big") >> 1


def task_seed(of_task: str) -> int:
    """Seed for a request with an explicit key or `regenerate`: a new clip per task, the same in every attempt."""
    return int.from_bytes(_digest("seed-of-task", of_task)[:4], "big") >> 1


def artifact_key(user: User, parameters: GenerationParameters, model_revision: str) -> str:
    """64 hex digits naming the clip that these parameters make for this user with this model revision."""
    return _digest("artifact", user.tenant, user.end_user, model_revision, asdict(parameters)).hex()


def artifact_prefix(key: str) -> str:
    """Folder of everything published under an artifact key."""
    return f"artifacts/{key}"


def attempt_prefix(key: str, token: str) -> str:
    """Folder of what one attempt publishes."""
    return f"{artifact_prefix(key)}/{token}"


def input_key(user: User, sha256: str) -> str:
    """Object key of an input image."""
    return f"inputs/{user_hash(user)}/{sha256}"
