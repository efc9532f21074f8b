"""The bars that `--wait` draws on a terminal, for a task and for a batch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from uuid import uuid4

from tests.api.stand import PlayedGeneration, Stand, http_client
from tests.api.test_batch_commands import document
from tests.cli.stack import clean_environment
from tests.cli.terminal import terminal


def environment_of(stand: Stand, key: str = "user") -> dict[str, str]:
    """The environment of a user's commands."""
    return clean_environment(REELGATE_URL=stand.url, REELGATE_API_KEY=stand.keys[key])


async def test_the_bar_of_a_task_shows_the_step_that_it_is_at(
    stand: Stand, played: PlayedGeneration, tmp_path: Path
) -> None:
    command = ("submit", f"hold {uuid4().hex}", "--wait", "--output", str(tmp_path / "clip.mp4"))
    with terminal(*command, environment=environment_of(stand)) as screen:
        await screen.until("PROCESSING step 3/10")
        await screen.until("30 %")
        found = re.search(r"\bt[a-z2-7]{26}\b", screen.seen)
        assert found is not None
        played.release({"task_id": found[0]})
        assert await screen.ended() == 0
    assert "SUCCEEDED" in screen.seen


async def test_the_bar_of_a_waiting_task_shows_its_place(quiet: Stand) -> None:
    with terminal("submit", f"wait {uuid4().hex}", "--wait", environment=environment_of(quiet)) as screen:
        # Which one depends on the tasks of other tests that wait in the same pool.
        await screen.until("QUEUED position ")
        found = re.search(r"\bt[a-z2-7]{26}\b", screen.seen)
        assert found is not None
        await quiet.client.get_workflow_handle(found[0]).terminate()
        assert await screen.ended() == 1
    assert "TERMINATED" in screen.seen


async def test_the_bar_of_a_batch_counts_what_has_ended(stand: Stand, played: PlayedGeneration) -> None:
    text = "\n".join(json.dumps({"prompt": prompt}) for prompt in (f"clip {uuid4().hex}", "fail", "hold"))
    batch = await document(stand, "submit", "-", text=text)
    with terminal("batch", "status", batch["batch_id"], "--wait", environment=environment_of(stand)) as screen:
        await screen.until("2 of 3 ended, 1 without a clip")
        async with http_client(f"{stand.url}/api/v1", {"Authorization": f"Bearer {stand.keys['user']}"}) as http:
            read = (await http.get(f"/batches/{batch['batch_id']}")).json()
        played.release(read["items"][2])
        assert await screen.ended() == 1
    assert "SUCCEEDED 2, FAILED 1" in screen.seen
