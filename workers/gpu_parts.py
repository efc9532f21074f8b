"""What a GPU worker is made of. Imported by GPU workers only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Final

from temporalio.client import Client

from activities.artifacts import ArtifactRepository
from activities.generation import ClipGeneration
from activities.inference.catalogue import Catalogue
from activities.inference.device import ProcessOptions
from activities.inference.health import DeviceState
from activities.inference.pool import InferencePool
from activities.inference.slots import LeaseSlotSupplier
from activities.storage import ObjectStore
from workers.connection import host_name
from workers.devices import inference_threads, resolve_devices
from workers.errors import ConfigurationError
from workers.gpu_metrics import PoolCollector, StepTimes
from workers.metrics import process_registry
from workers.parts import Parts, activity_slots
from workers.scratch import scratch_folder
from workers.settings import Settings
from workflows.naming import gpu_queue

_WORKING: Final = frozenset({DeviceState.LOADING, DeviceState.READY, DeviceState.BUSY})


@asynccontextmanager
async def gpu_parts(
    settings: Settings, client: Client, *, store: ObjectStore, catalogue: Catalogue
) -> AsyncIterator[Parts]:
    """One inference process per device, and the activity that drives them.

    Raises:
        ConfigurationError: a model to load ahead is not one of the pool.
    """
    devices = resolve_devices(settings.devices)
    registry = process_registry("gpu", settings)
    try:
        pool = InferencePool(
            devices=devices,
            models=[spec for spec in catalogue if spec.pool == settings.pool],
            preload=settings.preload_models,
            options=ProcessOptions(
                cache=settings.data_dir / "models",
                max_loaded_models=settings.max_loaded_models,
                threads=inference_threads(devices, settings.inference_threads),
            ),
            host=host_name(settings),
            slots_per_device=settings.processing_factor,
            on_step=StepTimes(registry).observe,
        )
    except ValueError as error:
        raise ConfigurationError(f"REELGATE_DEVICES, REELGATE_PRELOAD_MODELS: {error}") from error
    registry.register(PoolCollector(pool.health))
    with scratch_folder(settings.scratch_dir) as scratch:
        async with pool:
            generation = ClipGeneration(
                client=client,
                pool=pool,
                artifacts=ArtifactRepository(store, retention=settings.retention),
                store=store,
                catalogue=catalogue,
                scratch=scratch,
                worker_version=settings.build_id,
            )
            yield Parts(
                task_queue=gpu_queue(settings.pool),
                activities=(generation.generate_clip,),
                tuner=activity_slots(LeaseSlotSupplier(pool.leases)),
                state=lambda: _state(pool, settings),
                metrics=registry,
            )


def _state(pool: InferencePool, settings: Settings) -> Mapping[str, object]:
    health = pool.health()
    ready = any(device.state in _WORKING for device in health.devices)
    return {"ready": ready, "pool": settings.pool, "version": settings.build_id, **asdict(health)}
