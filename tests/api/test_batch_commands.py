"""`reelgate batch`: files of requests, and batches from a terminal."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from api.batch_files import ItemsFileError, ItemsFormat, format_of, read_items
from api.cli import app
from api.cli_output import CommandError
from tests.api.stand import PlayedGeneration, Stand


async def batch_command(stand: Stand, *arguments: str, text: str | None = None) -> Result:
    """Run one `reelgate batch` command."""
    return await command(stand, "batch", *arguments, text=text)


async def command(stand: Stand, *arguments: str, text: str | None = None) -> Result:
    """Run one command as a user."""
    environment = {"REELGATE_URL": stand.url, "REELGATE_API_KEY": stand.keys["user"], "COLUMNS": "200"}
    return await asyncio.to_thread(
        CliRunner().invoke, app, list(arguments), env=environment, input=text, catch_exceptions=False
    )


async def document(stand: Stand, *arguments: str, text: str | None = None) -> dict[str, Any]:
    """The document that a command prints."""
    done = await batch_command(stand, *arguments, "--json", text=text)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_lines_are_items() -> None:
    text = '{"prompt": "a\u2028b"}\r\n\n{"prompt": "c", "seed": 1}'
    assert read_items(text, ItemsFormat.JSONL) == [{"prompt": "a\u2028b"}, {"prompt": "c", "seed": 1}]


def test_csv_cells_become_fields_of_their_types() -> None:
    text = 'prompt,seed,fps,labels,model\n"a, ""b""\nc",7,8.5,x; y,\nplain,seven,,,m\n'
    assert read_items(text, ItemsFormat.CSV) == [
        {"prompt": 'a, "b"\nc', "seed": 7, "fps": 8.5, "labels": ["x", "y"]},
        {"prompt": "plain", "seed": "seven", "model": "m"},
    ]


@pytest.mark.parametrize(
    ("written_as", "text", "named"),
    [
        (ItemsFormat.JSONL, '{"prompt": "a"}\nnot json', "line 2"),
        (ItemsFormat.JSONL, "[1]", "line 1"),
        (ItemsFormat.JSONL, "\n\n", "no items"),
        (ItemsFormat.CSV, "text\nhello\n", "`prompt`"),
        (ItemsFormat.CSV, "prompt,seed\na,1,2\n", "line 2"),
        (ItemsFormat.CSV, 'prompt\n"open', "line"),
        (ItemsFormat.CSV, "prompt\n", "no items"),
    ],
)
def test_what_is_no_item_is_named_by_its_line(written_as: ItemsFormat, text: str, named: str) -> None:
    with pytest.raises(ItemsFileError, match=named):
        read_items(text, written_as)


def test_the_name_of_a_file_says_its_format() -> None:
    assert (format_of(Path("a.CSV")), format_of(Path("a.jsonl")), format_of(Path("-"))) == ("csv", "jsonl", "jsonl")


async def test_a_file_is_submitted_and_followed_to_its_end(
    stand: Stand, played: PlayedGeneration, tmp_path: Path
) -> None:
    file = tmp_path / "items.csv"
    file.write_text("prompt,labels\nclip of a file,one;two\nclip of another line,\n")
    batch = await document(stand, "submit", str(file), "--wait")
    assert (batch["status"], batch["counts"]["SUCCEEDED"]) == ("COMPLETED", 2)
    shown = (await batch_command(stand, "status", batch["batch_id"])).stdout
    assert batch["batch_id"] in shown
    assert "SUCCEEDED 2" in shown
    assert (await document(stand, "submit", str(file)))["batch_id"] == batch["batch_id"]


async def test_a_missing_clip_and_a_skipped_item_show_in_the_exit_code(stand: Stand, played: PlayedGeneration) -> None:
    text = '{"prompt": "fail from standard input"}\n{"prompt": ""}\n'
    done = await batch_command(stand, "submit", "-", "--skip-invalid", "--wait", text=text)
    assert done.exit_code == 1
    assert "FAILED 1, rejected 1" in done.stdout
    assert "item 1: prompt" in done.stderr


async def test_the_rest_of_a_batch_is_canceled(stand: Stand, played: PlayedGeneration) -> None:
    batch = await document(stand, "submit", "-", text='{"prompt": "hold a command"}\n')
    canceled = await document(stand, "cancel", batch["batch_id"], "--mode", "hard")
    assert canceled["batch_id"] == batch["batch_id"]
    ended = await batch_command(stand, "status", batch["batch_id"], "--wait", "--json")
    assert ended.exit_code == 1
    assert json.loads(ended.stdout)["status"] == "CANCELED"


async def test_files_and_images_that_cannot_be_read_are_named(stand: Stand, tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"prompt": "x", "image": "none.png"}\n')
    for arguments, named in (((str(file),), "none.png"), ((str(tmp_path / "nothing.csv"),), "nothing.csv")):
        with pytest.raises(CommandError, match=named):
            await batch_command(stand, "submit", *arguments)


async def test_batches_are_listed_told_of_again_and_deleted(stand: Stand, played: PlayedGeneration) -> None:
    text = '{"prompt": "clip for the list"}\n'
    batch = await document(
        stand, "submit", "-", "--callback-url", "http://127.0.0.1:9/down", "--deadline-seconds", "600", text=text
    )
    batch_id: str = batch["batch_id"]
    await batch_command(stand, "status", batch_id, "--wait")
    async with asyncio.timeout(20):
        while not re.search(rf"{batch_id} +COMPLETED +1 +1 +1 ", shown := (await batch_command(stand, "list")).stdout):
            await asyncio.sleep(0.1)
    page = await document(stand, "list", "--limit", "1")
    assert len(page["items"]) == 1, shown
    told = await command(stand, "callbacks", "redeliver", batch_id)
    assert told.exit_code == 0, told.output
    assert '"type":"batch.completed"' in (await command(stand, "callbacks", "show", batch_id)).stdout
    kept = await batch_command(stand, "delete", batch_id, text="n\n")
    assert (kept.exit_code, (await batch_command(stand, "status", batch_id)).exit_code) == (1, 0)
    assert f"deleted {batch_id}" in (await batch_command(stand, "delete", batch_id, "--yes")).stdout
    with pytest.raises(CommandError, match="BATCH_NOT_FOUND"):
        await batch_command(stand, "status", batch_id)
