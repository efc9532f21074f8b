"""Draws the contact sheet of a `moving-shapes` pipeline: one clip to a row, frames from left to right.

    python -m tools.moving_shapes.sheet [FOLDER] [--out FILE]

The prompts are the examples of `GET /api/v1/models` and one beyond them; the seed of a row is its number, and no
clip is picked.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.progress import track

from activities.inference.moving_shapes import EXAMPLES
from tools.moving_shapes.clips import SHIPPED, Studio

OUT: Final = Path("docs/models/moving-shapes.png")
PROMPTS: Final = (*EXAMPLES, "a shiny white star flying to the right")
COLUMNS: Final = 8
CELL: Final = 96
GAP: Final = 2
CAPTION_WIDTH: Final = 190
CAPTION_LETTERS: Final = 22
BACKGROUND: Final = (30, 30, 34)
TEXT: Final = (235, 235, 235)
FONT_SIZE: Final = 14

out = Console()


def draw(captions: Sequence[str], clips: Sequence[NDArray[np.uint8]]) -> Image.Image:
    """Put clips, uint8 [T, H, W, 3], under each other."""
    sheet = Image.new("RGB", (CAPTION_WIDTH + COLUMNS * (CELL + GAP), len(clips) * (CELL + GAP)), BACKGROUND)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    for row, (caption, clip) in enumerate(zip(captions, clips, strict=True)):
        top = row * (CELL + GAP)
        for column, index in enumerate(np.linspace(0, len(clip) - 1, COLUMNS).round().astype(int)):
            frame = Image.fromarray(clip[index]).resize((CELL, CELL), Image.Resampling.LANCZOS)
            sheet.paste(frame, (CAPTION_WIDTH + column * (CELL + GAP), top))
        text = "\n".join(textwrap.wrap(caption, CAPTION_LETTERS))
        pen.multiline_text((10, top + CELL / 2), text, fill=TEXT, font=font, anchor="lm")
    return sheet


def save(sheet: Image.Image, file: Path) -> None:
    """Write a sheet in 256 colours of its own: a third of the size, and hardly a difference to see."""
    sheet.quantize(256, kmeans=4, dither=Image.Dither.NONE).save(file, optimize=True)


def main(
    folder: Annotated[Path, typer.Argument(help="Pipeline folder.")] = SHIPPED,
    file: Annotated[Path, typer.Option("--out", help="Where to write the PNG.")] = OUT,
) -> None:
    """Generate the clips and write the sheet."""
    studio = Studio.open(folder)
    clips = [
        studio.clip(prompt, seed) for seed, prompt in enumerate(track(PROMPTS, description="generating", console=out))
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    save(draw(PROMPTS, clips), file)
    out.print(f"{file}: {file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    typer.run(main)
