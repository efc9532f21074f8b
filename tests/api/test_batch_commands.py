"""`reelgate batch`: files of requests, and batches from a terminal."""

from __future__ import annotations

import asyncio
import json
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
    environment = {"REELGATE_URL": stand.url, "REELGATE_API_KEY": stand.keys["user"], "COLUMNS": "200"}
    return await asyncio.to_thread(
        CliRunner().invoke, app, ["batch", *arguments], env=environment, input=text, catch_exceptions=False
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
