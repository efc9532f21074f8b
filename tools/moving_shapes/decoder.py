"""Sharpens the codec: a small decoder that is not linear takes the place of the closed-form one.

Its convolutions run at the size of the latents, so it costs little. It starts from random features whose last layer
is a ridge regression, which is already as good as the linear decoder.
"""

from __future__ import annotations

import math
import random
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional, init

from tools.moving_shapes.codec import BLOCK, SIDE, Codec, blocks, halved, joined
from tools.moving_shapes.data import sample_clips
from tools.moving_shapes.loop import Learner
from tools.moving_shapes.model import LATENT_CHANNELS

Clips = tuple[Tensor, Tensor]
"""Latents and the clips they stand for."""

_CHANNELS: Final = 40
_FRAMES: Final = 5
_STRIDES: Final = (1, 2, 3)
_LEARNING_RATE: Final = 1.5e-3
_WARM_UP: Final = 30
_MAX_NOISE: Final = 0.2
"""On the latents: the transformer's will not be perfect."""
_EDGES: Final = 0.25
_RIDGE: Final = 1e-2
_RIDGE_BATCH: Final = 12
_RIDGE_NOISE: Final = 0.05


class DecoderLearner(Learner[Clips]):
    """Trains the decoder of a VAE; its encoder stays the codec's.

    Args:
        codec: the linear codec.
        seed: of the first weights.
        start_clips: clips that the last layer is regressed on before the training.
    """

    average_over = 100

    def __init__(self, codec: Codec, *, seed: int, start_clips: int) -> None:
        self._codec = codec
        noise = torch.Generator().manual_seed(seed)
        # Layers that are drawn and never trained are in no checkpoint: they must come out the same each time.
        torch.manual_seed(seed)
        self.vae = codec.vae(decoder_channels=_CHANNELS).requires_grad_(False)
        self._decoder: Any = self.vae.decoder
        for name, parameter in self._decoder.named_parameters():
            if "attentions" not in name:
                parameter.requires_grad_(True)
            elif "proj" in name:
                init.zeros_(parameter)
        with torch.no_grad():
            self._draw_features(noise)
            self._regress_output(random.Random(seed), noise, start_clips)
        self.parameters = [parameter for parameter in self._decoder.parameters() if parameter.requires_grad]
        self.optimisers = [torch.optim.AdamW(self.parameters, _LEARNING_RATE, betas=(0.9, 0.98))]

    def learning_rate(self, step: int, steps: int) -> float:
        """A short warm-up, then half a cosine."""
        return _LEARNING_RATE * min(1, (step + 1) / _WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))

    def draw(self, rng: random.Random, count: int) -> Clips:
        """Short clips at several speeds."""
        stride = rng.choice(_STRIDES)
        clips, _ = sample_clips(rng, count, frames=_FRAMES * stride, side=SIDE)
        clips = clips[:, :, ::stride]
        return self._codec.latents(halved(clips)), clips

    def loss(self, batch: Clips, noise: torch.Generator) -> Tensor:
        """Distance of pixels and of edges."""
        latents, clips = batch
        strength = torch.rand(len(latents), 1, 1, 1, 1, generator=noise) * _MAX_NOISE
        latents = latents + strength * torch.randn(latents.shape, generator=noise)
        with torch.autocast("cpu", torch.bfloat16):
            patches = self._decoder(self._codec.raw(latents))
        error = joined(patches.float()) - clips
        across = (error[..., 1:] - error[..., :-1]).abs().mean()
        down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
        distance: Tensor = error.abs().mean() + error.pow(2).mean() + _EDGES * (across + down)
        return distance

    def _draw_features(self, noise: torch.Generator) -> None:
        """First layer: the latents at unit scale in random directions; the biases keep their brightness."""
        first = self._decoder.conv_in
        init.normal_(first.weight, std=0.05, generator=noise)
        init.normal_(first.bias, std=0.7, generator=noise)
        directions = torch.randn(_CHANNELS, LATENT_CHANNELS, generator=noise) / LATENT_CHANNELS**0.5
        first.weight[:, :, 2, 1, 1] = directions / self._codec.std.view(1, -1)

    def _regress_output(self, rng: random.Random, noise: torch.Generator, count: int) -> None:
        """Last layer: the regression of the clips on what the layers before it make of their latents."""
        size = _CHANNELS * 9 + 1
        gram, moments = torch.zeros(size, size), torch.zeros(size, 3 * BLOCK**2)
        for _ in range(0, count, _RIDGE_BATCH):
            latents, clips = self.draw(rng, _RIDGE_BATCH)
            features = self._features(latents + _RIDGE_NOISE * torch.randn(latents.shape, generator=noise))
            gram += features.T @ features
            moments += features.T @ blocks(clips, BLOCK)
        ridge = _RIDGE * torch.eye(size, dtype=torch.float64)
        solution = torch.linalg.solve(gram.double() + ridge, moments.double()).float()
        last = self._decoder.conv_out
        last.weight.zero_()
        last.weight[:, :, 2] = solution[:-1].T.reshape(-1, _CHANNELS, 3, 3)
        last.bias.copy_(solution[-1])

    def _features(self, latents: Tensor) -> Tensor:
        """What the last layer sees at each latent pixel, and a constant."""
        seen: list[Tensor] = []
        hook = self._decoder.conv_out.register_forward_pre_hook(lambda _layer, given: seen.append(given[0]))
        self._decoder(self._codec.raw(latents))
        hook.remove()
        frames = seen[0].permute(0, 2, 1, 3, 4).flatten(0, 1)
        windows = functional.unfold(frames, 3, padding=1).transpose(1, 2).reshape(-1, _CHANNELS * 9)
        return torch.cat([windows, torch.ones(len(windows), 1)], 1)
