"""Wan 2.1 and 2.2 text-to-video, and `moving-shapes`, the small model of the same family that comes with the product.

The VAE compresses 8 x 8 pixels (16 x 16 in the 5B model) and 4 frames, the transformer takes 2 x 2 of those.
"""

from __future__ import annotations

from dataclasses import replace

from activities.inference import moving_shapes
from activities.inference.family import Family, Pipeline, Preset
from activities.inference.rules import Defaults, FrameCounts, ModelKind, Rules

RULES = Rules(
    size_multiple=16,
    min_width=256,
    max_width=1280,
    min_height=256,
    max_height=1280,
    frames=FrameCounts(minimum=5, maximum=81, multiple=4),
    max_pixels=1280 * 720,
    max_total_pixels=1280 * 720 * 81,
)
DEFAULTS = Defaults(width=832, height=480, num_frames=81, fps=16.0, num_inference_steps=50, guidance_scale=5.0)

RULES_480P = replace(RULES, max_width=832, max_height=832, max_pixels=832 * 480, max_total_pixels=832 * 480 * 81)
# The VAE of the 5B model compresses 16 x 16 pixels.
RULES_5B = replace(
    RULES,
    size_multiple=32,
    frames=FrameCounts(minimum=5, maximum=121, multiple=4),
    max_pixels=1280 * 704,
    max_total_pixels=1280 * 704 * 121,
)
DEFAULTS_5B = replace(DEFAULTS, width=1280, height=704, num_frames=121, fps=24.0)

RULES_TINY = replace(
    RULES,
    min_width=64,
    max_width=256,
    min_height=64,
    max_height=256,
    max_pixels=256 * 256,
    max_total_pixels=256 * 256 * 81,
    max_steps=1_000,
)
DEFAULTS_TINY = Defaults(width=64, height=64, num_frames=9, fps=8.0, num_inference_steps=8, guidance_scale=3.0)


class Wan(Family):
    """Text-to-video with `WanPipeline`."""

    id = "wan"
    kind = ModelKind.TEXT_TO_VIDEO
    rules = replace(RULES, frames=FrameCounts(minimum=5, maximum=121, multiple=4), max_total_pixels=1280 * 720 * 121)
    defaults = DEFAULTS
    float32_components = ("vae",)
    presets = (
        Preset(
            name="moving-shapes",
            title="Moving shapes: a small demonstration model of coloured shapes in motion",
            builtin=True,
            dtype="float32",
            # 16 frames of 128 x 128 is all that it was trained for.
            rules=replace(
                RULES,
                size_multiple=32,
                min_width=128,
                max_width=128,
                min_height=128,
                max_height=128,
                frames=FrameCounts(minimum=16, maximum=16),
                max_pixels=128 * 128,
                max_total_pixels=128 * 128 * 16,
                max_prompt_length=500,
                max_negative_prompt_length=500,
            ),
            defaults=Defaults(
                width=128, height=128, num_frames=16, fps=8.0, num_inference_steps=25, guidance_scale=3.0
            ),
            vocabulary=moving_shapes.VOCABULARY,
            examples=moving_shapes.EXAMPLES,
        ),
        Preset(
            name="tiny-wan",
            title="Tiny Wan with random weights: noise, for development",
            builtin=True,
            dtype="float32",
            rules=RULES_TINY,
            defaults=DEFAULTS_TINY,
        ),
        Preset(
            name="wan2.1-t2v-1.3b",
            title="Wan 2.1 text-to-video 1.3B",
            rules=RULES_480P,
            defaults=DEFAULTS,
        ),
        Preset(name="wan2.1-t2v-14b", title="Wan 2.1 text-to-video 14B", rules=RULES, defaults=DEFAULTS),
        Preset(
            name="wan2.2-t2v-a14b",
            title="Wan 2.2 text-to-video A14B",
            rules=RULES,
            defaults=replace(DEFAULTS, width=1280, height=720, num_inference_steps=40, guidance_scale=4.0),
        ),
        Preset(name="wan2.2-ti2v-5b", title="Wan 2.2 5B, from text", rules=RULES_5B, defaults=DEFAULTS_5B),
    )

    def pipeline_frames(self, pipe: Pipeline, num_frames: int) -> int:
        """Ask for one frame less where the VAE does not compress time: the pipeline then makes one more."""
        return num_frames - 1 if pipe.vae_scale_factor_temporal == 1 else num_frames


FAMILY = Wan()
