"""The colours that clips are drawn in and measured against. Without torch: measuring needs none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

RGB = tuple[int, int, int]

COLOUR_RGB: Final[Mapping[str, RGB]] = MappingProxyType(
    {
        "red": (230, 40, 40),
        "green": (40, 190, 70),
        "blue": (50, 90, 240),
        "yellow": (250, 220, 50),
        "orange": (250, 140, 30),
        "purple": (150, 60, 210),
        "pink": (250, 120, 190),
        "cyan": (50, 220, 230),
        "white": (245, 245, 245),
    }
)
BACKGROUND_RGB: Final[Mapping[str, RGB]] = MappingProxyType(
    {"black": (12, 12, 16), "white": (240, 240, 240), "gray": (110, 112, 118), "navy": (16, 24, 70)}
)
