"""What the supervisor does when the inference process does not behave: it hangs, dies, cannot load, will not stop.

A start of that process takes most of the time here. So the tests share one, and those that kill it, or look at what it
does when it starts, come last and take over from each other.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from activities.inference.builtin_weights import WEIGHTS
from activities.inference.catalogue import Catalogue
from activities.inference.device import DeviceNotReadyError, ProcessOptions
from activities.inference.health import DeviceState, ModelState
from activities.inference.pool import InferencePool
from activities.inference.run import InferenceError, InferenceStoppedError
from tests.activities.inference.test_builtin_weights import MODEL, TRANSFORMER, flip_one_bit
from tests.inference_pools import Studio
from workflows.failures import FailureCode
from workflows.tasks import Limits, Phase

LONG = {"num_inference_steps": 1_000}
SECRETS = ("REELGATE_CODEC_KEYS", "REELGATE_LINK_SECRET", "TEMPORAL_API_KEY", "AWS_SECRET_ACCESS_KEY")


@contextmanager
def output_in(file: Path) -> Iterator[None]:
    """What processes that are started meanwhile print, then and later, goes to a file."""
    with file.open("wb") as target:
        saved = {stream: os.dup(stream) for stream in (1, 2)}
        for stream in saved:
            os.dup2(target.fileno(), stream)
    try:
        yield
    finally:
        for stream, copy in saved.items():
            os.dup2(copy, stream)
            os.close(copy)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the released weights, for the process to load and a test to damage."""
    return Path(shutil.copytree(WEIGHTS, tmp_path_factory.mktemp("weights") / "weights"))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first process prints."""
    return tmp_path_factory.mktemp("printed") / "output"


@pytest_asyncio.fixture(scope="module")
async def pool(catalogue: Catalogue, model_cache: Path, weights: Path, printed: Path) -> AsyncIterator[InferencePool]:
    """A pool of this file's own, in a worker that has secrets and wants its libraries to talk."""
    options = ProcessOptions(cache=model_cache, weights=weights, max_loaded_models=2, threads=1)
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, "marked-secret")
        for name in ("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
            patch.setenv(name, "info")
        async with InferencePool(
            devices=["cpu"], options=options, models=list(catalogue), preload=[MODEL], host="own"
        ) as running:
            with output_in(printed):
                async with asyncio.timeout(110):
                    while not running.health().devices[0].pid:
                        await asyncio.sleep(0.02)
            yield running


def written_by(studio: Studio) -> list[Path]:
    return list(studio.folder.iterdir())


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


def printed_by(pid: int, file: Path) -> str:
    assert [Path(f"/proc/{pid}/fd/{stream}").readlink() for stream in (1, 2)] == [file] * 2, "its output goes elsewhere"
    return file.read_text()


async def test_a_prompt_that_is_cut_is_not_printed_and_no_secret_is_inherited(studio: Studio, printed: Path) -> None:
    pid = (await studio.until_ready()).pid
    assert pid is not None
    given = environment_of(pid)
    assert "PATH=" in given
    assert "HF_HUB_OFFLINE=1" in given
    assert "marked-secret" not in given
    assert not any(name in given for name in SECRETS)
    for model in ("tiny-ltx", "tiny-cogvideox"):
        prompt = "a red circle moving right " * 100 + "whispered wish"
        await studio.frames(studio.parameters(model, prompt=prompt, num_inference_steps=1))
    output = printed_by(pid, printed)
    assert "circle" not in output
    assert "whispered" not in output


async def test_a_stop_ends_between_steps_and_the_pipeline_is_as_good_as_before(studio: Studio) -> None:
    before = await studio.frames(studio.parameters("tiny-wan"))
    pid = studio.health().pid
    files = written_by(studio)
    run = await studio.begin(studio.parameters("tiny-wan", **LONG))
    await studio.until_step(run, 3)
    asked = time.monotonic()
    run.stop()
    assert await run.wait(5)
    assert time.monotonic() - asked < 2
    with pytest.raises(InferenceStoppedError):
        run.result()
    assert run.step < 1_000
    assert written_by(studio) == files
    assert studio.health().pid == pid
    assert (await studio.frames(studio.parameters("tiny-wan"))).tobytes() == before.tobytes()


async def test_a_stop_before_the_first_step_is_kept(studio: Studio) -> None:
    run = await studio.begin(studio.parameters("tiny-cogvideox", **LONG))
    run.stop()
    assert await run.wait(10)
    with pytest.raises(InferenceStoppedError):
        run.result()
    assert run.step == 0


async def test_progress_is_told_phase_by_phase_and_step_by_step(studio: Studio) -> None:
    run = await studio.begin(studio.parameters("tiny-wan", num_inference_steps=60))
    seen: list[tuple[Phase, int]] = []
    while not await run.wait(0.002):
        if not seen or seen[-1] != (run.phase, run.step):
            seen.append((run.phase, run.step))
    assert seen == sorted(seen, key=lambda at: (list(Phase).index(at[0]), at[1]))
    assert len({step for phase, step in seen if phase is Phase.STEP}) > 5
    assert run.step == run.total_steps == 60
    assert run.seconds_per_step is not None
    assert 0 < run.seconds_per_step * 60 <= run.gpu_seconds


async def test_a_device_takes_one_generation_at_a_time(studio: Studio) -> None:
    run = await studio.begin(studio.parameters("tiny-wan", **LONG))
    await studio.until_step(run, 1)
    [device] = studio.pool.leases.devices
    with pytest.raises(DeviceNotReadyError):
        device.begin(run.job.spec, run.job.parameters, image=None, frames=Path("never"), limits=Limits())
    assert studio.health().state is DeviceState.BUSY
    run.stop()
    assert await run.wait(5)


async def test_termination_signals_are_left_to_the_worker(studio: Studio) -> None:
    pid = (await studio.until_ready()).pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert (await studio.frames(studio.parameters("tiny-ltx"))).shape == (9, 64, 64, 3)
    assert studio.health().pid == pid


async def test_the_least_recently_used_model_makes_room(studio: Studio) -> None:
    for model in ("tiny-wan", "tiny-ltx", "tiny-wan", "tiny-cogvideox"):
        await studio.frames(studio.parameters(model, num_inference_steps=1))
    states = {model.name: model.state for model in studio.health().models}
    assert states["tiny-wan"] is ModelState.READY
    assert states["tiny-cogvideox"] is ModelState.READY
    assert states["tiny-ltx"] is ModelState.NOT_LOADED


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("missing", "no model_index.json"), ("truncated", "Error"), ("another pipeline", "Error")],
)
async def test_a_model_that_cannot_load_says_why_and_harms_nothing(
    studio: Studio, tmp_path: Path, broken: str, reason: str
) -> None:
    folder = tmp_path / "private-place"
    if broken != "missing":
        folder.mkdir()
        (folder / "model_index.json").write_text(
            '{"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}'
            if broken == "truncated"
            else '{"_class_name": "NoSuchPipeline"}'
        )
    spec = replace(studio.catalogue.get("tiny-wan"), name="broken", path=str(folder))
    with pytest.raises(InferenceError, match=reason) as caught:
        await studio.frames(studio.parameters("tiny-wan"), spec=spec)
    assert caught.value.code is FailureCode.MODEL_NOT_LOADABLE
    assert "private-place" not in str(caught.value)
    health = await studio.until_ready()
    [model] = [model for model in health.models if model.name == "broken"]
    assert model.state is ModelState.FAILED
    assert model.reason is not None
    assert reason in model.reason


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an accelerator")
async def test_a_device_that_is_not_there_is_a_health_state_with_its_reason(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    options = ProcessOptions(cache=tmp_path, threads=1)
    async with InferencePool(devices=["cuda:0"], options=options, models=list(catalogue), host="tests") as pool:
        async with asyncio.timeout(110):
            while pool.health().devices[0].state is DeviceState.STARTING:
                await asyncio.sleep(0.05)
        [health] = pool.health().devices
        assert health.state is DeviceState.SETUP_FAILED
        assert "CUDA" in (health.reason or "")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.leases.reserve()


def test_the_process_dies_with_its_worker() -> None:
    worker = (
        "import asyncio, os\n"
        "from activities.inference.child import Child\n"
        "async def main():\n"
        "    child = await Child.start(threads=1)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_running(pid)
        process.kill()
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, "the inference process outlived its worker"
        time.sleep(0.02)


async def test_a_hung_step_is_killed_within_its_limit_and_the_process_starts_again(studio: Studio) -> None:
    first = (await studio.until_ready()).pid
    restarts = studio.health().restarts
    run = await studio.begin(studio.parameters("tiny-wan", **LONG), limits=Limits(step_timeout_seconds=1.0))
    await studio.until_step(run, 2)
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    hung = time.monotonic()
    assert await run.wait(10)
    assert 0.5 < time.monotonic() - hung < 3
    with pytest.raises(InferenceError, match="step did not end") as caught:
        run.result()
    assert caught.value.code is FailureCode.PHASE_TIMEOUT
    assert not is_running(first)
    assert studio.health().state is DeviceState.RESTARTING
    assert "step did not end" in (studio.health().reason or "")
    health = await studio.until_ready()
    assert health.pid != first
    assert health.restarts == restarts + 1
    # What is loaded ahead is loaded again, and nothing else.
    assert {model.name for model in health.models if model.state is ModelState.READY} == {"moving-shapes"}
    assert (await studio.frames(studio.parameters("tiny-wan"))).shape == (9, 64, 64, 3)


async def test_a_stop_that_is_not_heeded_kills_after_the_grace(studio: Studio) -> None:
    pid = (await studio.until_ready()).pid
    assert pid is not None
    run = await studio.begin(studio.parameters("tiny-wan", **LONG), limits=Limits(kill_grace_seconds=5.0))
    await studio.until_step(run, 2)
    run.limits = replace(run.limits, kill_grace_seconds=0.5)
    os.kill(pid, signal.SIGSTOP)
    asked = time.monotonic()
    run.stop()
    assert await run.wait(5)
    assert 0.4 < time.monotonic() - asked < 2.5
    with pytest.raises(InferenceStoppedError):
        run.result()
    assert not is_running(pid)


async def test_changed_weights_are_refused_until_they_are_restored(studio: Studio, weights: Path) -> None:
    shutil.copyfile(WEIGHTS / TRANSFORMER, weights / TRANSFORMER)
    flip_one_bit(weights / TRANSFORMER)
    if studio.health().state is not DeviceState.RESTARTING:  # As the test above leaves it, with nothing loaded yet.
        await kill(studio)
    await studio.until_ready()
    [health] = [model for model in studio.health().models if model.name == MODEL]
    assert health.state is ModelState.FAILED
    assert f"{TRANSFORMER} has another checksum" in str(health.reason)
    short = studio.parameters(MODEL, num_inference_steps=1)
    with pytest.raises(InferenceError, match="another checksum") as caught:
        await studio.frames(short)
    assert caught.value.code is FailureCode.MODEL_NOT_LOADABLE
    assert str(weights.parent) not in str(caught.value)

    shutil.copyfile(WEIGHTS / TRANSFORMER, weights / TRANSFORMER)
    assert (await studio.frames(short)).shape == (16, 128, 128, 3)


async def kill(studio: Studio) -> None:
    pid = (await studio.until_ready()).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while studio.health().pid == pid:
            await asyncio.sleep(0.01)


async def test_a_killed_process_is_a_driver_fault_that_names_the_signal(studio: Studio) -> None:
    pid = (await studio.until_ready()).pid
    assert pid is not None
    run = await studio.begin(studio.parameters("tiny-wan", **LONG))
    await studio.until_step(run, 2)
    os.kill(pid, signal.SIGKILL)
    assert await run.wait(5)
    with pytest.raises(InferenceError, match="SIGKILL") as caught:
        run.result()
    assert caught.value.code is FailureCode.DRIVER_FAULT
    assert all(model.state is not ModelState.READY for model in studio.health().models)
