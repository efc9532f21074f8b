"""The symptoms of the runbook: each is caused, seen by what the runbook names, and mended by what it names."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.drill.stack import Stack, until
from tests.receiver import respond
from workers.codec import create_key_file
from workers.keys import Scope
from workers.keys_admin import create_key

ROOM_BYTES = 16 * 1024 * 1024
"""What is left to the inference process that is to run out of memory: enough for all but the frames."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One row of the table."""

    symptom: str
    revealed_by: str
    mended_by: str
    run: Callable[[Stack], Awaitable[None]]
    """Raises AssertionError when it is not seen or not mended as the row says."""
    quick: bool = False
    """Part of the short form."""


async def no_gpu_worker(stack: Stack) -> None:
    task = await stack.submit("a task that nobody takes")

    async def seen() -> bool:
        [queue] = (await stack.reelgate("queues", "--json")).json()["items"]
        return bool(queue["live_slots"] == 0 and queue["backlog"] == 1)

    await until(seen, "`reelgate queues` shows a backlog and no slot")
    assert (await stack.task(task))["status"] == "QUEUED"

    async def counted() -> bool:
        return await stack.metric("api", 'reelgate_queue_workers{queue="gpu-default"}') == 0

    await until(counted, "the metric says that nobody works there")
    stack.start_worker("gpu-a")
    await stack.reached(task, "SUCCEEDED")


async def store_down(stack: Stack) -> None:
    store, away = stack.folder / "store", stack.folder / "store.away"
    store.rename(away)
    store.write_text("not a folder")
    try:
        task = await stack.submit("a clip that cannot be stored")
        assert (await stack.reached(task, "FAILED"))["error_code"] == "STORAGE_UNAVAILABLE"
        assert "store" in (await stack.doctor()).text

        async def metric() -> bool:
            return await stack.metric("api", 'reelgate_dependency_up{dependency="store"}') == 0

        await until(metric, "the API says that the store is down")
    finally:
        store.unlink()
        away.rename(store)
    again = await _redriven(stack, task, "--query", "ErrorCode = 'STORAGE_UNAVAILABLE'")
    assert (await stack.reached(again, "SUCCEEDED"))["retry_of"] == task


async def receiver_down(stack: Stack) -> None:
    stack.receiver.default = respond(410, "gone for now")
    task = await stack.submit("a callback that nobody takes", callback_url=stack.receiver.url)

    async def given_up() -> bool:
        return (await stack.task(task)).get("callback_status") == "FAILED"

    await until(given_up, "the callback is given up")
    assert "410" in (await stack.reelgate("callbacks", "show", task)).text
    gave_up = 'reelgate_callback_attempts_total{error="GONE",outcome="give_up"}'
    assert await stack.metric("callback", gave_up) >= 1
    stack.receiver.default = respond(200)
    taken = len(stack.receiver.requests)

    async def sent() -> bool:
        # The index of the failed ones lags by moments.
        await stack.reelgate("callbacks", "redeliver", "--since", "10m", "--failed-only", "--yes")
        return len(stack.receiver.requests) > taken

    await until(sent, "the callback is sent again")


async def canceled_but_running(stack: Stack) -> None:
    task = await stack.submit("a clip that goes on", steps=1_000)
    await stack.reached(task, "PROCESSING")
    await stack.reelgate("cancel", task)
    shown = (await stack.reelgate("status", task, "--json")).json()
    assert (shown["status"], shown["is_terminal"]) == ("CANCELED", False)
    await stack.reelgate("cancel", task, "--mode", "hard")
    await stack.reached(task, "CANCELED")


async def backlog(stack: Stack) -> None:
    tasks = [await stack.submit(f"one of many {n}", steps=60) for n in range(5)]

    async def grows() -> bool:
        return await stack.metric("api", 'reelgate_queue_backlog{queue="gpu-default"}') >= 2

    await until(grows, "the metric shows the backlog")
    assert (await stack.reelgate("queues", "--json")).json()["items"][0]["backlog_age_seconds"] > 0
    stack.start_worker("gpu-b")

    async def shared() -> bool:
        waiting = [task for task in tasks if (await stack.task(task))["status"] == "QUEUED"]
        if len(waiting) < 2:
            # The first worker is faster than the second one starts.
            tasks.append(await stack.submit(f"one of many {len(tasks)}", steps=60))
        return "gpu-b/0" in {(await stack.task(task))["worker_id"] for task in tasks}

    await until(shared, "the second worker takes its share")
    for task in tasks:
        await stack.reached(task, "SUCCEEDED")
    stack.kill("gpu-b")


async def hung_gpu(stack: Stack) -> None:
    task = await stack.submit("a step that never ends", steps=150)
    await stack.reached(task, "PROCESSING")
    child = stack.inference_process("gpu-a")
    os.kill(child, signal.SIGSTOP)

    async def seen() -> bool:
        return "PHASE_TIMEOUT" in (await stack.reelgate("timeline", task)).text

    await until(seen, "`reelgate timeline` names the attempt that hung")
    # Nothing is to be done: the child was killed and the attempt runs again.
    assert (await stack.reached(task, "SUCCEEDED"))["retry_count"] == 1
    assert await stack.metric("gpu-a", 'reelgate_device_restarts_total{device="cpu:0"}') >= 1
    assert child != stack.inference_process("gpu-a")


async def out_of_memory(stack: Stack) -> None:
    # Warm, so that nothing but the frames has to find room.
    await stack.reached(await stack.submit("warm up"), "SUCCEEDED")
    child = stack.inference_process("gpu-a")
    resource.prlimit(child, resource.RLIMIT_AS, (_address_space(child) + ROOM_BYTES, resource.RLIM_INFINITY))
    task = await stack.submit("more than there is room for", steps=1, width=256, height=256, num_frames=17)
    assert (await stack.reached(task, "FAILED"))["error_code"] == "OUT_OF_MEMORY"
    ended = 'reelgate_tasks_ended_total{error_code="OUT_OF_MEMORY",status="FAILED"}'
    assert await stack.metric("control", ended) >= 1
    # The larger GPU.
    resource.prlimit(child, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = await _redriven(stack, task, "--query", "ErrorCode = 'OUT_OF_MEMORY'", "--also", "OUT_OF_MEMORY")
    await stack.reached(again, "SUCCEEDED")


async def control_down(stack: Stack) -> None:
    stack.kill("control")

    async def refused() -> bool:
        reply = await stack.call("POST", "/tasks", {"prompt": "nobody admits", "model": "tiny-wan"})
        return reply.status_code == 503 and reply.json()["code"] == "ADMISSION_UNAVAILABLE"

    await until(refused, "submissions are refused")

    async def seen() -> bool:
        return "none on control" in (await stack.doctor()).text

    await until(seen, "`reelgate doctor` names the queue")
    stack.start_worker("control")
    task: list[str] = []

    async def admitted() -> bool:
        reply = await stack.call("POST", "/tasks", {"prompt": "admitted", "model": "tiny-wan", "num_frames": 9})
        if reply.is_success:
            task.append(reply.json()["task_id"])
        return bool(task)

    await until(admitted, "submissions are taken")
    await stack.reelgate("cancel", task[0], "--mode", "hard")


async def server_down(stack: Stack) -> None:
    task = await stack.submit("a task that outlives the server", steps=100)
    await stack.reached(task, "PROCESSING")
    stack.kill("temporal")
    reply = await stack.call("POST", "/tasks", {"prompt": "to nobody"})
    assert (reply.status_code, reply.json()["code"]) == (503, "TEMPORAL_UNAVAILABLE")
    assert "temporal" in (await stack.doctor()).text
    await stack.start_server()
    await stack.reached(task, "SUCCEEDED")


async def leaked_key(stack: Stack) -> None:
    key = create_key(stack.settings.keys_file, tenant="leak", scope=Scope.OPERATOR)
    operator, stack.operator_key = stack.operator_key, key.token
    try:

        async def open_() -> bool:
            return (await stack.call("GET", "/models")).is_success

        await until(open_, "the API has taken the new key up")
        file = ("--file", str(stack.settings.keys_file))
        assert key.token.split("_")[1] in (await stack.reelgate("keys", "list", *file)).text
        assert (await stack.reelgate("keys", "revoke", key.token.split("_")[1], *file)).code == 0

        async def shut() -> bool:
            return (await stack.call("GET", "/models")).status_code == 401

        await until(shut, "the key opens nothing any more")
    finally:
        stack.operator_key = operator


async def payload_key_dropped(stack: Stack) -> None:
    await stack.reached(await stack.submit("written with the old key"), "SUCCEEDED")
    new, both = stack.folder / "new.keys", stack.folder / "both.keys"
    create_key_file(new)

    async def seen() -> bool:
        found = await stack.doctor(REELGATE_CODEC_KEY_FILE=str(new))
        return "payloads" in found.text and "put the missing key back" in found.text

    await until(seen, "`reelgate doctor` names the key that is missing")
    both.write_text(new.read_text() + stack.settings.codec_key_file.read_text())
    both.chmod(0o600)
    assert (await stack.doctor(REELGATE_CODEC_KEY_FILE=str(both))).text == ""


def _address_space(pid: int) -> int:
    """Bytes that a process has mapped."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


async def _redriven(stack: Stack, task: str, *arguments: str) -> str:
    """The task that `reelgate redrive` starts after this one, a dry run first; its index lags by moments."""

    async def planned() -> bool:
        done = await stack.reelgate("redrive", *arguments, "--json")
        return any(item["task_id"] == task and item["action"] == "start" for item in done.json()["items"])

    await until(planned, f"the dry run names {task}")
    done = await stack.reelgate("redrive", *arguments, "--yes", "--json")
    assert done.code == 0, done.text
    return next(str(item["new_task_id"]) for item in done.json()["items"] if item["task_id"] == task)


INCIDENTS = (
    Incident(
        symptom="stuck in QUEUED",
        revealed_by="reelgate queues; reelgate_queue_workers",
        mended_by="reelgate worker gpu",
        run=no_gpu_worker,
        quick=True,
    ),
    Incident(
        symptom="object store down",
        revealed_by="reelgate doctor; reelgate_dependency_up",
        mended_by="store back, reelgate redrive",
        run=store_down,
        quick=True,
    ),
    Incident(
        symptom="callbacks failing",
        revealed_by="reelgate callbacks show; reelgate_callback_attempts_total",
        mended_by="reelgate callbacks redeliver --since",
        run=receiver_down,
        quick=True,
    ),
    Incident(
        symptom="CANCELED and still running",
        revealed_by="reelgate status",
        mended_by="reelgate cancel --mode hard",
        run=canceled_but_running,
        quick=True,
    ),
    Incident(
        symptom="backlog grows",
        revealed_by="reelgate_queue_backlog; reelgate queues",
        mended_by="one more reelgate worker gpu",
        run=backlog,
    ),
    Incident(
        symptom="stuck in PROCESSING (hung GPU)",
        revealed_by="reelgate timeline; reelgate_device_restarts_total",
        mended_by="by itself: child killed, attempt again",
        run=hung_gpu,
    ),
    Incident(
        symptom="out of memory",
        revealed_by="reelgate_tasks_ended_total",
        mended_by="more memory, reelgate redrive --also OUT_OF_MEMORY",
        run=out_of_memory,
    ),
    Incident(
        symptom="503 ADMISSION_UNAVAILABLE",
        revealed_by="reelgate doctor",
        mended_by="reelgate worker control",
        run=control_down,
    ),
    Incident(
        symptom="Temporal server down",
        revealed_by="503 TEMPORAL_UNAVAILABLE; reelgate doctor",
        mended_by="start it on its state",
        run=server_down,
    ),
    Incident(
        symptom="API key leaked", revealed_by="reelgate keys list", mended_by="reelgate keys revoke", run=leaked_key
    ),
    Incident(
        symptom="payload key dropped too early",
        revealed_by="reelgate doctor",
        mended_by="key back behind the new one",
        run=payload_key_dropped,
    ),
)


async def drill(stack: Stack, *, quick: bool, report: Callable[[Incident, float, str], None]) -> int:
    """Run the incidents one after the other; how many were not seen or not mended as their row says.

    Args:
        stack: of its own; without a GPU worker, which the first incident starts.
        quick: the short form.
        report: told of each incident, its seconds and what went wrong (empty: nothing).
    """
    failed = 0
    loop = asyncio.get_running_loop()
    for incident in INCIDENTS:
        if quick and not incident.quick:
            continue
        began, wrong = loop.time(), ""
        try:
            await incident.run(stack)
        except AssertionError as error:
            failed, wrong = failed + 1, str(error) or "an assertion"
        report(incident, loop.time() - began, wrong)
    return failed
