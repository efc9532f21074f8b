"""Tiny pipelines with random weights, built on the spot: real diffusers code paths in milliseconds, for development.

They make noise, never a clip worth showing. Each is saved as an ordinary pipeline folder, so everything after
the build is the same as for a full-size model. Imported only inside the inference process.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

# `Any`, because these packages build their public names at run time and annotate little of what is used here.
diffusers: Any = import_module("diffusers")
transformers: Any = import_module("transformers")

RECIPE: Final = "1"
"""Part of the folder name; raised when a recipe below changes, so that an old cache is not used."""

_PAD: Final = "<pad>"
_END: Final = "</s>"
_UNKNOWN: Final = "<unk>"
_WORDS: Final = (
    *(_PAD, _END, _UNKNOWN),
    *("a", "the", "red", "green", "blue", "circle", "square", "ring", "moving", "right", "left", "up", "down"),
)
_TEXT_DIM: Final = 32
_TEXT_ENCODER: Final = {
    "vocab_size": len(_WORDS),
    "d_model": _TEXT_DIM,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_WAN_VAE: Final = {
    "base_dim": 3,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
_WAN_TRANSFORMER: Final = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "out_channels": 4,
    "text_dim": _TEXT_DIM,
    "freq_dim": 64,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "rope_max_seq_len": 32,
}


def build(name: str, cache: Path) -> Path:
    """Return the folder of a tiny pipeline, building it under `cache` when it is not there yet.

    Safe against another process building the same one: the finished folder appears in one rename.

    Raises:
        KeyError: there is no tiny pipeline of this name.
    """
    recipe = BUILDERS[name]
    folder = cache / f"{name}-{RECIPE}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cache))
    try:
        torch.manual_seed(0)
        recipe().save_pretrained(draft)
        _make_readable(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _make_readable(folder: Path) -> None:
    """Weights are saved with mode 0600 and temporary folders with 0700: another user could not load them."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _tokenizer(max_length: int) -> Any:  # noqa: ANN401 - see `transformers` above
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {_END}", special_tokens=[(_END, 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, unk_token=_UNKNOWN, model_max_length=max_length
    )


def _umt5() -> Any:  # noqa: ANN401
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_TEXT_ENCODER, relative_attention_num_buckets=8))


def _t5() -> Any:  # noqa: ANN401
    return transformers.T5EncoderModel(transformers.T5Config(**_TEXT_ENCODER))


def _wan() -> Any:  # noqa: ANN401
    return diffusers.WanPipeline(
        tokenizer=_tokenizer(512),
        text_encoder=_umt5(),
        vae=diffusers.AutoencoderKLWan(**_WAN_VAE),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=diffusers.WanTransformer3DModel(**_WAN_TRANSFORMER, in_channels=4),
    )


def _wan_i2v() -> Any:  # noqa: ANN401
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    return diffusers.WanImageToVideoPipeline(
        tokenizer=_tokenizer(512),
        text_encoder=_umt5(),
        image_processor=transformers.CLIPImageProcessor(crop_size=32, size=32),
        image_encoder=transformers.CLIPVisionModel(vision),
        vae=diffusers.AutoencoderKLWan(**_WAN_VAE),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        # Latents, four mask channels and the latents of the image.
        transformer=diffusers.WanTransformer3DModel(**_WAN_TRANSFORMER, in_channels=12, image_dim=16),
    )


def _ltx() -> Any:  # noqa: ANN401
    return diffusers.LTXPipeline(
        tokenizer=_tokenizer(128),
        text_encoder=_t5(),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=1,
            caption_channels=_TEXT_DIM,
        ),
    )


def _cogvideox() -> Any:  # noqa: ANN401
    return diffusers.CogVideoXPipeline(
        tokenizer=_tokenizer(226),
        text_encoder=_t5(),
        vae=diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
        transformer=diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=2,
            text_embed_dim=_TEXT_DIM,
            num_layers=1,
            sample_width=8,
            sample_height=8,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=226,
        ),
    )


BUILDERS: Final[Mapping[str, Callable[[], Any]]] = MappingProxyType(
    {
        "tiny-wan": _wan,
        "tiny-wan-i2v": _wan_i2v,
        "tiny-ltx": _ltx,
        # The same components serve both LTX pipelines.
        "tiny-ltx-i2v": _ltx,
        "tiny-cogvideox": _cogvideox,
    }
)
