"""LTX-Video image-to-video: the same parts and rules as text-to-video, conditioned on the first frame."""

from __future__ import annotations

from typing import Any

from activities.inference.family import Family, Pipeline, Preset
from activities.inference.models.ltx import DEFAULTS, DEFAULTS_TINY, RULES, RULES_TINY, arguments, encode_prompt
from activities.inference.rules import ModelKind
from workflows.tasks import GenerationParameters


class LtxImageToVideo(Family):
    """Image-to-video with `LTXImageToVideoPipeline`."""

    id = "ltx-i2v"
    kind = ModelKind.IMAGE_TO_VIDEO
    pipeline = "LTXImageToVideoPipeline"
    rules = RULES
    defaults = DEFAULTS
    max_prompt_tokens = 128
    presets = (
        Preset(
            name="tiny-ltx-i2v",
            title="Tiny LTX image-to-video with random weights: noise, for development",
            builtin=True,
            dtype="float32",
            rules=RULES_TINY,
            defaults=DEFAULTS_TINY,
        ),
        Preset(name="ltx-video-i2v", title="LTX-Video 2B image-to-video", rules=RULES, defaults=DEFAULTS),
    )

    def encode_prompt(self, pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
        """Embeddings with their attention masks."""
        return encode_prompt(pipe, parameters, self.max_prompt_tokens)

    def arguments(self, pipe: Pipeline, parameters: GenerationParameters) -> dict[str, Any]:
        """Frame rate and decode noise."""
        return arguments(pipe, parameters)


FAMILY = LtxImageToVideo()
