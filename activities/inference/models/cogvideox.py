"""CogVideoX 1.0: trained for one resolution, 720 x 480, and up to six seconds at 8 frames a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from activities.inference.family import Family, Pipeline, Preset
from activities.inference.rules import Defaults, FrameCounts, ModelKind, Rules
from workflows.tasks import GenerationParameters

RULES = Rules(
    # 8 pixels to a latent and 2 latents to a patch: the pipeline itself checks only the first.
    size_multiple=16,
    min_width=720,
    max_width=720,
    min_height=480,
    max_height=480,
    # The VAE would take 4k+1; the model was trained on whole seconds of 8 frames.
    frames=FrameCounts(minimum=9, maximum=49, multiple=8),
    max_pixels=720 * 480,
    max_total_pixels=720 * 480 * 49,
    max_prompt_length=1_500,
    max_negative_prompt_length=1_500,
)
DEFAULTS = Defaults(width=720, height=480, num_frames=49, fps=8.0, num_inference_steps=50, guidance_scale=6.0)


class CogVideoX(Family):
    """Text-to-video with `CogVideoXPipeline`."""

    id = "cogvideox"
    kind = ModelKind.TEXT_TO_VIDEO
    rules = RULES
    defaults = DEFAULTS
    max_prompt_tokens = 226
    presets = (
        Preset(
            name="tiny-cogvideox",
            title="Tiny CogVideoX with random weights: noise, for development",
            builtin=True,
            dtype="float32",
            rules=replace(
                RULES,
                min_width=64,
                max_width=256,
                min_height=64,
                max_height=256,
                frames=FrameCounts(minimum=5, maximum=81, multiple=4),
                max_pixels=256 * 256,
                max_total_pixels=256 * 256 * 81,
                max_steps=1_000,
            ),
            defaults=Defaults(width=64, height=64, num_frames=9, fps=8.0, num_inference_steps=8, guidance_scale=3.0),
        ),
        Preset(name="cogvideox-2b", title="CogVideoX 2B", dtype="float16", rules=RULES, defaults=DEFAULTS),
        Preset(name="cogvideox-5b", title="CogVideoX 5B", dtype="bfloat16", rules=RULES, defaults=DEFAULTS),
    )

    def arguments(self, pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
        """Dynamic guidance belongs to the DPM scheduler; with DDIM it spoils the picture."""
        return {"use_dynamic_cfg": type(pipe.scheduler).__name__ == "CogVideoXDPMScheduler"}


FAMILY = CogVideoX()
