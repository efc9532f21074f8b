"""Published clips: `artifacts/<artifact key>/<token>/{video.mp4,poster.webp,manifest.json}`.

An artifact is there when its manifest is: the manifest goes up last, after a last question whether the attempt may
still publish, and it names sizes and hashes of what went before. Whatever is found without a complete manifest is
left over from an attempt that did not end well and counts for nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import TypeAdapter, ValidationError
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.storage import InvalidKeyError, ObjectInfo, ObjectNotFoundError, ObjectStore, StoreUnavailableError
from workflows.contracts import FIND_ARTIFACT, REMOVE_ARTIFACTS, ArtifactActivities
from workflows.failures import FailureCode
from workflows.naming import artifact_prefix, attempt_prefix
from workflows.tasks import Artifact, FindArtifactInput, GenerateClipInput, RemoveArtifactsInput

if TYPE_CHECKING:
    from activities.video import EncodedClip

VIDEO_NAME: Final = "video.mp4"
POSTER_NAME: Final = "poster.webp"
MANIFEST_NAME: Final = "manifest.json"

VIDEO_TYPE: Final = "video/mp4"
POSTER_TYPE: Final = "image/webp"
MANIFEST_TYPE: Final = "application/json"

logger = logging.getLogger(__name__)


class PublishRefusedError(Exception):
    """The attempt may no longer publish: its task ended or another attempt took its place."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `manifest.json` holds."""

    artifact: Artifact
    schema_version: Literal[1] = 1


_MANIFEST = TypeAdapter(Manifest)


@contextmanager
def storage_failures() -> Iterator[None]:
    """Turn errors of the store into the failure an activity reports.

    Raises:
        ApplicationError: `STORAGE_UNAVAILABLE`, retryable; or `INTERNAL`, final, for a key that no retry makes legal.
    """
    try:
        yield
    except StoreUnavailableError as error:
        raise ApplicationError(str(error), type=FailureCode.STORAGE_UNAVAILABLE) from error
    except InvalidKeyError as error:
        raise ApplicationError(str(error), type=FailureCode.INTERNAL, non_retryable=True) from error


def parse_manifest(body: bytes, *, artifact_key: str, token: str) -> Artifact | None:
    """Read a manifest found under an artifact key and token; None when it is not one, or is about something else."""
    try:
        artifact = _MANIFEST.validate_json(body).artifact
    except ValidationError:
        return None
    folder = attempt_prefix(artifact_key, token)
    names = (artifact.key, artifact.token, artifact.video_key, artifact.poster_key)
    if names != (artifact_key, token, f"{folder}/{VIDEO_NAME}", f"{folder}/{POSTER_NAME}"):
        return None
    if artifact.created_at.tzinfo is None or artifact.expires_at.tzinfo is None:
        return None
    return artifact


class ArtifactRepository(ArtifactActivities):
    """Artifacts in a store; also the two activities about them that run on the control queue."""

    def __init__(self, store: ObjectStore, *, retention: timedelta) -> None:
        """Keep artifacts in `store`, each for `retention` from its publication."""
        self._store = store
        self._retention = retention

    async def find(self, artifact_key: str) -> Artifact | None:
        """Return the newest complete artifact under the key that has not expired, or None.

        Raises:
            StoreUnavailableError: the store did not answer.
        """
        listed = {info.key: info async for info in self._store.list(artifact_prefix(artifact_key))}
        found = [
            artifact
            for key in listed
            if key.endswith(f"/{MANIFEST_NAME}") and (artifact := await self._complete(artifact_key, key, listed))
        ]
        return max(found, key=lambda artifact: artifact.created_at, default=None)

    async def _complete(self, artifact_key: str, manifest_key: str, listed: dict[str, ObjectInfo]) -> Artifact | None:
        try:
            body = await self._store.get(manifest_key)
        except ObjectNotFoundError:
            return None  # Removed since it was listed.
        artifact = parse_manifest(body, artifact_key=artifact_key, token=manifest_key.split("/")[-2])
        if artifact is None:
            logger.warning("manifest %s is broken and ignored", manifest_key)
            return None
        for key, size in ((artifact.video_key, artifact.bytes), (artifact.poster_key, artifact.poster_bytes)):
            if key not in listed or listed[key].size != size:
                logger.warning("manifest %s names %s, which is missing or of another size", manifest_key, key)
                return None
        return artifact if artifact.expires_at > datetime.now(UTC) else None

    async def publish(
        self, clip: EncodedClip, attempt: GenerateClipInput, *, may_publish: Callable[[], Awaitable[bool]]
    ) -> Artifact:
        """Store a clip and make it an artifact.

        Args:
            clip: local files; the caller removes them.
            attempt: whose clip it is; key and token name the folder.
            may_publish: asked when all but the manifest is stored.

        Raises:
            PublishRefusedError: `may_publish` said no.
            StoreUnavailableError: the store did not take it.
            OSError: a local file cannot be read.

        After an error or a cancellation everything that was put is removed again, as far as the store answers;
        retention removes the rest.
        """
        folder = attempt_prefix(attempt.artifact_key, attempt.token)
        try:
            return await self._put(folder, clip, attempt, may_publish)
        except BaseException:
            names = (MANIFEST_NAME, VIDEO_NAME, POSTER_NAME)
            await _to_its_end(self._discard([f"{folder}/{name}" for name in names]))
            raise

    async def _put(
        self,
        folder: str,
        clip: EncodedClip,
        attempt: GenerateClipInput,
        may_publish: Callable[[], Awaitable[bool]],
    ) -> Artifact:
        artifact = await self._describe(folder, clip, attempt)
        await self._store.put(artifact.video_key, clip.video, content_type=VIDEO_TYPE)
        await self._store.put(artifact.poster_key, clip.poster, content_type=POSTER_TYPE)
        if not await may_publish():
            raise PublishRefusedError(f"attempt {attempt.attempt} of task {attempt.task_id} may not publish")
        manifest = _MANIFEST.dump_json(Manifest(artifact=artifact))
        await self._store.put(f"{folder}/{MANIFEST_NAME}", manifest, content_type=MANIFEST_TYPE)
        return artifact

    async def _describe(self, folder: str, clip: EncodedClip, attempt: GenerateClipInput) -> Artifact:
        sha256, poster_sha256 = await asyncio.to_thread(lambda: (_sha256(clip.video), _sha256(clip.poster)))
        now = datetime.now(UTC)
        return Artifact(
            key=attempt.artifact_key,
            token=attempt.token,
            video_key=f"{folder}/{VIDEO_NAME}",
            poster_key=f"{folder}/{POSTER_NAME}",
            sha256=sha256,
            bytes=clip.video.stat().st_size,
            poster_sha256=poster_sha256,
            poster_bytes=clip.poster.stat().st_size,
            width=clip.width,
            height=clip.height,
            num_frames=clip.num_frames,
            fps=clip.fps,
            seed=attempt.parameters.seed,
            model=attempt.parameters.model,
            model_revision=attempt.model_revision,
            created_at=now,
            expires_at=now + self._retention,
        )

    async def _discard(self, keys: Sequence[str]) -> None:
        try:
            await self._store.delete(keys)
        except StoreUnavailableError as error:
            logger.warning("what an unpublished attempt stored stays until retention removes it: %s", error)

    async def remove(self, artifact_key: str, tokens: Sequence[str]) -> int:
        """Remove what these attempts stored under the key; return the number of objects removed.

        Raises:
            StoreUnavailableError: at least one of them may still be there.
        """
        return sum([await self._remove_folder(attempt_prefix(artifact_key, token)) for token in tokens])

    async def remove_all(self, artifact_key: str) -> int:
        """Remove everything under the key, whoever stored it; return the number of objects removed.

        Raises:
            StoreUnavailableError: at least one of them may still be there.
        """
        return await self._remove_folder(artifact_prefix(artifact_key))

    async def _remove_folder(self, prefix: str) -> int:
        return await self._store.delete([info.key async for info in self._store.list(prefix)])

    @activity.defn(name=FIND_ARTIFACT)
    async def find_artifact(self, request: FindArtifactInput) -> Artifact | None:
        """Return the published clip under an artifact key, or None."""
        with storage_failures():
            return await self.find(request.artifact_key)

    @activity.defn(name=REMOVE_ARTIFACTS)
    async def remove_artifacts(self, request: RemoveArtifactsInput) -> int:
        """Remove what lost attempts left behind and return the number of objects removed."""
        with storage_failures():
            return await self.remove(request.artifact_key, request.tokens)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _to_its_end(work: Coroutine[None, None, None]) -> None:
    """Run clean-up to its end, also when the caller is cancelled meanwhile; the cancellation comes after it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
