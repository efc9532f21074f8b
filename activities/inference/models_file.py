"""The models file: which full-size models a deployment offers, and where their weights lie.

    default = "wan-small"            # model of requests that name none
    builtin = ["moving-shapes"]      # models that come with the product and are offered too

    [[models]]
    preset = "wan2.1-t2v-1.3b"       # or family = "wan" for a model that has no preset
    name = "wan-small"               # default: the preset's name
    path = "/models/wan2.1-t2v-1.3b" # pipeline folder; relative to this file
    revision = "2025-03"             # names the weights: clips of another revision never answer
    pool = "default"
      [models.rules]                 # narrower or wider limits
      max_frames = 49
      [models.defaults]
      num_frames = 33

The folder is not looked at here: the API reads the same file on hosts that have no weights.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from activities.inference.family import Family, Preset, discover
from activities.inference.rules import Defaults, FrameCounts, ModelKind, ResolvedParameters, Rules, violations
from activities.inference.specs import (
    DEFAULT_POOL,
    CatalogueError,
    ModelSpec,
    UnknownModelError,
    builtin_spec,
    preset_spec,
)

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class ModelsFile:
    """What a models file says."""

    default: str | None = None
    builtin: tuple[str, ...] | None = None
    """None: the file does not say."""
    specs: tuple[ModelSpec, ...] = ()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _RuleOverrides(_Strict):
    size_multiple: Count | None = None
    min_width: Count | None = None
    max_width: Count | None = None
    min_height: Count | None = None
    max_height: Count | None = None
    min_frames: Count | None = None
    max_frames: Count | None = None
    max_pixels: Count | None = None
    max_total_pixels: Count | None = None
    min_steps: Count | None = None
    max_steps: Count | None = None
    max_guidance: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    min_fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_prompt_length: Count | None = None
    max_negative_prompt_length: Count | None = None

    def over(self, rules: Rules) -> Rules:
        given = self.model_dump(exclude_none=True)
        frames = FrameCounts(
            minimum=given.pop("min_frames", rules.frames.minimum),
            maximum=given.pop("max_frames", rules.frames.maximum),
            multiple=rules.frames.multiple,
        )
        return replace(rules, frames=frames, **given)


class _DefaultOverrides(_Strict):
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None

    def over(self, defaults: Defaults) -> Defaults:
        return replace(defaults, **self.model_dump(exclude_none=True))


class _Entry(_Strict):
    path: Annotated[str, Field(min_length=1)]
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    preset: str | None = None
    family: str | None = None
    name: Name | None = None
    title: str | None = None
    pool: Name = DEFAULT_POOL
    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    rules: _RuleOverrides = _RuleOverrides()
    defaults: _DefaultOverrides = _DefaultOverrides()


class _Document(_Strict):
    default: str | None = None
    builtin: list[str] | None = None
    models: list[dict[str, Any]] = []


def read_models_file(file: Path) -> ModelsFile:
    """Read a models file.

    Raises:
        CatalogueError: with every problem, naming entry and field.
    """
    try:
        document = _Document.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError((f"{file.name}: {error}",)) from error
    except ValidationError as error:
        raise CatalogueError(tuple(_described(error, file.name))) from error
    problems: list[str] = []
    specs: list[ModelSpec] = []
    for index, raw in enumerate(document.models):
        label = f"models[{index}] {raw.get('name') or raw.get('preset') or ''}".rstrip()
        entry_problems, spec = _read_entry(raw, label, file.parent)
        problems += entry_problems
        if spec is not None:
            if any(spec.name == other.name for other in specs):
                problems.append(f"{label}: name: {spec.name!r} is the name of an entry above")
            specs.append(spec)
    for name in document.builtin or ():
        try:
            builtin_spec(name)
        except UnknownModelError as error:
            problems.append(f"builtin: {error}")
    if document.builtin == [] and not document.models:
        problems.append("models: the file offers no model")
    if problems:
        raise CatalogueError(tuple(problems))
    return ModelsFile(
        default=document.default,
        builtin=None if document.builtin is None else tuple(document.builtin),
        specs=tuple(specs),
    )


def _described(error: ValidationError, label: str) -> list[str]:
    return [f"{label}: {'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]


def _read_entry(raw: dict[str, Any], label: str, base: Path) -> tuple[list[str], ModelSpec | None]:
    try:
        entry = _Entry.model_validate(raw)
    except ValidationError as error:
        return _described(error, label), None
    found = _find_preset(entry)
    if isinstance(found, str):
        return [f"{label}: {found}"], None
    family, preset = found
    path = Path(entry.path).expanduser()
    spec = preset_spec(
        family.id, preset, path=str(path if path.is_absolute() else base / path), revision=entry.revision
    )
    spec = replace(
        spec,
        name=entry.name or spec.name,
        title=entry.title or spec.title,
        pool=entry.pool,
        dtype=entry.dtype or spec.dtype,
        rules=entry.rules.over(spec.rules),
        defaults=entry.defaults.over(spec.defaults),
    )
    return [f"{label}: {problem}" for problem in _inconsistencies(spec, preset.rules)], spec


def _find_preset(entry: _Entry) -> tuple[Family, Preset] | str:
    """The preset that an entry builds on, or what is wrong with its choice."""
    families = discover()
    if (entry.preset is None) == (entry.family is None):
        return "preset: give either `preset` or `family`"
    if entry.family is not None:
        if entry.family not in families:
            return f"family: there is no family {entry.family!r}; known: {', '.join(sorted(families))}"
        if entry.name is None:
            return "name: is required with `family`"
        family = families[entry.family]
        return family, Preset(name=entry.name, title=entry.name, rules=family.rules, defaults=family.defaults)
    presets = {preset.name: (family, preset) for family in families.values() for preset in family.presets}
    if entry.preset not in presets:
        return f"preset: there is no preset {entry.preset!r}; known: {', '.join(sorted(presets))}"
    return presets[entry.preset]


def _inconsistencies(spec: ModelSpec, true_rules: Rules) -> Sequence[str]:
    problems = []
    if spec.rules.size_multiple % true_rules.size_multiple:
        problems.append(f"rules.size_multiple: must be a multiple of {true_rules.size_multiple}")
    if not list(spec.rules.frames):
        problems.append("rules.max_frames: no number of frames is legal")
    example = ResolvedParameters(
        model=spec.name,
        prompt="x",
        negative_prompt=spec.defaults.negative_prompt,
        width=spec.defaults.width,
        height=spec.defaults.height,
        num_frames=spec.defaults.num_frames,
        fps=spec.defaults.fps,
        num_inference_steps=spec.defaults.num_inference_steps,
        guidance_scale=spec.defaults.guidance_scale,
        seed=None,
    )
    has_image = spec.kind is ModelKind.IMAGE_TO_VIDEO
    problems += [
        f"defaults.{broken.field}: {broken.message}"
        for broken in violations(spec.rules, spec.kind, example, has_image=has_image)
    ]
    return problems
