"""The training recipe of `moving-shapes`: it builds what is shipped, and goes on where it was interrupted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tools.moving_shapes import model
from tools.moving_shapes.clips import SHIPPED, Studio
from tools.moving_shapes.codec import Codec, halved, joined
from tools.moving_shapes.data import sample_clips
from tools.moving_shapes.denoiser import DenoiserLearner
from tools.moving_shapes.loop import CheckpointMismatchError, OnStep, Plan
from tools.moving_shapes.train import run


class StoppedError(Exception):
    """Stands for Ctrl-C."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


pytestmark = pytest.mark.timeout(300)
"""Imports and the optimiser take most of the time: where bfloat16 is slow, a second for each layer and step."""

PLAN = Plan(steps=3, batch=2, seed=1, checkpoint_every=1, workers=0)


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
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline of a run that nobody interrupted."""
    torch.set_num_threads(1)
    return trained(tmp_path_factory.mktemp("straight"))


def test_an_interrupted_run_ends_with_the_same_weights(straight: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        trained(tmp_path, decoder_stops_after=2)
    with pytest.raises(StoppedError):
        trained(tmp_path, denoiser_stops_after=1)
    again = trained(tmp_path)
    assert len(weights(again)) == 3
    assert weights(again) == weights(straight)


def test_a_trained_folder_is_a_pipeline_like_the_one_that_is_shipped(straight: Path) -> None:
    for part in ("vae", "text_encoder"):
        [made], [shipped] = straight.glob(f"{part}/*.safetensors"), SHIPPED.glob(f"{part}/*.safetensors")
        assert shapes(made) == shapes(shipped), part
    [shipped] = SHIPPED.glob("transformer/*.safetensors")
    full = model.transformer().state_dict()
    assert {name: list(weight.shape) for name, weight in full.items()} == {
        name: shape for name, (shape, _) in shapes(shipped).items()
    }
    assert json.loads((straight / "model_index.json").read_text()) == json.loads(
        (SHIPPED / "model_index.json").read_text()
    )
    assert (straight / "tokenizer" / "tokenizer.json").read_bytes() == (
        SHIPPED / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    clip = Studio.open(straight).clip("a red circle moving right", seed=1)
    assert clip.shape == (16, 128, 128, 3)


def shapes(file: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(file, framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def test_a_folder_is_not_continued_with_other_settings(straight: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="'steps': 3"):
        trained(straight.parent, plan=replace(PLAN, steps=4))


def test_the_codec_is_the_same_in_closed_form_and_as_a_vae() -> None:
    codec = Codec.fit(2, clips=12)
    # The VAE's encoder takes one frame and then four at a time.
    clips, _ = sample_clips(random.Random(3), 2, frames=5, side=128)
    vae = codec.vae()
    with torch.no_grad():
        latents = vae.encode(clips).latent_dist.mode()
        assert latents.shape == (2, 8, 5, 8, 8)
        error = (latents - codec.raw(codec.latents(halved(clips)))).abs().amax((0, 2, 3, 4))
        assert (error < 0.01 * codec.std).all()
        restored = vae.decode(latents, return_dict=False)[0]
        blocks = torch.einsum("nzthw,zp->npthw", latents, codec.decode) + codec.bias.view(1, -1, 1, 1, 1)
    assert restored.shape == clips.shape
    assert torch.allclose(restored, joined(blocks).clamp(-1, 1), atol=2e-2)
    assert (restored - clips).pow(2).mean() < 0.1 * clips.var()


def test_captions_act_in_training_as_the_pipeline_pads_them() -> None:
    learner = DenoiserLearner(Codec.fit(4, clips=12), seed=4)
    torch.nn.init.normal_(learner.transformer.proj_out.weight)
    captions = ["a red circle moving right", "a small zzz star rising on a navy background", ""]
    noise = torch.randn(3, 8, 16, 8, 8, generator=torch.Generator().manual_seed(5))
    asked = {"hidden_states": noise, "timestep": torch.full((3,), 700.0), "return_dict": False}
    read = learner.tokens(captions, padding="max_length", max_length=512, return_tensors="pt")
    with torch.no_grad():
        padded = learner.encoder(read.input_ids, read.attention_mask).last_hidden_state * read.attention_mask[..., None]
        generated = learner.transformer(encoder_hidden_states=padded, **asked)[0]
        embedded = learner._embedded(captions)
        with learner._trained_form():
            trained_on = learner.transformer(encoder_hidden_states=embedded, **asked)[0]
        again = learner.transformer(encoder_hidden_states=padded, **asked)[0]
    assert generated.std() > 0.1
    assert torch.allclose(trained_on, generated, atol=1e-3 * float(generated.std()))
    assert torch.equal(again, generated)
