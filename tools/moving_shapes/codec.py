"""A linear video codec in closed form, and the `AutoencoderKLWan` that computes it.

A principal component analysis of 8 x 8-pixel blocks of clips drawn at 64 x 64 gives the encoder, a ridge regression
of 16 x 16-pixel blocks at 128 x 128 the decoder. So no VAE has to be trained before the transformer, and training
clips are drawn and encoded at 64 x 64, which costs a quarter.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tools.moving_shapes.data import sample_clips
from tools.moving_shapes.model import LATENT_CHANNELS, diffusers

# `Any`: neither of its two functions that are used here is annotated.
_wan_vae: Any = import_module("diffusers.models.autoencoders.autoencoder_kl_wan")

BLOCK: Final = 16
"""Pixels of a clip to one latent pixel. Time is not compressed."""
SMALL_BLOCK: Final = 8
"""The same at the size of training clips."""
SIDE: Final = 128
SMALL_SIDE: Final = 64

_FRAMES: Final = 8
_BLOCKS_ANALYSED: Final = 30_000
_RIDGE: Final = 1e-4
_WHITENING: Final = 0.8
"""1 gives every channel the same weight in the loss; 0.5 let the brightness channel eat all of it."""
_LINEAR_CHANNELS: Final = 18
_CONSTANT: Final = 2_000.0
_MIN_LOG_VARIANCE: Final = -12.0


@dataclass(frozen=True, kw_only=True)
class Codec:
    """The two linear maps and the statistics of the latents."""

    encode: Tensor
    """[3 * SMALL_BLOCK ** 2, channels]"""
    centre: Tensor
    """Mean of the blocks."""
    decode: Tensor
    """[channels, 3 * BLOCK ** 2]"""
    bias: Tensor
    mean: Tensor
    """Of each latent channel."""
    std: Tensor

    @classmethod
    @torch.no_grad()
    def fit(cls, seed: int, *, clips: int) -> Codec:
        """Analyse `clips` clips."""
        large, _ = sample_clips(random.Random(seed), clips, frames=_FRAMES, side=SIDE)
        small_blocks, large_blocks = blocks(halved(large), SMALL_BLOCK), blocks(large, BLOCK)
        centre = small_blocks.mean(0)
        order = torch.randperm(len(small_blocks), generator=torch.Generator().manual_seed(seed))
        _, _, components = torch.linalg.svd((small_blocks - centre)[order[:_BLOCKS_ANALYSED]], full_matrices=False)
        encode = components[:LATENT_CHANNELS].T / components.shape[1] ** 0.5
        latents = (small_blocks - centre) @ encode
        features = torch.cat([latents, torch.ones(len(latents), 1)], 1)
        gram = features.T @ features + _RIDGE * torch.eye(LATENT_CHANNELS + 1)
        solution = torch.linalg.solve(gram, features.T @ large_blocks)
        std = latents.std(0)
        softened = std**_WHITENING
        return cls(
            encode=encode.contiguous(),
            centre=centre,
            decode=solution[:LATENT_CHANNELS].contiguous(),
            bias=solution[LATENT_CHANNELS].contiguous(),
            mean=latents.mean(0),
            std=softened * (std / softened).pow(2).mean().sqrt(),
        )

    @classmethod
    def load(cls, file: Path) -> Codec:
        """Read a codec."""
        return cls(**load_file(file))

    def save(self, file: Path) -> None:
        """Write the codec."""
        save_file(asdict(self), file)

    def latents(self, clips: Tensor) -> Tensor:
        """Encode clips, [N, 3, T, SMALL_SIDE, SMALL_SIDE] in -1 to 1, to normalised [N, channels, T, h, w]."""
        count, _, frames, height, width = clips.shape
        normalised = ((blocks(clips, SMALL_BLOCK) - self.centre) @ self.encode - self.mean) / self.std
        grid = normalised.view(count, frames, height // SMALL_BLOCK, width // SMALL_BLOCK, LATENT_CHANNELS)
        return grid.permute(0, 4, 1, 2, 3).contiguous()

    def raw(self, latents: Tensor) -> Tensor:
        """Latents as the VAE's decoder takes them: the pipeline undoes the normalisation before it decodes."""
        return latents * self.std.view(1, -1, 1, 1, 1) + self.mean.view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def vae(self, *, decoder_channels: int = _LINEAR_CHANNELS) -> Any:  # noqa: ANN401 - a diffusers class
        """The codec as an `AutoencoderKLWan`.

        The residual branches are off. What is left but for the convolutions, an RMS norm and a SiLU, is made linear by
        one huge constant channel: the norm then divides by a constant, and SiLU of something tiny is half of it.

        Args:
            decoder_channels: width of the decoder; another width than the encoder's leaves its weights untrained.
        """
        made = diffusers.AutoencoderKLWan(
            base_dim=_LINEAR_CHANNELS,
            decoder_base_dim=decoder_channels,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1],
            num_res_blocks=0,
            temperal_downsample=[],
            patch_size=BLOCK,
            in_channels=3 * BLOCK**2,
            out_channels=3 * BLOCK**2,
            scale_factor_spatial=BLOCK,
            scale_factor_temporal=1,
            latents_mean=[round(value, 6) for value in self.mean.tolist()],
            latents_std=[round(value, 6) for value in self.std.tolist()],
        )
        linear = [made.encoder, made.quant_conv, made.post_quant_conv]
        if decoder_channels == _LINEAR_CHANNELS:
            linear.append(made.decoder)
        for module in linear:
            for name, weight in module.named_parameters():
                if not name.endswith("gamma"):
                    weight.zero_()
        self._fill_encoder(made)
        if decoder_channels == _LINEAR_CHANNELS:
            self._fill_decoder(made.decoder)
        return made.eval()

    def _fill_encoder(self, vae: Any) -> None:  # noqa: ANN401
        # Average-pool a large block to a small one, then the components. Inside a block: colour, column, row.
        kernel = self.encode.T.view(LATENT_CHANNELS, 3, SMALL_BLOCK, SMALL_BLOCK)
        kernel = kernel.repeat_interleave(2, 2).repeat_interleave(2, 3).reshape(LATENT_CHANNELS, 3 * BLOCK**2) / 4
        vae.encoder.conv_in.weight[:LATENT_CHANNELS, :, 2, 1, 1] = kernel
        vae.encoder.conv_in.bias[:LATENT_CHANNELS] = -(self.centre @ self.encode)
        vae.encoder.conv_in.bias[_LINEAR_CHANNELS - 1] = _CONSTANT
        for channel in range(LATENT_CHANNELS):
            vae.encoder.conv_out.weight[channel, channel, 2, 1, 1] = _LINEAR_SCALE
            vae.quant_conv.weight[channel, channel, 0, 0, 0] = 1
            vae.post_quant_conv.weight[channel, channel, 0, 0, 0] = 1
        vae.quant_conv.bias[LATENT_CHANNELS:] = _MIN_LOG_VARIANCE

    def _fill_decoder(self, decoder: Any) -> None:  # noqa: ANN401
        for channel in range(LATENT_CHANNELS):
            decoder.conv_in.weight[channel, channel, 2, 1, 1] = 1
        decoder.conv_in.bias[_LINEAR_CHANNELS - 1] = _CONSTANT
        decoder.conv_out.weight[:, :LATENT_CHANNELS, 2, 1, 1] = self.decode.T * _LINEAR_SCALE
        decoder.conv_out.bias.copy_(self.bias)


_LINEAR_SCALE: Final = 2 * _CONSTANT / _LINEAR_CHANNELS**0.5


def halved(clips: Tensor) -> Tensor:
    """Clips at half the height and width."""
    return functional.avg_pool3d(clips, (1, 2, 2))


def blocks(clips: Tensor, size: int) -> Tensor:
    """Cut clips, [N, 3, T, H, W], into blocks, [all blocks, 3 * size ** 2], in the order that the VAE uses."""
    patches: Tensor = _wan_vae.patchify(clips, size)
    return patches.permute(0, 2, 3, 4, 1).reshape(-1, patches.shape[1])


def joined(patches: Tensor) -> Tensor:
    """What the VAE's decoder makes, [N, 3 * BLOCK ** 2, T, h, w], as clips [N, 3, T, H, W]."""
    clips: Tensor = _wan_vae.unpatchify(patches, BLOCK)
    return clips
