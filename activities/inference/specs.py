"""What one model on offer is, and the specs of the known ones: families' presets, built in or in a given folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from activities.inference.family import BUILTIN, Preset, discover
from activities.inference.rules import MAX_SEED, Defaults, ModelKind, Rules
from activities.inference.vocabulary import Vocabulary

DEFAULT_POOL: Final = "default"
BUILTIN_REVISION: Final = "1"
"""Raised when the weights of a built-in model change, so that old clips do not answer for new ones."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model that can be asked for."""

    name: str
    title: str
    family: str
    kind: ModelKind
    path: str
    """Pipeline folder, or `builtin:<name>`."""
    revision: str
    """Names the weights; part of the artifact key."""
    rules: Rules
    defaults: Defaults
    pool: str = DEFAULT_POOL
    dtype: str = "auto"
    vocabulary: Vocabulary | None = None
    """None: it takes free text."""
    examples: tuple[str, ...] = ()
    """Prompts that show what it can do."""

    def schema(self) -> dict[str, object]:
        """The parameters as a JSON Schema object, for clients and the console."""
        rules, defaults = self.rules, self.defaults
        properties: dict[str, object] = {
            "prompt": {"type": "string", "minLength": 1, "maxLength": rules.max_prompt_length},
            "negative_prompt": {
                "type": "string",
                "maxLength": rules.max_negative_prompt_length,
                "default": defaults.negative_prompt,
            },
            "width": {
                "type": "integer",
                "minimum": rules.min_width,
                "maximum": rules.max_width,
                "multipleOf": rules.size_multiple,
                "default": defaults.width,
            },
            "height": {
                "type": "integer",
                "minimum": rules.min_height,
                "maximum": rules.max_height,
                "multipleOf": rules.size_multiple,
                "default": defaults.height,
            },
            "num_frames": {"type": "integer", "enum": list(rules.frames), "default": defaults.num_frames},
            "fps": {
                "type": "number",
                "minimum": rules.min_fps,
                "maximum": rules.max_fps,
                "default": defaults.fps,
            },
            "num_inference_steps": {
                "type": "integer",
                "minimum": rules.min_steps,
                "maximum": rules.max_steps,
                "default": defaults.num_inference_steps,
            },
            "guidance_scale": {
                "type": "number",
                "minimum": 0,
                "maximum": rules.max_guidance,
                "default": defaults.guidance_scale,
            },
            "seed": {"type": "integer", "minimum": 0, "maximum": MAX_SEED},
        }
        required = ["prompt"]
        if self.kind is ModelKind.IMAGE_TO_VIDEO:
            properties["image"] = {"type": "string"}
            required.append("image")
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "maxPixels": rules.max_pixels,
            "maxTotalPixels": rules.max_total_pixels,
        }


class UnknownModelError(Exception):
    """No model of this name is offered."""

    def __init__(self, name: str, offered: Iterable[str]) -> None:
        super().__init__(f"there is no model {name!r}; offered: {', '.join(sorted(offered))}")
        self.name = name


class CatalogueError(Exception):
    """The catalogue cannot be built; every problem names its entry and field."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def builtin_spec(name: str) -> ModelSpec:
    """The spec of a model that comes with the product.

    Raises:
        UnknownModelError: none of that name does.
    """
    known = {preset.name: (family.id, preset) for family in discover().values() for preset in family.presets}
    if name not in known or not known[name][1].builtin:
        raise UnknownModelError(name, (preset.name for _, preset in known.values() if preset.builtin))
    family, preset = known[name]
    return preset_spec(family, preset, path=f"{BUILTIN}{name}", revision=BUILTIN_REVISION)


def preset_spec(family: str, preset: Preset, *, path: str, revision: str) -> ModelSpec:
    """The spec of a preset whose weights lie at `path`."""
    return ModelSpec(
        name=preset.name,
        title=preset.title,
        family=family,
        kind=discover()[family].kind,
        path=path,
        revision=revision,
        rules=preset.rules,
        defaults=preset.defaults,
        dtype=preset.dtype,
        vocabulary=preset.vocabulary,
        examples=preset.examples,
    )
