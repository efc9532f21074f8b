"""What a GPU worker tells of its inference processes and of the pace of the steps."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from activities.inference.catalogue import load_catalogue
from activities.inference.health import DeviceHealth, DeviceState
from activities.inference.messages import Generate
from activities.inference.pool import PoolHealth
from activities.inference.run import InferenceRun
from tests.workflows.jobs import PARAMETERS
from workers.gpu_metrics import PoolCollector, StepTimes
from workflows.tasks import Limits, Phase


def device(name: str, state: DeviceState) -> DeviceHealth:
    return DeviceHealth(
        device=name,
        worker_id=f"host/{name}",
        state=state,
        reason="it hung" if state is DeviceState.SETUP_FAILED else None,
        pid=1,
        leased=False,
        busy_seconds=12.5,
        tasks=3,
        restarts=2,
        models=(),
    )


def test_a_device_has_one_state_and_its_counts() -> None:
    health = PoolHealth(
        devices=(device("cuda:0", DeviceState.BUSY), device("cuda:1", DeviceState.SETUP_FAILED)), slots=3, permits=1
    )
    registry = CollectorRegistry()
    registry.register(PoolCollector(lambda: health))
    shown = {
        (sample.labels["device"], sample.labels["state"])
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "reelgate_device_state" and sample.value == 1
    }
    assert shown == {("cuda:0", "BUSY"), ("cuda:1", "SETUP_FAILED")}
    for name, expected in (("restarts", 2), ("busy_seconds", 12.5), ("attempts", 3)):
        assert registry.get_sample_value(f"reelgate_device_{name}_total", {"device": "cuda:0"}) == expected
    assert registry.get_sample_value("reelgate_worker_slots") == 3
    assert registry.get_sample_value("reelgate_worker_slots_used") == 1


def test_each_step_is_timed_for_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("activities.inference.run.time.monotonic", lambda: now[0])
    registry = CollectorRegistry()
    spec = load_catalogue().get("moving-shapes")
    job = Generate(job=1, spec=spec, parameters=PARAMETERS, image=None, frames="frames.npy")
    run = InferenceRun(job, Limits(), send_stop=lambda _: None, on_step=StepTimes(registry).observe)
    run.enter(Phase.LOAD)
    now[0] += 60
    run.enter(Phase.STEP)
    for number, seconds in enumerate((2.0, 0.5, 0.5), start=1):
        now[0] += seconds
        run.advance(number, 3)
    run.enter(Phase.DECODE)
    labels = {"model": "moving-shapes"}
    assert registry.get_sample_value("reelgate_step_seconds_count", labels) == 3
    assert registry.get_sample_value("reelgate_step_seconds_sum", labels) == pytest.approx(3.0)
    assert run.seconds_per_step == pytest.approx(1.0)
