"""What a client is told about a prompt that the model cannot follow: a warning, never a refusal."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any
from uuid import uuid4

import httpx
import pytest
from PIL import Image

from tests.api.stand import Stand
from tests.cli.stack import clean_environment, reelgate


def picture() -> str:
    body = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(body, "PNG")
    return f"data:image/png;base64,{base64.b64encode(body.getvalue()).decode()}"


async def submitted(http: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    reply = await http.post("/tasks", json=fields)
    assert reply.status_code == 202, reply.text
    task: dict[str, Any] = reply.json()
    return task


async def test_a_prompt_without_a_known_word_is_accepted_with_a_warning_that_stays(waiting: httpx.AsyncClient) -> None:
    task = await submitted(waiting, prompt="a cat on a sofa")
    [warning] = task["warnings"]
    assert warning["code"] == "PROMPT_OUTSIDE_VOCABULARY"
    assert "moving-shapes" in warning["message"]
    assert "a red circle moving right" in warning["message"]
    assert "sofa" not in warning["message"]
    read = (await waiting.get(f"/tasks/{task['task_id']}")).json()
    assert read["warnings"] == task["warnings"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a cat chasing a RED ball"},
        # Its weights are random, but it takes free text.
        {"prompt": "a cat on a sofa", "model": "tiny-wan-i2v", "image": picture()},
    ],
)
async def test_a_known_word_or_a_model_for_free_text_brings_no_warning(
    waiting: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    assert (await submitted(waiting, **fields))["warnings"] == []


async def test_models_say_which_words_they_know_and_show_what_they_can_do(waiting: httpx.AsyncClient) -> None:
    models = {item["name"]: item for item in (await waiting.get("/models")).json()["items"]}
    shapes = models["moving-shapes"]
    assert list(shapes["vocabulary"]) == ["sizes", "colours", "shapes", "motions", "backgrounds"]
    assert "turquoise" in shapes["vocabulary"]["colours"]
    for example in shapes["examples"]:
        for topic in ("colours", "shapes", "motions"):
            assert any(phrase in example for phrase in shapes["vocabulary"][topic]), (topic, example)
    assert (models["tiny-wan-i2v"]["vocabulary"], models["tiny-wan-i2v"]["examples"]) == (None, [])


async def test_the_command_line_prints_a_warning_and_goes_on(quiet: Stand) -> None:
    environment = clean_environment(REELGATE_URL=quiet.url, REELGATE_API_KEY=quiet.keys["user"])
    done = await asyncio.to_thread(reelgate, "submit", f"no word {uuid4().hex}", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "note: Model moving-shapes knows none of these words" in " ".join(done.stderr.split())
