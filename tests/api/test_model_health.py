"""What `/models` says of loaded models comes from the workers' own health ports."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta

import pytest

from activities.inference.health import DeviceHealth, DeviceState, ModelState
from activities.inference.health import ModelHealth as HealthOfModel
from api.fleet import Fleet
from api.model_health import ModelHealth
from tests.api.stand import Stand
from workers.health import health_address, open_health_port, serve_health
from workers.settings import Settings


def device(state: DeviceState, *models: HealthOfModel, reason: str | None = None) -> DeviceHealth:
    return DeviceHealth(
        device="cpu",
        worker_id="host/0",
        state=state,
        reason=reason,
        pid=1,
        leased=False,
        busy_seconds=0.0,
        tasks=0,
        restarts=0,
        models=models,
    )


LOADED = HealthOfModel(name="wan", state=ModelState.READY)
ABSENT = HealthOfModel(name="wan")
BROKEN = HealthOfModel(name="ltx", state=ModelState.FAILED, reason="no model_index.json")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([device(DeviceState.READY, ABSENT), device(DeviceState.BUSY, LOADED)], {"wan": ("READY", None)}),
        ([device(DeviceState.READY, BROKEN)], {"ltx": ("FAILED", "no model_index.json")}),
        ([device(DeviceState.SETUP_FAILED, ABSENT, reason="no CUDA")], {"wan": ("FAILED", "no CUDA")}),
    ],
)
async def test_the_best_state_over_the_devices_is_shown_with_its_reason(
    devices: list[DeviceHealth], expected: dict[str, tuple[str, str | None]]
) -> None:
    settings = Settings(worker_name="gpu-7")
    listening = open_health_port(0, settings)
    asked = ModelHealth()
    async with serve_health(lambda: {"ready": True, "devices": [asdict(d) for d in devices]}, listening):
        identity = f"gpu-7/cpu:0 pid 1 health {health_address(listening, settings)}"
        shown = await asked.of(["gpu-8/cpu:0 pid 2", identity])
    assert {name: (serving.state, serving.reason) for name, serving in shown.items()} == expected
    assert await asked.of([identity]) == {}
    await asked.aclose()


async def test_a_model_without_a_worker_and_one_whose_worker_does_not_say_are_told_apart(stand: Stand) -> None:
    fleet = Fleet(stand.client, heartbeat=timedelta(seconds=1))
    assert (await fleet.model("wan", pool="nobody-is-there")).state == "NO_WORKER"
    await fleet.aclose()
