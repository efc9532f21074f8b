"""Real inference for tests: a session-wide pool with one CPU device and the small models that come with the product."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from activities.inference.catalogue import AskedParameters, Catalogue, ModelKind, ModelSpec, load_catalogue
from activities.inference.device import ProcessOptions
from activities.inference.health import DeviceHealth, DeviceState
from activities.inference.pool import InferencePool
from activities.inference.run import InferenceRun
from workflows.tasks import GenerationParameters, Limits

TINY_MODELS = ("tiny-wan", "tiny-wan-i2v", "tiny-ltx", "tiny-ltx-i2v", "tiny-cogvideox")


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    """Every built-in model."""
    return load_catalogue(extra_builtin=TINY_MODELS)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny pipelines: each is built once in a session."""
    return tmp_path_factory.mktemp("tiny-models")


@pytest_asyncio.fixture(scope="session")
async def pool(catalogue: Catalogue, model_cache: Path) -> AsyncIterator[InferencePool]:
    """One inference process on the CPU. A test that kills it leaves it starting again."""
    options = ProcessOptions(cache=model_cache, max_loaded_models=2, threads=1)
    async with InferencePool(
        devices=["cpu"], options=options, models=list(catalogue), preload=["moving-shapes"], host="tests"
    ) as running:
        yield running


@dataclass(frozen=True)
class Studio:
    """Generates on the pool's device, one lease for each clip."""

    pool: InferencePool
    catalogue: Catalogue
    folder: Path
    returns: list[asyncio.Task[None]] = field(default_factory=list)
    """One for each lease on its way back."""

    def parameters(self, model: str, **changes: object) -> GenerationParameters:
        """Legal parameters of a model, then changed at will."""
        spec = self.catalogue.get(model)
        asked = AskedParameters(prompt="a red circle moving right", has_image=spec.kind is ModelKind.IMAGE_TO_VIDEO)
        return replace(self.catalogue.resolve(spec, asked).with_seed(7), **changes)  # type: ignore[arg-type]

    async def begin(
        self,
        parameters: GenerationParameters,
        *,
        spec: ModelSpec | None = None,
        image: Path | None = None,
        limits: Limits | None = None,
    ) -> InferenceRun:
        """Start a generation on a lease that goes back when it has ended."""
        await self.pool.leases.reserve()
        hold = self.pool.leases.take()
        lease = hold.__enter__()
        run = lease.device.begin(
            spec or self.catalogue.get(parameters.model),
            parameters,
            image=image,
            frames=self.folder / f"{uuid4().hex}.npy",
            limits=limits or Limits(),
        )

        async def give_back() -> None:
            while not await run.wait(60):
                pass
            hold.__exit__(None, None, None)
            self.pool.leases.end_permit()

        self.returns.append(asyncio.create_task(give_back()))
        return run

    async def frames(
        self, parameters: GenerationParameters, *, spec: ModelSpec | None = None, image: Path | None = None
    ) -> npt.NDArray[np.uint8]:
        """Generate to the end.

        Raises:
            InferenceError: it failed.
        """
        run = await self.begin(parameters, spec=spec, image=image)
        while not await run.wait(60):
            pass
        run.result()
        made: npt.NDArray[np.uint8] = np.load(run.job.frames)
        return made

    def health(self) -> DeviceHealth:
        """Of the one device."""
        return self.pool.health().devices[0]

    async def until_step(self, run: InferenceRun, step: int) -> None:
        """Wait until a run has done some steps."""
        async with asyncio.timeout(60):
            while run.step < step:
                assert run.ended is None, "the run ended before"
                await asyncio.sleep(0.005)

    async def until_ready(self) -> DeviceHealth:
        """Wait until the device can take a task."""
        async with asyncio.timeout(110):
            while self.health().state is not DeviceState.READY:
                await asyncio.sleep(0.02)
        return self.health()


@pytest_asyncio.fixture
async def studio(pool: InferencePool, catalogue: Catalogue, tmp_path: Path) -> AsyncIterator[Studio]:
    """A studio on the session's pool; every lease is back when the test ends."""
    made = Studio(pool, catalogue, tmp_path)
    yield made
    await asyncio.gather(*made.returns)
    assert pool.leases.permits == 0
    assert not pool.health().devices[0].leased
