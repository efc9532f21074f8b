"""The parts of the pipeline, untrained: tokenizer, text encoder, transformer, scheduler.

All are ordinary classes of diffusers and transformers, so that the trained folder loads like any Wan model.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from activities.inference import moving_shapes as words

# `Any`, because these packages build their public names at run time and annotate little of what is used here.
diffusers: Any = import_module("diffusers")
transformers: Any = import_module("transformers")

LATENT_CHANNELS: Final = 8
TEXT_DIM: Final = 64
LAYERS: Final = 6
"""Of the transformer."""
MAX_TOKENS: Final = 512
"""`WanPipeline` pads every prompt to this length."""
PATCH: Final = (4, 2, 2)
"""Frames and latent pixels of one token: 16 frames of 128 x 128 are 64 tokens."""
SHIFT: Final = 3.0
"""Of the noise schedule at generation."""

_PAD, _END, _UNKNOWN = "<pad>", "</s>", "<unk>"


def vocabulary() -> list[str]:
    """Every word that a caption can hold, sorted."""
    tables = (words.SHAPES, words.COLOURS, words.BACKGROUNDS, words.SIZES, words.MOTIONS)
    phrases = (phrase for table in tables for same in table.values() for phrase in same)
    return sorted(words.FILLERS | {word for phrase in phrases for word in phrase.split()})


def tokenizer() -> Any:  # noqa: ANN401 - see `diffusers` above
    """One token for each word; what it does not know is one token for all."""
    tokens = {token: index for index, token in enumerate([_PAD, _END, _UNKNOWN, *vocabulary()])}
    made = Tokenizer(models.WordLevel(tokens, unk_token=_UNKNOWN))
    # The stubs call these properties read-only.
    parts: Any = made
    parts.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    parts.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation("removed")])
    parts.post_processor = processors.TemplateProcessing(single=f"$A {_END}", special_tokens=[(_END, tokens[_END])])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=_PAD, eos_token=_END, unk_token=_UNKNOWN, model_max_length=MAX_TOKENS
    )


def text_encoder(vocabulary_size: int) -> Any:  # noqa: ANN401
    """A UMT5 encoder with 0.09 M parameters."""
    return transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            vocab_size=vocabulary_size,
            d_model=TEXT_DIM,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=32,
        )
    )


def transformer(*, layers: int = LAYERS) -> Any:  # noqa: ANN401
    """A Wan transformer, 192 wide."""
    return diffusers.WanTransformer3DModel(
        patch_size=PATCH,
        num_attention_heads=4,
        attention_head_dim=48,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=128,
        ffn_dim=512,
        num_layers=layers,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )


def pipeline(*, tokens: Any, encoder: Any, vae: Any, denoiser: Any) -> Any:  # noqa: ANN401
    """The parts as one `WanPipeline`."""
    return diffusers.WanPipeline(
        tokenizer=tokens,
        text_encoder=encoder,
        vae=vae,
        transformer=denoiser,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )
