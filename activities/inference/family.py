"""The protocol of a model family, and how families are found.

A family is one file in `models/` that exports one `FAMILY`: its rules, its presets, and how its diffusers pipeline
is loaded, encodes a prompt and generates. Rules and presets are plain data, read by the API too; torch and
diffusers are imported by name inside the methods, which only the inference process calls.
"""

from __future__ import annotations

import pkgutil
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from activities.inference import models
from activities.inference.rules import Defaults, ModelKind, Rules
from activities.inference.vocabulary import Vocabulary
from workflows.tasks import GenerationParameters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

Pipeline = Any
"""A diffusers pipeline. Its classes carry no annotations."""

OnStep = Callable[[int, int], None]
"""Called after each denoising step with the steps done and their total; raises to stop the generation."""

BUILTIN: Final = "builtin:"
"""Prefix of the path of a model that comes with the product."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A known model of a family: its true limits, and where it lies when it comes with the product."""

    name: str
    title: str
    rules: Rules
    defaults: Defaults
    dtype: str = "auto"
    """`float32`, `float16`, `bfloat16`, or `auto`: bfloat16 on an accelerator, float32 on a CPU."""
    builtin: bool = False
    """Whether it comes with the product; otherwise a models file gives its folder."""
    vocabulary: Vocabulary | None = None
    """None: it takes free text."""
    examples: tuple[str, ...] = ()
    """Prompts that show what it can do."""


class FamilyError(Exception):
    """A file in `models/` breaks the protocol. Found at start, never by a task."""


class Family(ABC):
    """One kind of diffusers pipeline. The defaults here fit pipelines that take prompt embeddings."""

    id: ClassVar[str]
    kind: ClassVar[ModelKind]
    pipeline: ClassVar[str] = "DiffusionPipeline"
    """Class in diffusers; `DiffusionPipeline` takes the one that the folder names."""
    rules: ClassVar[Rules]
    """The widest rules of the family; size multiple and frame pattern are never widened."""
    defaults: ClassVar[Defaults]
    presets: ClassVar[tuple[Preset, ...]] = ()
    float32_components: ClassVar[tuple[str, ...]] = ()
    """Parts that lose too much in half precision."""
    max_prompt_tokens: ClassVar[int] = 512

    def load(self, path: Path, device: str, dtype: str) -> Pipeline:
        """Load the pipeline folder at `path` onto `device` (`cpu`, `cuda:0`). Touches no network."""
        torch = import_module("torch")
        weights = getattr(torch, dtype)
        parts = dict.fromkeys(self.float32_components, torch.float32)
        loader = getattr(import_module("diffusers"), self.pipeline)
        pipe = loader.from_pretrained(
            path, local_files_only=True, dtype={"default": weights, **parts} if parts else weights
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe.to(device)

    def encode_prompt(self, pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
        """Return the arguments of the pipeline call that stand for prompt and negative prompt."""
        positive, negative = pipe.encode_prompt(
            prompt=parameters.prompt,
            negative_prompt=parameters.negative_prompt,
            do_classifier_free_guidance=parameters.guidance_scale > 1,
            num_videos_per_prompt=1,
            max_sequence_length=self.max_prompt_tokens,
        )
        return {"prompt_embeds": positive, "negative_prompt_embeds": negative}

    def arguments(self, pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
        """Further arguments of the pipeline call."""
        return {}

    def pipeline_frames(self, pipe: Pipeline, num_frames: int) -> int:
        """The `num_frames` to ask the pipeline for, so that it makes that many."""
        return num_frames

    def generate(
        self,
        pipe: Pipeline,
        parameters: GenerationParameters,
        prompt: Mapping[str, Any],
        image: Image | None,
        on_step: OnStep,
    ) -> NDArray[np.float32]:
        """Denoise and decode.

        Returns:
            Frames as float32 [T, H, W, 3], nominally 0 to 1.
        """
        torch = import_module("torch")

        def at_step_end(running: Pipeline, index: int, timestep: object, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(index + 1, running.num_timesteps)
            return tensors

        output = pipe(
            **prompt,
            **({} if image is None else {"image": image}),
            height=parameters.height,
            width=parameters.width,
            num_frames=self.pipeline_frames(pipe, parameters.num_frames),
            num_inference_steps=parameters.num_inference_steps,
            guidance_scale=parameters.guidance_scale,
            # On the CPU whatever the device is: the same seed gives the same noise everywhere.
            generator=torch.Generator("cpu").manual_seed(parameters.seed),
            output_type="np",
            callback_on_step_end=at_step_end,
            max_sequence_length=self.max_prompt_tokens,
            **self.arguments(pipe, parameters),
        )
        frames: NDArray[np.float32] = output.frames[0]
        return frames


def discover() -> Mapping[str, Family]:
    """All families by id.

    Raises:
        FamilyError: a file exports no `FAMILY`, or an id or preset name is taken twice.
    """
    found: dict[str, Family] = {}
    preset_of: dict[str, str] = {}
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        family = getattr(import_module(module.name), "FAMILY", None)
        if not isinstance(family, Family):
            raise FamilyError(f"{module.name} exports no FAMILY")
        if family.id in found:
            raise FamilyError(f"{module.name}: the family id {family.id!r} is taken")
        found[family.id] = family
        for preset in family.presets:
            if preset.name in preset_of:
                raise FamilyError(f"{module.name}: the preset {preset.name!r} is taken by {preset_of[preset.name]!r}")
            preset_of[preset.name] = family.id
    return MappingProxyType(found)
