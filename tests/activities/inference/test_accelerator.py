"""The same on a CUDA device, and what only a device can do wrong. Skipped without one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from activities.inference.catalogue import Catalogue
from activities.inference.device import ProcessOptions
from activities.inference.pool import InferencePool
from activities.inference.run import InferenceError
from tests.inference_pools import Studio
from workflows.failures import FailureCode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="this machine has no CUDA device"),
]


@pytest_asyncio.fixture(scope="module")
async def cuda_pool(catalogue: Catalogue, model_cache: Path) -> AsyncIterator[InferencePool]:
    options = ProcessOptions(cache=model_cache)
    async with InferencePool(devices=["cuda:0"], options=options, models=list(catalogue), host="tests") as running:
        yield running


@pytest.fixture
def cuda(cuda_pool: InferencePool, catalogue: Catalogue, tmp_path: Path) -> Studio:
    return Studio(cuda_pool, catalogue, tmp_path)


@pytest.mark.timeout(180)
async def test_a_red_circle_moves_right_on_the_device_too(cuda: Studio) -> None:
    one = await cuda.frames(cuda.parameters("moving-shapes"))
    again = await cuda.frames(cuda.parameters("moving-shapes"))
    assert one.tobytes() == again.tobytes()
    frames = one.astype(float)
    shape = np.abs(frames - np.array([12, 12, 16])).max(-1) > 60
    centre = [(mask.sum(0) * np.arange(128)).sum() / mask.sum() for mask in shape]
    assert np.mean(centre[-5:]) - np.mean(centre[:5]) > 8
    assert frames[shape].mean(0)[0] > 130


@pytest.mark.parametrize("model", ["tiny-wan", "tiny-ltx", "tiny-cogvideox"])
async def test_half_precision_works_for_every_family(cuda: Studio, model: str) -> None:
    spec = replace(cuda.catalogue.get(model), name=f"{model}-half", dtype="auto")
    frames = await cuda.frames(cuda.parameters(model, num_inference_steps=2), spec=spec)
    assert frames.shape == (9, 64, 64, 3)


async def test_a_poisoned_context_is_a_driver_fault_and_the_process_is_started_again(
    cuda: Studio, model_cache: Path, tmp_path: Path
) -> None:
    await cuda.frames(cuda.parameters("tiny-ltx", num_inference_steps=1))
    broken = tmp_path / "broken"
    _copy_with_a_word_beyond_the_vocabulary(model_cache, broken)
    pid = cuda.health().pid
    spec = replace(cuda.catalogue.get("tiny-ltx"), name="broken", path=str(broken))
    with pytest.raises(InferenceError) as caught:
        await cuda.frames(cuda.parameters("tiny-ltx"), spec=spec)
    assert caught.value.code is FailureCode.DRIVER_FAULT
    assert (await cuda.until_ready()).pid != pid
    assert (await cuda.frames(cuda.parameters("tiny-ltx"))).shape == (9, 64, 64, 3)


def _copy_with_a_word_beyond_the_vocabulary(cache: Path, target: Path) -> None:
    """The text encoder's embedding has no row for it: a device-side assert."""
    [source] = cache.glob("tiny-ltx-[0-9]*")
    for path in source.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    tokenizer = target / "tokenizer" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["model"]["vocab"]["red"] = 100_000
    tokenizer.write_text(json.dumps(content))
