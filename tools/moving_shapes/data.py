"""Captioned clips of one shape in motion, drawn on the fly: the training data, no files.

Everything random comes from the `random.Random` that is handed in, so a clip is known by its seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from activities.inference import moving_shapes as words
from tools.moving_shapes.palette import BACKGROUND_RGB, COLOUR_RGB, RGB

SHAPES: Final = tuple(words.SHAPES)
MOTIONS: Final = tuple(words.MOTIONS)
DIRECTIONS: Final = ("right", "left", "up", "down")
ROUND: Final = frozenset({"circle", "ring"})
"""Shapes that do not show whether they spin."""

_WITH_BACKGROUND: Final = 0.5
"""Share of the scenes whose background is drawn, and named in the caption."""
_THE, _NO_ARTICLE, _IS, _SYNONYM = 0.15, 0.1, 0.15, 0.75
"""Shares of the captions with "the", with no article, with "is", and with any phrase for the motion."""
_ANGLES: Final = 720
_RING_HOLE: Final = 0.55
_HEART_OFFSET: Final = 0.28
"""Centres the heart, in radii."""
_OUTLINE_SHARPNESS: Final = 0.9
"""Pixels over which an outline is smoothed: about one."""
_MARGIN: Final = 0.04
"""Between a shape and the edge of the picture, as a share of the side."""
_RADII: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {"small": (0.09, 0.11), "": (0.15, 0.18), "big": (0.23, 0.26)}
)
_SMALLEST: Final = 0.07
_LARGEST: Final = (0.27, 0.32)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One clip before it is drawn. Positions and radii are shares of the side; one value for each frame."""

    shape: str
    colour: str
    background: str
    caption: str
    x: Tensor
    y: Tensor
    radius: Tensor
    rotation: Tensor
    """Radians."""


def sample_scene(rng: random.Random, frames: int) -> Scene:
    """Draw a scene of `frames` frames, and one of the captions that fit it."""
    shape, motion = rng.choice(SHAPES), rng.choice(MOTIONS)
    if motion == "spinning" and shape in ROUND:
        shape = rng.choice(["square", "triangle", "star", "heart"])
    colour = rng.choice(list(COLOUR_RGB))
    background = rng.choice(list(BACKGROUND_RGB)) if rng.random() < _WITH_BACKGROUND else None
    if background == colour:
        background = "black"
    size = rng.choice(["", "", "small", "big"]) if motion not in {"growing", "shrinking"} else ""
    x, y, radius, rotation = _path(rng, motion, rng.uniform(*_RADII[size]), frames)
    return Scene(
        shape=shape,
        colour=colour,
        background=background or "black",
        caption=_caption(rng, shape=shape, motion=motion, colour=colour, background=background, size=size),
        x=x,
        y=y,
        radius=radius,
        rotation=rotation,
    )


def sample_clips(rng: random.Random, count: int, *, frames: int, side: int) -> tuple[Tensor, list[str]]:
    """Draw clips.

    Returns:
        Clips as float32 [count, 3, frames, side, side] in -1 to 1, and their captions.
    """
    scenes = [sample_scene(rng, frames) for _ in range(count)]
    return render(scenes, side), [scene.caption for scene in scenes]


def render(scenes: Sequence[Scene], side: int) -> Tensor:
    """Draw scenes of equal length with smooth outlines: float32 [N, 3, T, side, side] in -1 to 1."""
    kind = torch.tensor([SHAPES.index(scene.shape) for scene in scenes])
    radius = (torch.stack([scene.radius for scene in scenes]) * side)[..., None, None]
    pixels = torch.arange(side).float() + 0.5
    right = pixels.view(1, 1, 1, side) - (torch.stack([scene.x for scene in scenes]) * side)[..., None, None]
    up = -(pixels.view(1, 1, side, 1) - (torch.stack([scene.y for scene in scenes]) * side)[..., None, None])
    up = up - torch.where(kind == SHAPES.index("heart"), _HEART_OFFSET, 0.0).view(-1, 1, 1, 1) * radius
    distance = (right * right + up * up).sqrt() + 1e-6
    angle = torch.atan2(up, right) - torch.stack([scene.rotation for scene in scenes])[..., None, None]
    index = (torch.remainder(angle, 2 * math.pi) * (_ANGLES / (2 * math.pi))).long().clamp_(0, _ANGLES - 1)
    inside = _OUTLINES[kind.view(-1, 1, 1, 1), index] * radius - distance
    is_ring = (kind == SHAPES.index("ring")).view(-1, 1, 1, 1)
    inside = torch.where(is_ring, torch.minimum(inside, distance - _RING_HOLE * radius), inside)
    cover = (inside * _OUTLINE_SHARPNESS + 0.5).clamp(0, 1).unsqueeze(1)
    foreground = _rgb([COLOUR_RGB[scene.colour] for scene in scenes])
    background = _rgb([BACKGROUND_RGB[scene.background] for scene in scenes])
    return (background * (1 - cover) + foreground * cover) * 2 - 1


def _rgb(colours: list[RGB]) -> Tensor:
    return (torch.tensor(colours) / 255.0).view(-1, 3, 1, 1, 1)


def _path(rng: random.Random, motion: str, radius: float, frames: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Position, radius and rotation over time."""
    time = torch.linspace(0, 1, frames)
    low, high = radius + _MARGIN, 1 - radius - _MARGIN
    radii, rotation = torch.full((frames,), radius), torch.zeros(frames)

    def still(lowest: float, highest: float) -> Tensor:
        return torch.full((frames,), rng.uniform(lowest, highest))

    if motion in DIRECTIONS:
        span = (high - low) * rng.uniform(0.8, 1.0)
        along = low + rng.uniform(0, 1) * (high - low - span) + span * time
        if motion in {"left", "up"}:
            along = along.flip(0)
        across = still(max(low, 0.3), min(high, 0.7))
        return (along, across, radii, rotation) if motion in {"right", "left"} else (across, along, radii, rotation)
    x, y = still(0.42, 0.58), still(0.42, 0.58)
    match motion:
        case "growing":
            radii = torch.linspace(_SMALLEST, rng.uniform(*_LARGEST), frames)
        case "shrinking":
            radii = torch.linspace(rng.uniform(*_LARGEST), _SMALLEST, frames)
        case "spinning":
            rotation = -time * math.pi * rng.uniform(0.9, 1.1)
        case "bouncing":
            height = (high - low) * rng.uniform(0.75, 0.95)
            y = high - height * (time * 2 * math.pi).sin().abs()
            x = still(max(low, 0.35), min(high, 0.65))
    return x, y, radii, rotation


def _caption(rng: random.Random, *, shape: str, motion: str, colour: str, background: str | None, size: str) -> str:
    """Say what a scene shows, in one of many ways; the plain name of a shape is taken twice as often."""
    sizes = words.SIZES[size] if size else ("",)
    caption = ["a", rng.choice(sizes), rng.choice(words.COLOURS[colour]), rng.choice(_weighted(words.SHAPES[shape]))]
    article = rng.random()
    if article < _THE:
        caption[0] = "the"
    elif article < _THE + _NO_ARTICLE:
        caption[0] = ""
    if rng.random() < _IS:
        caption.append("is")
    phrases = words.MOTIONS[motion]
    caption.append(rng.choice(phrases) if rng.random() < _SYNONYM else phrases[0])
    if background:
        phrase = rng.choice(words.BACKGROUND_PHRASES)
        caption.append(phrase.format(rng.choice(words.BACKGROUNDS[background])))
    return " ".join(word for word in caption if word)


def _weighted(names: tuple[str, ...]) -> tuple[str, ...]:
    return (names[0], *names) if len(names) > 1 else names


def _outlines() -> Tensor:
    """Outline of each shape as radius over angle, [shapes, angles], anti-clockwise from the right."""
    angle = torch.arange(_ANGLES) * (2 * math.pi / _ANGLES)
    sine, cosine = angle.sin(), angle.cos()
    circle = torch.ones(_ANGLES)
    square = 0.86 / torch.maximum(cosine.abs(), sine.abs())
    triangle = 0.62 / torch.cos(torch.remainder(angle - math.pi / 2, 2 * math.pi / 3) - math.pi / 3)
    heart = (2 - 2 * sine + sine * cosine.abs().sqrt() / (sine + 1.4)) / 3.2
    by_name = {
        "circle": circle, "square": square, "triangle": triangle, "star": _star(angle), "heart": heart, "ring": circle,
    }  # fmt: skip
    return torch.stack([by_name[shape] for shape in SHAPES])


def _star(angle: Tensor) -> Tensor:
    """Straight lines between outer and inner corners."""
    from_corner = torch.remainder(angle - math.pi / 2, 2 * math.pi / 5)
    from_corner = torch.minimum(from_corner, 2 * math.pi / 5 - from_corner)
    outer, inner, half = 1.2, 0.5, math.pi / 5
    x1, y1, x2, y2 = outer, 0.0, inner * math.cos(half), inner * math.sin(half)
    return (x1 * y2 - x2 * y1) / (from_corner.cos() * (y2 - y1) - from_corner.sin() * (x2 - x1))


_OUTLINES: Final = _outlines()
