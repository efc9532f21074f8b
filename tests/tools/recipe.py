"""The training recipe of `moving-shapes` for its tests, in a few steps and with a way to interrupt it.

A module of its own because of what it imports: every process of a parallel run collects every test file, and torch
and diffusers take seconds.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from tools.moving_shapes import model
from tools.moving_shapes.clips import SHIPPED, Studio
from tools.moving_shapes.codec import Codec, halved, joined
from tools.moving_shapes.data import sample_clips
from tools.moving_shapes.denoiser import DenoiserLearner
from tools.moving_shapes.loop import CheckpointMismatchError, OnStep, Plan
from tools.moving_shapes.train import run

__all__ = [
    "SHIPPED",
    "CheckpointMismatchError",
    "Codec",
    "DenoiserLearner",
    "Studio",
    "halved",
    "joined",
    "model",
    "sample_clips",
    "torch",
]

PLAN = Plan(steps=2, batch=1, seed=1, checkpoint_every=1, workers=0)
"""Optimiser steps take most of the time: where bfloat16 is slow, a second for each layer and step."""


class StoppedError(Exception):
    """Stands for Ctrl-C."""


def trained(
    folder: Path, *, plan: Plan = PLAN, decoder_stops_after: int | None = None, denoiser_stops_after: int | None = None
) -> Path:
    """Train, or be interrupted after some steps."""

    def stop(limit: int | None) -> OnStep:
        def on_step(done: int, _loss: float) -> None:
            if done == limit:
                raise StoppedError

        return on_step

    return run(
        folder,
        decoder=plan,
        denoiser=plan,
        on_decoder=stop(decoder_stops_after),
        on_denoiser=stop(denoiser_stops_after),
        start_clips=12,
        layers=1,
    )


def weights(folder: Path) -> dict[str, bytes]:
    """All weights of a pipeline."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}


def shapes(file: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and type of each tensor in a file."""
    with safe_open(file, framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
