"""Wan 2.1 and 2.2 image-to-video."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from activities.inference.family import Family, Pipeline, Preset
from activities.inference.models.wan import (
    DEFAULTS,
    DEFAULTS_5B,
    DEFAULTS_TINY,
    RULES,
    RULES_5B,
    RULES_480P,
    RULES_TINY,
)
from activities.inference.rules import FrameCounts, ModelKind
from workflows.tasks import GenerationParameters


class WanImageToVideo(Family):
    """Image-to-video with `WanImageToVideoPipeline`."""

    id = "wan-i2v"
    kind = ModelKind.IMAGE_TO_VIDEO
    pipeline = "WanImageToVideoPipeline"
    rules = replace(RULES, frames=FrameCounts(minimum=5, maximum=121, multiple=4), max_total_pixels=1280 * 720 * 121)
    defaults = DEFAULTS
    float32_components = ("vae", "image_encoder")
    presets = (
        Preset(
            name="tiny-wan-i2v",
            title="Tiny Wan image-to-video with random weights: noise, for development",
            builtin=True,
            dtype="float32",
            rules=RULES_TINY,
            defaults=DEFAULTS_TINY,
        ),
        Preset(
            name="wan2.1-i2v-14b-480p",
            title="Wan 2.1 image-to-video 14B 480P",
            rules=RULES_480P,
            defaults=DEFAULTS,
        ),
        Preset(
            name="wan2.1-i2v-14b-720p",
            title="Wan 2.1 image-to-video 14B 720P",
            rules=RULES,
            defaults=replace(DEFAULTS, width=1280, height=720),
        ),
        Preset(
            name="wan2.2-i2v-a14b",
            title="Wan 2.2 image-to-video A14B",
            rules=RULES,
            defaults=replace(DEFAULTS, num_inference_steps=40, guidance_scale=3.5),
        ),
        Preset(name="wan2.2-ti2v-5b-image", title="Wan 2.2 5B, from an image", rules=RULES_5B, defaults=DEFAULTS_5B),
    )

    def encode_prompt(self, pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
        """Encode with the text-to-video pipeline over the same parts.

        The image-to-video pipeline calls ftfy without asking whether it is installed; its sibling asks.
        """
        text = import_module("diffusers").WanPipeline(
            tokenizer=pipe.tokenizer,
            text_encoder=pipe.text_encoder,
            vae=pipe.vae,
            scheduler=pipe.scheduler,
            transformer=pipe.transformer,
        )
        return super().encode_prompt(text, parameters)


FAMILY = WanImageToVideo()
