"""The body of a callback, serialised once, and its signature over exactly those bytes.

The flat shape of one task event stays under 20 KB, as the Standard Webhooks specification advises. A merged
request is put together from the very texts that the single requests would have carried.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final, Protocol

from standardwebhooks import Webhook
from standardwebhooks.webhooks import EmptyWebhookSecretError

from workflows.tasks import CallbackEvent

MAX_BODY_BYTES: Final = 20 * 1024
MAX_MERGED_BYTES: Final = 256 * 1024

_MERGED_HEAD: Final = '{"type":"tasks.completed","tasks":['
_MERGED_TAIL: Final = "]}"
MERGED_FRAME_BYTES: Final = len(_MERGED_HEAD) + len(_MERGED_TAIL)


class ArtifactLinks(Protocol):
    """Makes the links that a receiver can open without a key until the artifact is removed."""

    def video_url(self, task_id: str, expires_at: datetime) -> str:
        """Link to the clip of a task."""
        ...

    def poster_url(self, task_id: str, expires_at: datetime) -> str:
        """Link to its poster image."""
        ...


def callback_body(event: CallbackEvent, links: ArtifactLinks) -> str:
    """Serialise an event: compact JSON, at most `MAX_BODY_BYTES` in UTF-8.

    Over the limit the error message is shortened first; labels are the client's own words and go last.
    """
    body = _serialise(event, links)
    excess = _size(body) - MAX_BODY_BYTES
    if excess > 0 and event.error_message:
        event = replace(event, error_message=_shortened(event.error_message, excess))
        body = _serialise(event, links)
    while _size(body) > MAX_BODY_BYTES and event.labels:
        event = replace(event, labels=event.labels[:-1])
        body = _serialise(event, links)
    return body


def merged_body(bodies: Sequence[str]) -> str:
    """One request for several tasks: `{"type": "tasks.completed", "tasks": [...]}`, each as it would go alone."""
    return f"{_MERGED_HEAD}{','.join(bodies)}{_MERGED_TAIL}"


def merged_id(task_ids: Sequence[str]) -> str:
    """`webhook-id` of a merged request: the same tasks always go under the same id."""
    return "m" + sha256("\n".join(sorted(task_ids)).encode()).hexdigest()


def signed_headers(webhook_id: str, body: str, secrets: Sequence[str], sent_at: datetime) -> dict[str, str]:
    """Standard Webhooks headers: one signature per live secret, so that a receiver may rotate at its own pace.

    Raises:
        ValueError: a secret is not `whsec_` and base64, or there is none: nothing ever leaves unsigned.
    """
    if not secrets:
        raise ValueError("no signing secret")
    try:
        signatures = [Webhook(secret).sign(webhook_id, sent_at, body) for secret in secrets]
    except EmptyWebhookSecretError as error:
        raise ValueError("an empty signing secret") from error
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(int(sent_at.timestamp())),
        "webhook-signature": " ".join(signatures),
        "idempotency-key": webhook_id,
    }


def _serialise(event: CallbackEvent, links: ArtifactLinks) -> str:
    expires_at = event.artifact_expires_at
    text = json.dumps(
        {
            "type": event.type,
            "timestamp": _wire_time(event.timestamp),
            "task_id": event.task_id,
            "status": event.status.value,
            "result_url": links.video_url(event.task_id, expires_at) if expires_at else None,
            "poster_url": links.poster_url(event.task_id, expires_at) if expires_at else None,
            "error_code": event.error_code.value if event.error_code else None,
            "error_message": event.error_message,
            "created_at": _wire_time(event.created_at),
            "started_at": _wire_time(event.started_at) if event.started_at else None,
            "finished_at": _wire_time(event.finished_at),
            "labels": list(event.labels),
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )
    # A lone surrogate is legal in a JSON string and impossible in UTF-8; it must not make a task undeliverable.
    return text.encode("utf-8", "replace").decode("utf-8")


def _wire_time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _shortened(message: str, excess: int) -> str:
    """Cut `excess` serialised bytes and the room for an ellipsis off the end of a message."""
    kept = len(message)
    budget = _size(json.dumps(message, ensure_ascii=False)) - excess - len("…".encode())
    while kept and _size(json.dumps(message[:kept], ensure_ascii=False)) > budget:
        kept = kept * 9 // 10
    return f"{message[:kept]}…"
