"""What the inference processes of a pool say of their models, asked at their workers' health ports.

Temporal knows which workers live, not which models they have loaded; a worker's identity tells where its health
port is. A port that is off, unreachable or slow makes a model's state unknown and never fails a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import httpx
from pydantic import BaseModel, ValidationError

from activities.inference.health import DeviceState, ModelState
from api.schemas import ModelServing

_MARK: Final = " health "
_TIMEOUT_SECONDS: Final = 0.5
_MAX_WORKERS: Final = 32
"""Workers of a pool that are asked: enough to know a model's state, few enough for a page."""

# The best of what the devices say decides: one that has loaded a model serves it.
_BEST_FIRST: Final = (ModelState.READY, ModelState.LOADING, ModelState.NOT_LOADED, ModelState.FAILED)


class _Model(BaseModel):
    name: str
    state: ModelState
    reason: str | None = None


class _Device(BaseModel):
    state: DeviceState
    reason: str | None = None
    models: list[_Model]


class _Worker(BaseModel):
    devices: list[_Device]


class ModelHealth:
    """Asks health ports."""

    def __init__(self) -> None:
        # Inside the deployment, so no proxy of the environment is asked.
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, trust_env=False)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def of(self, identities: Iterable[str]) -> dict[str, ModelServing]:
        """The best state of each model over the workers of these identities; missing: nobody says."""
        ports = [identity.partition(_MARK)[2] for identity in identities if _MARK in identity]
        workers = await asyncio.gather(*map(self._ask, ports[:_MAX_WORKERS]))
        return merged([device for worker in workers if worker is not None for device in worker.devices])

    async def _ask(self, port: str) -> _Worker | None:
        try:
            reply = await self._http.get(f"http://{port}/healthz")
            return _Worker.model_validate_json(reply.content)
        except (httpx.HTTPError, httpx.InvalidURL, ValidationError):
            return None


def merged(devices: Sequence[_Device]) -> dict[str, ModelServing]:
    """The best state of each model over all devices."""
    best: dict[str, tuple[int, ModelServing]] = {}
    for device in devices:
        for model in device.models:
            state, reason = model.state, model.reason
            if device.state is DeviceState.SETUP_FAILED:
                state, reason = ModelState.FAILED, device.reason
            rank = _BEST_FIRST.index(state)
            if model.name not in best or rank < best[model.name][0]:
                best[model.name] = (rank, ModelServing(state=state.value, reason=reason))
    return {name: serving for name, (_, serving) in best.items()}
