"""LTX-Video text-to-video: 32 x 32 pixels and 8 frames to one latent, and a frame rate that the model itself sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from activities.inference.family import Family, Pipeline, Preset
from activities.inference.rules import Defaults, FrameCounts, ModelKind, Rules
from workflows.tasks import GenerationParameters

RULES = Rules(
    size_multiple=32,
    min_width=256,
    max_width=1280,
    min_height=256,
    max_height=1280,
    frames=FrameCounts(minimum=9, maximum=257, multiple=8),
    max_pixels=1280 * 704,
    max_total_pixels=1280 * 704 * 257,
)
DEFAULTS = Defaults(width=704, height=480, num_frames=161, fps=24.0, num_inference_steps=50, guidance_scale=3.0)

RULES_TINY = replace(
    RULES,
    min_width=64,
    max_width=256,
    min_height=64,
    max_height=256,
    frames=FrameCounts(minimum=9, maximum=81, multiple=8),
    max_pixels=256 * 256,
    max_total_pixels=256 * 256 * 81,
    max_steps=1_000,
)
DEFAULTS_TINY = Defaults(width=64, height=64, num_frames=9, fps=8.0, num_inference_steps=8, guidance_scale=3.0)


def encode_prompt(pipe: Pipeline, parameters: GenerationParameters, max_tokens: int) -> dict[str, Any]:
    """Prompt arguments of both LTX pipelines: embeddings with their attention masks."""
    positive, positive_mask, negative, negative_mask = pipe.encode_prompt(
        prompt=parameters.prompt,
        negative_prompt=parameters.negative_prompt,
        do_classifier_free_guidance=parameters.guidance_scale > 1,
        num_videos_per_prompt=1,
        max_sequence_length=max_tokens,
    )
    return {
        "prompt_embeds": positive,
        "prompt_attention_mask": positive_mask,
        "negative_prompt_embeds": negative,
        "negative_prompt_attention_mask": negative_mask,
    }


def arguments(pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
    """Frame rate, and for VAEs that denoise while they decode (0.9.1 and later) the values that they were made for."""
    rate: dict[str, Any] = {"frame_rate": parameters.fps}
    if pipe.vae.config.timestep_conditioning:
        return rate | {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
    return rate


class Ltx(Family):
    """Text-to-video with `LTXPipeline`."""

    id = "ltx"
    kind = ModelKind.TEXT_TO_VIDEO
    rules = RULES
    defaults = DEFAULTS
    max_prompt_tokens = 128
    presets = (
        Preset(
            name="tiny-ltx",
            title="Tiny LTX with random weights: noise, for development",
            builtin=True,
            dtype="float32",
            rules=RULES_TINY,
            defaults=DEFAULTS_TINY,
        ),
        Preset(name="ltx-video", title="LTX-Video 2B text-to-video", rules=RULES, defaults=DEFAULTS),
    )

    def encode_prompt(self, pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
        """Embeddings with their attention masks."""
        return encode_prompt(pipe, parameters, self.max_prompt_tokens)

    def arguments(self, pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
        """Frame rate and decode noise."""
        return arguments(pipe, parameters)


FAMILY = Ltx()
