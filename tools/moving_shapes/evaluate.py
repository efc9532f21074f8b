"""Measures how well a `moving-shapes` pipeline follows its prompts.

    python -m tools.moving_shapes.evaluate [FOLDER] [--seeds N]

Without a folder it measures the weights that come with the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import track

from tools.moving_shapes.clips import SHIPPED, Studio
from tools.moving_shapes.data import SHAPES
from tools.moving_shapes.palette import COLOUR_RGB
from tools.moving_shapes.scoring import Criterion, scores

MOTIONS: Final = {
    "right": "moving right",
    "left": "moving left",
    "up": "rising",
    "down": "falling",
    "growing": "growing",
    "shrinking": "shrinking",
}
_SEEDS_PER_PROMPT: Final = 100
"""Distance between the first seeds of two prompts."""

out = Console()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt to measure."""

    prompt: str
    colour: str
    motion: str
    first_seed: int


def cases() -> Iterator[Case]:
    """Every colour with every measurable motion; the shapes take turns."""
    for c, colour in enumerate(COLOUR_RGB):
        for m, (motion, phrase) in enumerate(MOTIONS.items()):
            shape = SHAPES[(c + m) % len(SHAPES)]
            yield Case(
                prompt=f"a {colour} {shape} {phrase}",
                colour=colour,
                motion=motion,
                first_seed=_SEEDS_PER_PROMPT * (c * len(MOTIONS) + m),
            )


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Pipeline folder.")] = SHIPPED,
    seeds: Annotated[int, typer.Option(min=1, max=_SEEDS_PER_PROMPT, help="Clips for each prompt.")] = 1,
) -> None:
    """Generate clips of all prompts and count those that follow them."""
    studio = Studio.open(folder)
    verdicts: dict[Criterion, list[bool]] = {criterion: [] for criterion in Criterion}
    missed = []
    for case in track(list(cases()), description="evaluating", console=out):
        for seed in range(case.first_seed, case.first_seed + seeds):
            found = scores(studio.clip(case.prompt, seed), colour=case.colour, motion=case.motion)
            for criterion, followed in found.items():
                verdicts[criterion].append(followed)
                if not followed:
                    missed.append(f"{case.prompt} (seed {seed}): {criterion}")
    for criterion, followed_all in verdicts.items():
        out.print(f"{criterion}: {sum(followed_all)} of {len(followed_all)}")
    for miss in missed:
        out.print(f"missed: {miss}")


if __name__ == "__main__":
    typer.run(evaluate)
