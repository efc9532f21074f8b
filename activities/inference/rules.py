"""What a model can really be asked for, as data, and the check of a whole request against it.

Pipelines round sizes and frame counts without a word, or crash deep inside: everything is checked here first, so
that a task is either refused at submission, with every reason, or generated exactly as echoed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from workflows.tasks import GenerationParameters

MAX_SEED: Final = 2**32 - 1


class ModelKind(StrEnum):
    """What a model takes besides the prompt."""

    TEXT_TO_VIDEO = "text-to-video"
    IMAGE_TO_VIDEO = "image-to-video"


@dataclass(frozen=True, kw_only=True)
class FrameCounts:
    """The legal numbers of frames: `multiple` * k + 1 within the bounds, as video VAEs compress time."""

    minimum: int
    maximum: int
    multiple: int = 1

    def __contains__(self, count: int) -> bool:
        return self.minimum <= count <= self.maximum and (count - 1) % self.multiple == 0

    def __iter__(self) -> Iterator[int]:
        return (count for count in range(self.minimum, self.maximum + 1) if count in self)

    def __str__(self) -> str:
        if self.minimum == self.maximum:
            return f"{self.minimum}"
        pattern = f"{self.multiple}k+1, " if self.multiple > 1 else ""
        return f"{pattern}{self.minimum} to {self.maximum}"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Limits of one model. Lengths are Unicode code points; bounds are inclusive."""

    size_multiple: int
    min_width: int
    max_width: int
    min_height: int
    max_height: int
    frames: FrameCounts
    max_pixels: int
    """Width x height."""
    max_total_pixels: int
    """Width x height x frames: what memory is measured by."""
    min_steps: int = 1
    max_steps: int = 100
    max_guidance: float = 20.0
    min_fps: float = 1.0
    max_fps: float = 60.0
    max_prompt_length: int = 2_000
    max_negative_prompt_length: int = 2_000


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values taken for what a request leaves out."""

    width: int
    height: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    negative_prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class AskedParameters:
    """Parameters as the client sent them; None where it sent none."""

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    has_image: bool = False


@dataclass(frozen=True, kw_only=True)
class ResolvedParameters:
    """Effective parameters, legal for the model; only the seed may still be open."""

    model: str
    prompt: str
    negative_prompt: str
    width: int
    height: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    seed: int | None

    def with_seed(
        self, seed: int, *, image_key: str | None = None, image_sha256: str | None = None
    ) -> GenerationParameters:
        """The parameters that enter the workflow; `seed` is used where the client sent none."""
        return GenerationParameters(
            model=self.model,
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            width=self.width,
            height=self.height,
            num_frames=self.num_frames,
            fps=self.fps,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            seed=seed if self.seed is None else self.seed,
            image_key=image_key,
            image_sha256=image_sha256,
        )


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule of one field."""

    field: str
    rule: str
    """Stable name of the rule, e.g. `multiple_of`."""
    message: str


class InvalidParametersError(Exception):
    """A request that the model cannot generate, with every rule that it breaks."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(f"{violation.field}: {violation.message}" for violation in violations))
        self.violations = violations


def violations(rules: Rules, kind: ModelKind, resolved: ResolvedParameters, *, has_image: bool) -> Iterator[Violation]:
    """Every rule that the parameters break, in the order of the fields."""
    yield from _prompts(rules, resolved)
    yield from _size(rules, resolved)
    yield from _frames(rules, resolved)
    yield from _number("fps", resolved.fps, rules.min_fps, rules.max_fps)
    yield from _number("num_inference_steps", resolved.num_inference_steps, rules.min_steps, rules.max_steps)
    yield from _number("guidance_scale", resolved.guidance_scale, 0.0, rules.max_guidance)
    if resolved.seed is not None:
        yield from _number("seed", resolved.seed, 0, MAX_SEED)
    if kind is ModelKind.IMAGE_TO_VIDEO and not has_image:
        yield Violation(field="image", rule="required", message="this model makes a video from an image")
    if kind is ModelKind.TEXT_TO_VIDEO and has_image:
        yield Violation(field="image", rule="forbidden", message="this model takes no image")


def _prompts(rules: Rules, resolved: ResolvedParameters) -> Iterator[Violation]:
    if not resolved.prompt.strip():
        yield Violation(field="prompt", rule="required", message="must not be empty")
    for field, text, limit in (
        ("prompt", resolved.prompt, rules.max_prompt_length),
        ("negative_prompt", resolved.negative_prompt, rules.max_negative_prompt_length),
    ):
        if len(text) > limit:
            yield Violation(
                field=field, rule="max_length", message=f"has {len(text)} characters, at most {limit} are allowed"
            )


def _size(rules: Rules, resolved: ResolvedParameters) -> Iterator[Violation]:
    for field, value, low, high in (
        ("width", resolved.width, rules.min_width, rules.max_width),
        ("height", resolved.height, rules.min_height, rules.max_height),
    ):
        yield from _number(field, value, low, high)
        if value % rules.size_multiple:
            yield Violation(field=field, rule="multiple_of", message=f"must be a multiple of {rules.size_multiple}")
        elif value % 2:
            # H.264 stores colour at half the size.
            yield Violation(field=field, rule="multiple_of", message="must be even")
    pixels = resolved.width * resolved.height
    if pixels > rules.max_pixels:
        message = f"width x height is {pixels}, at most {rules.max_pixels} pixels are allowed"
        yield Violation(field="width", rule="max_pixels", message=message)
    elif resolved.num_frames in rules.frames and pixels * resolved.num_frames > rules.max_total_pixels:
        message = (
            f"width x height x num_frames is {pixels * resolved.num_frames}, "
            f"at most {rules.max_total_pixels} pixels are allowed"
        )
        yield Violation(field="num_frames", rule="max_total_pixels", message=message)


def _frames(rules: Rules, resolved: ResolvedParameters) -> Iterator[Violation]:
    if resolved.num_frames not in rules.frames:
        yield Violation(field="num_frames", rule="frame_count", message=f"must be {rules.frames}")


def _number(field: str, value: float, low: float, high: float) -> Iterator[Violation]:
    if not math.isfinite(value):
        yield Violation(field=field, rule="finite", message="must be a finite number")
    elif value < low:
        yield Violation(field=field, rule="minimum", message=f"must be at least {low:g}")
    elif value > high:
        yield Violation(field=field, rule="maximum", message=f"must be at most {high:.10g}")
