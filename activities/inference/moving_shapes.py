"""What `moving-shapes`, the model that comes with the product, was taught to understand.

The training captions in `tools/moving_shapes` are drawn from the same tables, so prompt help cannot drift from what
the model has seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from activities.inference.vocabulary import Topic, Vocabulary

Synonyms = Mapping[str, tuple[str, ...]]

SHAPES: Final[Synonyms] = MappingProxyType(
    {
        "circle": ("circle", "ball"),
        "square": ("square", "box"),
        "triangle": ("triangle",),
        "star": ("star",),
        "heart": ("heart",),
        "ring": ("ring", "donut"),
    }
)
COLOURS: Final[Synonyms] = MappingProxyType(
    {
        "red": ("red",),
        "green": ("green",),
        "blue": ("blue",),
        "yellow": ("yellow",),
        "orange": ("orange",),
        "purple": ("purple", "violet"),
        "pink": ("pink",),
        "cyan": ("cyan", "turquoise"),
        "white": ("white",),
    }
)
BACKGROUNDS: Final[Synonyms] = MappingProxyType(
    {"black": ("black",), "white": ("white",), "gray": ("gray", "grey"), "navy": ("navy",)}
)
BACKGROUND_PHRASES: Final = ("on a {} background", "on {}", "over a {} background")
SIZES: Final[Synonyms] = MappingProxyType({"small": ("small", "tiny", "little"), "big": ("big", "large", "huge")})
MOTIONS: Final[Synonyms] = MappingProxyType(
    {
        "right": (
            *("moving right", "moving to the right", "going right", "flying to the right", "sliding right"),
            "moves from left to right",
        ),
        "left": (
            *("moving left", "moving to the left", "going left", "flying to the left", "sliding left"),
            "moves from right to left",
        ),
        "up": ("moving up", "rising", "going up", "flying up", "moving upwards"),
        "down": ("moving down", "falling", "going down", "falling down", "moving downwards"),
        "growing": ("growing", "getting bigger", "growing larger"),
        "shrinking": ("shrinking", "getting smaller"),
        "spinning": ("spinning", "rotating", "turning around"),
        "bouncing": ("bouncing", "jumping", "bouncing up and down"),
    }
)
FILLERS: Final = frozenset({"a", "the", "an", "is", "on", "over", "background", "and", "of", "to", "with", "from"})


def _all(words: Synonyms) -> tuple[str, ...]:
    """Every plain name, then every synonym."""
    first = [same[0] for same in words.values()]
    return (*first, *(word for same in words.values() for word in same[1:]))


VOCABULARY: Final = Vocabulary(
    topics=(
        Topic(name="sizes", words=_all(SIZES)),
        Topic(name="colours", words=_all(COLOURS)),
        Topic(name="shapes", words=_all(SHAPES)),
        Topic(name="motions", words=_all(MOTIONS)),
        Topic(name="backgrounds", words=_all(BACKGROUNDS)),
    ),
    fillers=FILLERS,
)
"""The topics stand in the order of a prompt."""

EXAMPLES: Final = (
    "a red circle moving right",
    "an orange ring growing",
    "a green triangle rising",
    "a small cyan ball bouncing",
    "a yellow star spinning on navy",
    "a big pink heart falling on gray",
    "a purple square shrinking",
    "a blue box moving left on a white background",
)
