"""Items of a batch in a file: JSON Lines, one request per line, or CSV with the fields as its header."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final


class ItemsFormat(StrEnum):
    """Formats of a file with items."""

    JSONL = "jsonl"
    CSV = "csv"


_CSV_SUFFIXES: Final = frozenset({".csv"})
_LIST_SEPARATOR: Final = ";"


class ItemsFileError(Exception):
    """The file has no items in this format; the message names the line."""


def format_of(file: Path) -> ItemsFormat:
    """The format that the name of a file stands for; JSON Lines unless it ends in `.csv`."""
    return ItemsFormat.CSV if file.suffix.lower() in _CSV_SUFFIXES else ItemsFormat.JSONL


def read_items(text: str, written_as: ItemsFormat) -> list[dict[str, object]]:
    """The items as the gateway takes them. What their values have to be is the gateway's to say.

    In CSV an empty cell is an absent field, and `labels` and `callback_events` are separated by semicolons.

    Raises:
        ItemsFileError: a line is not an item.
    """
    items = _jsonl(text) if written_as is ItemsFormat.JSONL else _csv(text)
    if not items:
        raise ItemsFileError("there are no items in it")
    return items


def _jsonl(text: str) -> list[dict[str, object]]:
    items = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ItemsFileError(f"line {number} is not JSON: {error}") from None
        if not isinstance(item, dict):
            raise ItemsFileError(f"line {number} is not an object")
        items.append(item)
    return items


def _csv(text: str) -> list[dict[str, object]]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = rows.fieldnames or ()
        if "prompt" not in header:
            raise ItemsFileError("line 1 has to name the columns, `prompt` among them")
        return [_item(row, rows.line_num) for row in rows]
    except csv.Error as error:
        raise ItemsFileError(f"line {rows.line_num} is not CSV: {error}") from None


def _item(row: Mapping[str | None, str | list[str] | None], line: int) -> dict[str, object]:
    item: dict[str, object] = {}
    for name, cell in row.items():
        if name is None:
            raise ItemsFileError(f"line {line} has more cells than there are columns")
        if isinstance(cell, str) and cell:
            item[name] = _value(cell, _TYPES.get(name, str))
    return item


def _list(cell: str) -> list[str]:
    return [part.strip() for part in cell.split(_LIST_SEPARATOR) if part.strip()]


def _value(cell: str, typed: Callable[[str], object]) -> object:
    try:
        return typed(cell.strip()) if typed is not str else cell
    except ValueError:
        # The gateway names what is wrong with it, and with all the others.
        return cell


_TYPES: Final[Mapping[str, Callable[[str], object]]] = {
    **dict.fromkeys(("width", "height", "num_frames", "num_inference_steps", "seed"), int),
    **dict.fromkeys(("fps", "guidance_scale", "deadline_seconds"), float),
    **dict.fromkeys(("labels", "callback_events"), _list),
}
