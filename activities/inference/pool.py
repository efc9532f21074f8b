"""The devices of one GPU worker, their leases and their health."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from activities.inference.device import InferenceDevice, ProcessOptions
from activities.inference.health import DeviceHealth
from activities.inference.leases import Leases
from activities.inference.specs import ModelSpec

SLOTS_PER_DEVICE: Final = 1.5
"""A task that encodes and uploads needs no device: half as many again may be under way."""


@dataclass(frozen=True, kw_only=True)
class PoolHealth:
    """A snapshot of the pool."""

    devices: tuple[DeviceHealth, ...]
    slots: int
    permits: int
    """Slots reserved or in use."""


class InferencePool:
    """One inference process per device. Belongs to the event loop that starts it."""

    def __init__(
        self,
        *,
        devices: Sequence[str],
        options: ProcessOptions,
        models: Sequence[ModelSpec] = (),
        preload: Collection[str] = (),
        host: str | None = None,
        slots_per_device: float = SLOTS_PER_DEVICE,
        on_step: Callable[[str, float], None] | None = None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            devices: torch device names, `cpu` or `cuda:0`; one process each.
            options: how the processes are set up.
            models: models that may be asked for, listed in the health.
            preload: names of those that each process loads before it takes a task.
            host: first part of the worker ids `<host>/<index>`; default is the host name.
            slots_per_device: tasks in PROCESSING per device, those that encode and store included.
            on_step: hears of every denoising step, as (model, seconds), for metrics.

        Raises:
            ValueError: there is no device, or `preload` names a model that is not in `models`.
        """
        if not devices:
            raise ValueError("a pool needs at least one device")
        if unknown := set(preload) - {spec.name for spec in models}:
            raise ValueError(f"no such model to load ahead: {', '.join(sorted(unknown))}")
        host = host or socket.gethostname()
        self._devices = tuple(
            InferenceDevice(
                device=device,
                worker_id=f"{host}/{index}",
                models=models,
                preload=[spec for spec in models if spec.name in preload],
                options=options,
                on_change=self._changed,
                on_step=on_step,
            )
            for index, device in enumerate(devices)
        )
        self.leases = Leases(self._devices, slots=math.ceil(len(devices) * slots_per_device))

    @property
    def slots(self) -> int:
        """Most tasks in PROCESSING on this worker."""
        return self.leases.slots

    def health(self) -> PoolHealth:
        """A snapshot."""
        return PoolHealth(
            devices=tuple(device.health() for device in self._devices), slots=self.slots, permits=self.leases.permits
        )

    async def start(self) -> None:
        """Start the processes; returns at once. A device takes no task before it is ready."""
        for device in self._devices:
            device.start()

    async def stop(self) -> None:
        """End the processes, whatever they do."""
        await asyncio.gather(*(device.close() for device in self._devices))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _changed(self) -> None:
        self.leases.changed()
