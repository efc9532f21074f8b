"""The payload codec: round trip, rotation, foreign payloads, and errors that show nothing."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from tests.workers.workflows import FailingLaterWorkflow, FailingWorkflow, worker_for
from workers.codec import (
    CodecKey,
    CodecKeyError,
    EncryptionCodec,
    codec_from,
    create_key_file,
    data_converter,
    parse_keys,
)
from workers.settings import Settings

OLD = CodecKey(key_id="old", secret=bytes(32))
NEW = CodecKey(key_id="new", secret=bytes(range(32)))
SECRET_TEXT = "a red circle moving right"
CLEAR = Payload(metadata={"encoding": b"json/plain"}, data=SECRET_TEXT.encode())


async def test_round_trip_hides_data_and_metadata() -> None:
    codec = EncryptionCodec([NEW])
    (sealed,) = await codec.encode([CLEAR])
    assert SECRET_TEXT.encode() not in sealed.SerializeToString()
    assert b"json/plain" not in sealed.SerializeToString()
    assert sealed.metadata["encryption-key-id"] == b"new"
    assert await codec.decode([sealed]) == [CLEAR]


async def test_the_same_payload_never_looks_the_same_twice() -> None:
    first, second = await EncryptionCodec([NEW]).encode([CLEAR, CLEAR])
    assert first.data != second.data


async def test_after_a_rotation_old_payloads_still_decode_and_new_ones_carry_the_new_key() -> None:
    (before,) = await EncryptionCodec([OLD]).encode([CLEAR])
    rotated = EncryptionCodec([NEW, OLD])
    (after,) = await rotated.encode([CLEAR])
    assert after.metadata["encryption-key-id"] == b"new"
    assert await rotated.decode([before, after]) == [CLEAR, CLEAR]


def _with_keys(client: Client, *keys: CodecKey) -> Client:
    config = client.config()
    config["data_converter"] = data_converter(EncryptionCodec(keys))
    return Client(**config)


async def test_a_run_lives_through_a_rotation_and_its_failure_carries_the_new_key(client: Client) -> None:
    before, both, after = _with_keys(client, OLD), _with_keys(client, OLD, NEW), _with_keys(client, NEW, OLD)
    async with worker_for(before, FailingLaterWorkflow) as queue:
        handle = await before.start_workflow(FailingLaterWorkflow.run, SECRET_TEXT, id=f"rot-{queue}", task_queue=queue)
    async with Worker(both, task_queue=queue, workflows=[FailingLaterWorkflow]):
        # A process that has moved the new key to the front already, beside one that has not.
        await after.get_workflow_handle(handle.id).signal(FailingLaterWorkflow.tell, "old rain")
        with pytest.raises(WorkflowFailureError) as raised:
            await both.get_workflow_handle(handle.id).result()
    assert f"cannot make {SECRET_TEXT} because of old rain" in str(raised.value.cause)
    async with worker_for(after, FailingWorkflow) as queue:
        last = await after.start_workflow(FailingWorkflow.run, SECRET_TEXT, id=f"rot2-{queue}", task_queue=queue)
        with pytest.raises(WorkflowFailureError):
            await last.result()
    assert await _key_ids(client, handle.id) == ["old", "new", "old"]
    assert await _key_ids(client, last.id) == ["new", "new"]
    for workflow_id in (handle.id, last.id):
        history = await client.get_workflow_handle(workflow_id).fetch_history()
        assert SECRET_TEXT not in history.to_json()
        assert "old rain" not in history.to_json()


async def _key_ids(client: Client, workflow_id: str) -> list[str]:
    """Key ids of input, signals and failure, in the order of the history."""
    found: list[Payload] = []
    for event in (await client.get_workflow_handle(workflow_id).fetch_history()).events:
        found += event.workflow_execution_started_event_attributes.input.payloads
        found += event.workflow_execution_signaled_event_attributes.input.payloads
        failed = event.workflow_execution_failed_event_attributes
        if failed.failure.HasField("encoded_attributes"):
            assert failed.failure.message == "Encoded failure"
            found.append(failed.failure.encoded_attributes)
    return [payload.metadata["encryption-key-id"].decode() for payload in found]


async def test_payloads_of_other_encodings_pass_through() -> None:
    assert await EncryptionCodec([NEW]).decode([CLEAR]) == [CLEAR]


async def test_a_missing_key_is_named_and_nothing_of_the_payload() -> None:
    (sealed,) = await EncryptionCodec([OLD]).encode([CLEAR])
    with pytest.raises(CodecKeyError, match="'old'") as raised:
        await EncryptionCodec([NEW]).decode([sealed])
    assert SECRET_TEXT not in str(raised.value)


@pytest.mark.parametrize("damage", ["another key", "flipped bit", "cut short", "other id"])
async def test_what_was_tampered_with_is_refused(damage: str) -> None:
    (sealed,) = await EncryptionCodec([OLD]).encode([CLEAR])
    keys = [OLD, NEW]
    match damage:
        case "another key":
            keys = [CodecKey(key_id="old", secret=NEW.secret)]
        case "flipped bit":
            sealed.data = sealed.data[:-1] + bytes([sealed.data[-1] ^ 1])
        case "cut short":
            sealed.data = sealed.data[:5]
        case _:
            sealed.metadata["encryption-key-id"] = b"new"
    with pytest.raises(CodecKeyError, match="does not decrypt"):
        await EncryptionCodec(keys).decode([sealed])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("no-colon", "key 1: expected"),
        ("k1:%%%", r"key 1 \(k1\): not base64"),
        (f"k1:{base64.b64encode(b'short').decode()}", r"\(k1\): 5 bytes, a key has 32"),
        (f"k1:{base64.b64encode(bytes(32)).decode()},sp ace:AAAA", "key 2: expected"),
    ],
)
def test_a_malformed_key_is_pointed_at_without_showing_it(text: str, complaint: str) -> None:
    with pytest.raises(CodecKeyError, match=complaint) as raised:
        parse_keys(text, source="REELGATE_CODEC_KEYS")
    assert text.partition(":")[2] not in str(raised.value) or not text.partition(":")[2]


def test_no_keys_and_two_keys_of_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CodecKeyError, match="REELGATE_CODEC_KEY_FILE"):
        codec_from(Settings(codec_key_file=tmp_path / "missing"))
    with pytest.raises(CodecKeyError, match="no payload keys"):
        EncryptionCodec([])
    with pytest.raises(CodecKeyError, match="same id"):
        EncryptionCodec([OLD, CodecKey(key_id="old", secret=NEW.secret)])


def test_a_key_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "codec.keys"
    create_key_file(file)
    first = file.read_bytes()
    create_key_file(file)
    assert file.read_bytes() == first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    assert len(codec_from(Settings(codec_key_file=file)).key_ids) == 1


def test_the_setting_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_key_file(tmp_path / "codec.keys")
    encoded = base64.b64encode(os.urandom(32)).decode()
    monkeypatch.setenv("REELGATE_CODEC_KEYS", f"fresh:{encoded}")
    settings = Settings(data_dir=tmp_path)
    assert codec_from(settings).key_ids == ("fresh",)
    assert encoded not in repr(settings)


async def test_on_a_real_server_neither_input_nor_failure_is_readable_without_the_key(client: Client) -> None:
    config = client.config()
    config["data_converter"] = data_converter(EncryptionCodec([NEW]))
    encrypted = Client(**config)
    async with worker_for(encrypted, FailingWorkflow) as queue:
        handle = await encrypted.start_workflow(FailingWorkflow.run, SECRET_TEXT, id=f"codec-{queue}", task_queue=queue)
        with pytest.raises(WorkflowFailureError) as raised:
            await handle.result()
    assert isinstance(raised.value.cause, ApplicationError)
    assert SECRET_TEXT in str(raised.value.cause)
    history = await client.get_workflow_handle(handle.id).fetch_history()
    assert SECRET_TEXT not in history.to_json()
    assert b"binary/encrypted" in b"".join(event.SerializeToString() for event in history.events)
