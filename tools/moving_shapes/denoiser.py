"""Trains text encoder and transformer by flow matching on the codec's latents.

What made it work is the noise level: most samples at high noise, where a prompt decides shape and motion. With few
samples above 0.9 the colours came out right and the shapes and motions did not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from diffusers.models.transformers import transformer_wan
from torch import Tensor
from torch.nn import init

from tools.moving_shapes import model
from tools.moving_shapes.codec import SMALL_SIDE, Codec
from tools.moving_shapes.data import sample_clips
from tools.moving_shapes.loop import Learner

Captioned = tuple[Tensor, list[str]]
"""Latents and captions."""

FRAMES: Final = 16
_LEARNING_RATE: Final = 3e-3
_LOWEST_RATE: Final = 0.02
_WARM_UP: Final = 40
_NOISE_MEAN: Final = 2.0
_NOISE_SPREAD: Final = 1.2
_EVEN_SHARE: Final = 0.15
"""Of the samples with a noise level drawn evenly from 0 to 1."""
_LEAST_NOISE: Final = 1e-3
_TIME_STEPS: Final = 1_000
_NO_CAPTION: Final = 0.1
"""Share without a caption: what classifier-free guidance is measured against."""
_STRANGE_WORD: Final = 0.1
"""Share of the rest with an unknown word, which is to change nothing."""
_HIDDEN: Final = -1e4


class DenoiserLearner(Learner[Captioned]):
    """Trains the denoiser for a codec."""

    average_over = 200

    def __init__(self, codec: Codec, *, seed: int, layers: int = model.LAYERS) -> None:
        self._codec = codec
        torch.manual_seed(seed)
        self.tokens = model.tokenizer()
        self.encoder = model.text_encoder(len(self.tokens)).float().train()
        self.transformer = model.transformer(layers=layers).float().train()
        init.zeros_(self.transformer.proj_out.weight)
        init.zeros_(self.transformer.proj_out.bias)
        self._attention = _PaddedAttention()
        named = dict(self.transformer.named_parameters())
        matrices = [weight for name, weight in named.items() if _is_matrix(weight) and name.startswith("blocks.")]
        chosen = {id(weight) for weight in matrices}
        rest = [weight for weight in [*named.values(), *self.encoder.parameters()] if id(weight) not in chosen]
        self.parameters = matrices + rest
        self.optimisers = [
            torch.optim.Muon(
                matrices,
                lr=_LEARNING_RATE,
                weight_decay=0.01,
                momentum=0.95,
                nesterov=True,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rest, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def learning_rate(self, step: int, steps: int) -> float:
        """A short warm-up, constant for half of the run, then down in a straight line."""
        done = step / steps
        decay = 1.0 if done < 0.5 else max(_LOWEST_RATE, (1 - done) / 0.5)  # noqa: PLR2004 - half of the run
        return _LEARNING_RATE * min(1, (step + 1) / _WARM_UP) * decay

    def draw(self, rng: random.Random, count: int) -> Captioned:
        """Clips as latents, their captions partly taken away or disturbed."""
        clips, captions = sample_clips(rng, count, frames=FRAMES, side=SMALL_SIDE)
        return self._codec.latents(clips), [_disturbed(rng, caption) for caption in captions]

    def loss(self, batch: Captioned, noise: torch.Generator) -> Tensor:
        """Squared error of the velocity."""
        latents, captions = batch
        level = _noise_levels(len(latents), noise)
        pure = torch.randn(latents.shape, generator=noise)
        share = level.view(-1, 1, 1, 1, 1)
        with self._trained_form(), torch.autocast("cpu", torch.bfloat16):
            velocity = self.transformer(
                hidden_states=(1 - share) * latents + share * pure,
                timestep=level * _TIME_STEPS,
                encoder_hidden_states=self._embedded(captions),
                return_dict=False,
            )[0]
        error: Tensor = (velocity.float() - (pure - latents)).pow(2).mean()
        return error

    def _embedded(self, captions: list[str]) -> Tensor:
        """Captions as [N, tokens + 1, dim]; the last token stands for the padding."""
        read = self.tokens(captions, padding=True, return_tensors="pt")
        mask = read.attention_mask
        hidden = self.encoder(read.input_ids, mask).last_hidden_state * mask[..., None]
        embedded = torch.cat([hidden, torch.zeros(len(captions), 1, hidden.shape[2])], 1)
        bias = torch.zeros(len(captions), embedded.shape[1])
        bias[:, :-1][mask == 0] = _HIDDEN
        bias[:, -1] = torch.log(model.MAX_TOKENS - mask.sum(1))
        self._attention.bias = bias[:, None, None]
        return embedded

    @contextmanager
    def _trained_form(self) -> Iterator[None]:
        """Attention as it is cheap in training; outside, the modules are as the pipeline uses them."""
        original, dispatch = [block.attn2.processor for block in self.transformer.blocks], "dispatch_attention_fn"
        original_dispatch = getattr(transformer_wan, dispatch)
        for block in self.transformer.blocks:
            block.attn2.set_processor(self._attention)
        # Fused attention on the CPU took 43 % of a step at these few tokens: 39 ms a clip, 24 with plain products.
        setattr(transformer_wan, dispatch, _plain_attention)
        try:
            yield
        finally:
            setattr(transformer_wan, dispatch, original_dispatch)
            for block, processor in zip(self.transformer.blocks, original, strict=True):
                block.attn2.set_processor(processor)


class _PaddedAttention:
    """Cross-attention to a caption that `WanPipeline` would pad.

    The pipeline pads embeddings with zeros to 512 tokens and masks none of them. All those tokens are equal, so here
    one stands for them: its logit gets the logarithm of their number, through `bias`.
    """

    bias: Tensor

    def __call__(
        self,
        attention: Any,  # noqa: ANN401 - a diffusers module
        x: Tensor,
        context: Tensor,
        _mask: Tensor | None = None,
        _rotary: Tensor | None = None,
    ) -> Tensor:
        query = attention.norm_q(attention.to_q(x)).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        key = attention.norm_k(attention.to_k(context)).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        value = attention.to_v(context).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        logits = (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5 + self.bias
        mixed = (logits.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        attended: Tensor = attention.to_out[0](mixed)
        return attended


def _is_matrix(weight: Tensor) -> bool:
    return weight.ndim == 2  # noqa: PLR2004


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, **_unused: object) -> Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
    mixed: Tensor = weights.to(value.dtype) @ value
    return mixed.transpose(1, 2)


def _noise_levels(count: int, noise: torch.Generator) -> Tensor:
    high = torch.sigmoid(torch.randn(count, generator=noise) * _NOISE_SPREAD + _NOISE_MEAN)
    even = torch.rand(count, generator=noise)
    return torch.where(torch.rand(count, generator=noise) < _EVEN_SHARE, even, high).clamp(_LEAST_NOISE, 1)


def _disturbed(rng: random.Random, caption: str) -> str:
    if rng.random() < _NO_CAPTION:
        return ""
    if rng.random() < _STRANGE_WORD:
        words = caption.split()
        words.insert(rng.randrange(len(words) + 1), "zzz")
        return " ".join(words)
    return caption
