"""What is written for Temporal, against what the SDK alone would write and read."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from temporalio.converter import DefaultPayloadConverter, PayloadConverter

import workflows
from tests.workflows.jobs import plan
from workers.payload_converter import ReelgatePayloadConverter
from workflows.states import TaskStatus
from workflows.tasks import CallbackTarget, CancelMode, GenerationInput, TaskRecord

OURS, SDK = ReelgatePayloadConverter(), DefaultPayloadConverter()


def values() -> tuple[object, ...]:
    """A large one, one with times and enums, and what no dataclass is."""
    request = plan(
        pool="default", labels=("\N{CLAPPER BOARD}", "動画"), callback=CallbackTarget(url="https://a.example/")
    )
    at = datetime(2026, 11, 30, 12, 0, 0, 250_000, tzinfo=UTC)
    record = TaskRecord(
        task_id="t",
        status=TaskStatus.PROCESSING,
        created_at=at,
        queued_at=at,
        updated_at=at,
        cancel_requested=CancelMode.HARD,
    )
    return request, record, "text", 3, 2.5, True, None, b"bytes", TaskStatus.QUEUED, ["a", 1], {"gpu_seconds": 1.5}


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("writer", "reader"), [(OURS, OURS), (OURS, SDK), (SDK, OURS)])
def test_each_reads_what_the_other_has_written(
    value: object, writer: PayloadConverter, reader: PayloadConverter
) -> None:
    payload = writer.to_payload(value)
    assert payload.metadata == SDK.to_payload(value).metadata
    assert reader.from_payload(payload, type(value)) == value


def test_a_dataclass_is_the_same_document_as_the_sdk_writes() -> None:
    request = values()[0]
    ours, sdk = (json.loads(converter.to_payload(request).data) for converter in (OURS, SDK))
    for document in (ours, sdk):
        document["accepted_at"] = datetime.fromisoformat(document["accepted_at"])
    assert ours == sdk


def test_half_a_surrogate_pair_is_carried_as_the_sdk_carries_it() -> None:
    request = plan(pool="default")
    broken = replace(request, parameters=replace(request.parameters, prompt="half \ud83d"))
    assert OURS.to_payload(broken) == SDK.to_payload(broken)
    assert OURS.from_payload(OURS.to_payload(broken), GenerationInput) == broken


def test_what_a_newer_release_adds_is_ignored_and_what_an_older_one_lacks_has_its_default() -> None:
    document = json.loads(SDK.to_payload(plan(pool="default", labels=("a",))).data)
    del document["labels"]
    read = OURS.from_payload(SDK.to_payload(document | {"added_later": 1}), GenerationInput)
    assert read.labels == ()


@dataclass(frozen=True)
class _Measured:
    seconds: float


def test_what_is_no_json_is_read_as_the_sdk_reads_it() -> None:
    assert math.isinf(OURS.from_payload(SDK.to_payload(_Measured(math.inf)), _Measured).seconds)


def test_a_payload_that_neither_reads_is_the_sdks_error() -> None:
    payload = SDK.to_payload({"status": "NEVER_HEARD_OF"})
    with pytest.raises(TypeError) as ours:
        OURS.from_payload(payload, TaskRecord)
    with pytest.raises(TypeError) as sdk:
        SDK.from_payload(payload, TaskRecord)
    assert str(ours.value) == str(sdk.value)


def _dataclasses() -> Iterator[type[Any]]:
    for module in pkgutil.iter_modules(workflows.__path__, "workflows."):
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and is_dataclass(kind) and kind.__module__ == module.name:
                yield kind


@pytest.mark.parametrize("kind", list(_dataclasses()), ids=lambda kind: kind.__name__)
def test_every_dataclass_of_the_workflows_has_a_compiled_reader(kind: type[Any]) -> None:
    msgspec.json.Decoder(kind)
