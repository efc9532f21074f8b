"""Publishing and finding artifacts in real stores."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.artifacts import ArtifactRepository, PublishRefusedError
from activities.storage import ObjectStore, StoreUnavailableError
from activities.uploads import PART_BYTES
from activities.video import EncodedClip
from tests.object_stores import BUCKET, S3Endpoint, serving_s3
from workflows.failures import FailureCode
from workflows.naming import artifact_prefix, attempt_prefix
from workflows.tasks import (
    Artifact,
    FindArtifactInput,
    GenerateClipInput,
    GenerationParameters,
    Limits,
    RemoveArtifactsInput,
)

KEY = "a" * 64
RETENTION = timedelta(days=7)
VIDEO = os.urandom(PART_BYTES + 1)
"""Goes up in parts."""


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return ObjectStore.from_url((tmp_path / "store").as_uri())
    endpoint: S3Endpoint = request.getfixturevalue("s3_endpoint")
    return ObjectStore.from_url(endpoint.new_root(), options=endpoint.options())


@pytest.fixture
def local(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url((tmp_path / "store").as_uri())


@pytest.fixture
def clip(tmp_path: Path) -> EncodedClip:
    video, poster = tmp_path / "video.mp4", tmp_path / "poster.webp"
    video.write_bytes(VIDEO)
    poster.write_bytes(b"poster")
    return EncodedClip(video=video, poster=poster, width=64, height=32, num_frames=9, fps=23.976)


def attempt(name: str = "token-1", key: str = KEY) -> GenerateClipInput:
    parameters = GenerationParameters(
        model="moving-shapes",
        prompt="a red square",
        width=64,
        height=32,
        num_frames=9,
        fps=23.976,
        num_inference_steps=4,
        guidance_scale=1.0,
        seed=7,
    )
    return GenerateClipInput(
        task_id="t1",
        token=name,
        attempt=1,
        parameters=parameters,
        model_revision="r1",
        artifact_key=key,
        limits=Limits(),
    )


def repository(store: ObjectStore, retention: timedelta = RETENTION) -> ArtifactRepository:
    return ArtifactRepository(store, retention=retention)


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


async def keys(store: ObjectStore, prefix: str = "artifacts") -> list[str]:
    return [info.key async for info in store.list(prefix)]


async def rewrite_manifest(store: ObjectStore, artifact: Artifact, change: Callable[[bytes], bytes]) -> None:
    key = f"{attempt_prefix(artifact.key, artifact.token)}/manifest.json"
    await store.put(key, change(await store.get(key)), content_type="application/json")


class TestPublish:
    async def test_a_published_clip_is_found_as_it_was_made(self, store: ObjectStore, clip: EncodedClip) -> None:
        before = datetime.now(UTC)
        artifact = await repository(store).publish(clip, attempt(), may_publish=yes)
        folder = attempt_prefix(KEY, "token-1")
        assert await keys(store) == [f"{folder}/{name}" for name in ("manifest.json", "poster.webp", "video.mp4")]
        assert await repository(store).find(KEY) == artifact
        assert before <= artifact.created_at <= datetime.now(UTC)
        assert artifact == Artifact(
            key=KEY,
            token="token-1",
            video_key=f"{folder}/video.mp4",
            poster_key=f"{folder}/poster.webp",
            sha256=hashlib.sha256(VIDEO).hexdigest(),
            bytes=len(VIDEO),
            poster_sha256=hashlib.sha256(b"poster").hexdigest(),
            poster_bytes=6,
            width=64,
            height=32,
            num_frames=9,
            fps=23.976,
            seed=7,
            model="moving-shapes",
            model_revision="r1",
            created_at=artifact.created_at,
            expires_at=artifact.created_at + RETENTION,
        )

    async def test_the_manifest_says_its_version_and_no_prompt(self, store: ObjectStore, clip: EncodedClip) -> None:
        artifact = await repository(store).publish(clip, attempt(), may_publish=yes)
        body = await store.get(f"{attempt_prefix(KEY, 'token-1')}/manifest.json")
        manifest = json.loads(body)
        assert manifest["schema_version"] == 1
        assert manifest["artifact"].keys() == asdict(artifact).keys()
        assert b"red square" not in body

    async def test_the_question_comes_after_the_files_and_before_the_manifest(
        self, store: ObjectStore, clip: EncodedClip
    ) -> None:
        seen: list[list[str]] = []

        async def look() -> bool:
            seen.append([key.rpartition("/")[2] for key in await keys(store)])
            assert await repository(store).find(KEY) is None
            return True

        await repository(store).publish(clip, attempt(), may_publish=look)
        assert seen == [["poster.webp", "video.mp4"]]

    async def test_a_refused_publication_leaves_nothing(self, store: ObjectStore, clip: EncodedClip) -> None:
        with pytest.raises(PublishRefusedError):
            await repository(store).publish(clip, attempt(), may_publish=no)
        assert await keys(store) == []

    async def test_an_error_of_the_question_leaves_nothing_and_comes_through(
        self, store: ObjectStore, clip: EncodedClip
    ) -> None:
        async def fail() -> bool:
            raise ConnectionError("no answer")

        with pytest.raises(ConnectionError):
            await repository(store).publish(clip, attempt(), may_publish=fail)
        assert await keys(store) == []

    async def test_a_missing_local_file_leaves_nothing(self, store: ObjectStore, clip: EncodedClip) -> None:
        clip.poster.unlink()
        with pytest.raises(FileNotFoundError):
            await repository(store).publish(clip, attempt(), may_publish=yes)
        assert await keys(store) == []

    async def test_a_refused_attempt_leaves_the_winner_alone(self, store: ObjectStore, clip: EncodedClip) -> None:
        winner = await repository(store).publish(clip, attempt("token-1"), may_publish=yes)
        with pytest.raises(PublishRefusedError):
            await repository(store).publish(clip, attempt("token-2"), may_publish=no)
        assert await repository(store).find(KEY) == winner
        assert len(await keys(store)) == 3

    @pytest.mark.parametrize("wait", [0.0, 0.002, 0.01, 0.03, 0.08])
    async def test_a_cancelled_publication_leaves_nothing(
        self, store: ObjectStore, clip: EncodedClip, wait: float
    ) -> None:
        asked = asyncio.Event()

        async def hang() -> bool:
            asked.set()
            await asyncio.sleep(60)
            return True

        publishing = asyncio.create_task(repository(store).publish(clip, attempt(), may_publish=hang))
        await asyncio.sleep(wait)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert await keys(store) == []

    async def test_a_second_cancellation_does_not_stop_the_clean_up(
        self, store: ObjectStore, clip: EncodedClip
    ) -> None:
        asked = asyncio.Event()

        async def hang() -> bool:
            asked.set()
            await asyncio.sleep(60)
            return True

        publishing = asyncio.create_task(repository(store).publish(clip, attempt(), may_publish=hang))
        await asked.wait()
        publishing.cancel()
        await asyncio.sleep(0)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert await keys(store) == []

    async def test_a_store_that_goes_away_is_a_store_error_and_the_rest_is_invisible(
        self, tmp_path: Path, clip: EncodedClip
    ) -> None:
        with serving_s3(tmp_path) as endpoint:
            store = ObjectStore.from_url(f"s3://{BUCKET}/x", options=endpoint.options())

            async def kill() -> bool:
                endpoint.kill()
                return True

            with pytest.raises(StoreUnavailableError):
                await repository(store).publish(clip, attempt(), may_publish=kill)
            with serving_s3(tmp_path, port=int(endpoint.url.rpartition(":")[2])):
                assert await repository(store).find(KEY) is None
                assert await repository(store).remove(KEY, ["token-1"]) == 2


class TestFind:
    async def test_nothing_published_is_none(self, store: ObjectStore) -> None:
        assert await repository(store).find(KEY) is None

    async def test_the_newest_of_several_wins(self, store: ObjectStore, clip: EncodedClip) -> None:
        published = [
            await repository(store).publish(clip, attempt(token), may_publish=yes) for token in ("t-2", "t-3", "t-1")
        ]
        assert await repository(store).find(KEY) == published[-1]

    async def test_other_keys_are_not_found(self, store: ObjectStore, clip: EncodedClip) -> None:
        await repository(store).publish(clip, attempt(key=KEY), may_publish=yes)
        assert await repository(store).find("b" * 64) is None
        assert await repository(store).find(KEY[:-1]) is None

    async def test_an_expired_artifact_is_not_found(self, local: ObjectStore, clip: EncodedClip) -> None:
        await repository(local, timedelta(seconds=-1)).publish(clip, attempt(), may_publish=yes)
        assert await repository(local).find(KEY) is None

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda body: b"", id="empty"),
            pytest.param(lambda body: body[:-20], id="cut"),
            pytest.param(lambda body: b"[]", id="list"),
            pytest.param(lambda body: b"\xff\xfe", id="no text"),
            pytest.param(lambda body: body.replace(b'"schema_version":1', b'"schema_version":2'), id="later version"),
            pytest.param(lambda body: body.replace(b'"seed":7', b'"seed":"seven"'), id="wrong type"),
            pytest.param(lambda body: body.replace(b"video.mp4", b"other.mp4"), id="other video"),
            pytest.param(lambda body: body.replace(b"token-1", b"token-9"), id="other token"),
            pytest.param(lambda body: body.replace(KEY.encode(), b"b" * 64), id="other key"),
            pytest.param(lambda body: body.replace(b"Z", b""), id="no time zone"),
        ],
    )
    async def test_a_broken_manifest_counts_for_nothing_and_hides_no_good_one(
        self, local: ObjectStore, clip: EncodedClip, change: Callable[[bytes], bytes]
    ) -> None:
        broken = await repository(local).publish(clip, attempt("token-1"), may_publish=yes)
        await rewrite_manifest(local, broken, change)
        assert await repository(local).find(KEY) is None
        good = await repository(local).publish(clip, attempt("token-2"), may_publish=yes)
        assert await repository(local).find(KEY) == good

    @pytest.mark.parametrize("name", ["video.mp4", "poster.webp"])
    async def test_a_missing_or_cut_object_makes_the_manifest_count_for_nothing(
        self, store: ObjectStore, clip: EncodedClip, name: str
    ) -> None:
        await repository(store).publish(clip, attempt(), may_publish=yes)
        key = f"{attempt_prefix(KEY, 'token-1')}/{name}"
        await store.put(key, b"cut", content_type="video/mp4")
        assert await repository(store).find(KEY) is None
        await store.delete([key])
        assert await repository(store).find(KEY) is None


class TestRemove:
    async def test_only_the_named_attempts_go(self, store: ObjectStore, clip: EncodedClip) -> None:
        for token in ("t-1", "t-2", "t-10"):
            await repository(store).publish(clip, attempt(token), may_publish=yes)
        assert await repository(store).remove(KEY, ["t-1", "t-2", "never"]) == 6
        assert {key.split("/")[2] for key in await keys(store)} == {"t-10"}
        assert await repository(store).remove(KEY, ["t-1", "t-2"]) == 0

    async def test_everything_under_a_key_goes(self, store: ObjectStore, clip: EncodedClip) -> None:
        for token in ("t-1", "t-2"):
            await repository(store).publish(clip, attempt(token), may_publish=yes)
        other = await repository(store).publish(clip, attempt(key="b" * 64), may_publish=yes)
        assert await repository(store).remove_all(KEY) == 6
        assert await keys(store, artifact_prefix(KEY)) == []
        assert await repository(store).find("b" * 64) == other


class TestActivities:
    async def test_find_and_remove_on_the_control_queue(self, store: ObjectStore, clip: EncodedClip) -> None:
        artifacts = repository(store)
        published = await artifacts.publish(clip, attempt(), may_publish=yes)
        run = ActivityEnvironment().run
        assert await run(artifacts.find_artifact, FindArtifactInput(artifact_key=KEY)) == published
        removal = RemoveArtifactsInput(artifact_key=KEY, tokens=("token-1",))
        assert await run(artifacts.remove_artifacts, removal) == 3
        assert await run(artifacts.find_artifact, FindArtifactInput(artifact_key=KEY)) is None

    async def test_a_store_that_is_away_is_a_retryable_storage_failure(self) -> None:
        options = {"endpoint": "http://127.0.0.1:9", "allow_http": "true"}
        keys_given = {"access_key_id": "abc", "secret_access_key": "very-secret"}
        artifacts = repository(ObjectStore.from_url("s3://clips", options=options | keys_given))
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: artifacts.find_artifact(FindArtifactInput(artifact_key=KEY)),
            lambda: artifacts.remove_artifacts(RemoveArtifactsInput(artifact_key=KEY, tokens=("t",))),
        ]
        for call in calls:
            with pytest.raises(ApplicationError) as caught:
                await call()
            assert caught.value.type == FailureCode.STORAGE_UNAVAILABLE
            assert not caught.value.non_retryable
            assert "very-secret" not in str(caught.value)

    async def test_a_key_that_no_retry_makes_legal_is_final(self, local: ObjectStore) -> None:
        with pytest.raises(ApplicationError) as caught:
            await repository(local).find_artifact(FindArtifactInput(artifact_key="../../etc"))
        assert caught.value.non_retryable
