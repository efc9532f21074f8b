"""Whether a clip shows what its prompt says, measured on the frames: colour, direction, change of size.

What differs from the background is taken for the shape. Shapes themselves are not told apart here; a person sees
those on the contact sheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tools.moving_shapes.palette import BACKGROUND_RGB, COLOUR_RGB

MIN_CONTRAST: Final = 60
"""Largest difference of a channel from the background, of 255, from which a pixel belongs to the shape."""
CORE: Final = 0.6
"""Share of the shape's full contrast from which a pixel is inside it and not on its soft outline."""
MIN_PIXELS: Final = 4
MIN_SHIFT: Final = 8.0
"""Pixels between the first and the last third of a clip."""
GROWN: Final = 1.3
"""Ratio of areas, last third to first."""


class Criterion(StrEnum):
    """What is measured."""

    COLOUR = "colour"
    DIRECTION = "direction"
    SIZE = "size"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a clip shows on a black background."""

    colour: str
    """Nearest of the palette."""
    shift: tuple[float, float]
    """Way of the centroid to the right and down, in pixels."""
    growth: float
    """Ratio of the areas."""


def observe(frames: NDArray[np.uint8]) -> Observation | None:
    """Measure a clip, uint8 [T, H, W, 3]; None when there is a frame without a shape."""
    clip = frames.astype(np.float64)
    contrast = np.abs(clip - np.array(BACKGROUND_RGB["black"])).max(-1)
    shape = contrast > MIN_CONTRAST
    area = shape.sum((1, 2)).astype(np.float64)
    if area.min() < MIN_PIXELS:
        return None
    core = contrast > CORE * np.percentile(contrast[shape], 90)
    rows, columns = np.mgrid[: clip.shape[1], : clip.shape[2]]
    third = len(clip) // 3

    def change(per_frame: NDArray[np.float64]) -> tuple[float, float]:
        return float(per_frame[:third].mean()), float(per_frame[-third:].mean())

    (x0, x1), (y0, y1) = change((shape * columns).sum((1, 2)) / area), change((shape * rows).sum((1, 2)) / area)
    area0, area1 = change(area)
    return Observation(colour=_nearest_colour(clip[core].mean(0)), shift=(x1 - x0, y1 - y0), growth=area1 / area0)


def scores(frames: NDArray[np.uint8], *, colour: str, motion: str) -> dict[Criterion, bool]:
    """Compare a clip with its prompt.

    Args:
        frames: uint8 [T, H, W, 3].
        colour: name of the colour asked for.
        motion: name of the motion asked for: a direction, `growing` or `shrinking`.

    Returns:
        One verdict on the colour and one on the motion.
    """
    moved = Criterion.SIZE if motion in {"growing", "shrinking"} else Criterion.DIRECTION
    seen = observe(frames)
    if seen is None:
        return {Criterion.COLOUR: False, moved: False}
    return {Criterion.COLOUR: seen.colour == colour, moved: _moves(seen, motion)}


def _moves(seen: Observation, motion: str) -> bool:
    right, down = seen.shift
    sideways = abs(right) > abs(down)
    match motion:
        case "right":
            return sideways and right > MIN_SHIFT
        case "left":
            return sideways and right < -MIN_SHIFT
        case "up":
            return not sideways and down < -MIN_SHIFT
        case "down":
            return not sideways and down > MIN_SHIFT
        case "growing":
            return seen.growth > GROWN
        case "shrinking":
            return seen.growth < 1 / GROWN
    raise ValueError(f"no way to measure the motion {motion!r}")


def _nearest_colour(rgb: NDArray[np.float64]) -> str:
    return min(COLOUR_RGB, key=lambda name: float(((np.array(COLOUR_RGB[name]) - rgb) ** 2).sum()))
