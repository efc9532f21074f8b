"""The training recipe of `moving-shapes`: it builds what is shipped, and goes on where it was interrupted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(300)
"""Imports and the optimiser take most of the time."""


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    """Imported by the first test that runs, not when the tests are collected; computes in one thread."""
    module = import_module("tests.tools.recipe")
    before = module.torch.get_num_threads()
    module.torch.set_num_threads(1)
    yield module
    module.torch.set_num_threads(before)


@pytest.fixture(scope="module")
def straight(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline of a run that nobody interrupted."""
    place: Path = recipe.trained(tmp_path_factory.mktemp("straight"))
    return place


def test_an_interrupted_run_ends_with_the_same_weights(recipe: ModuleType, straight: Path, tmp_path: Path) -> None:
    with pytest.raises(recipe.StoppedError):
        recipe.trained(tmp_path, decoder_stops_after=1)
    with pytest.raises(recipe.StoppedError):
        recipe.trained(tmp_path, denoiser_stops_after=1)
    again = recipe.trained(tmp_path)
    assert len(recipe.weights(again)) == 3
    assert recipe.weights(again) == recipe.weights(straight)


def test_a_trained_folder_is_a_pipeline_like_the_one_that_is_shipped(recipe: ModuleType, straight: Path) -> None:
    shapes, shipped_folder = recipe.shapes, recipe.SHIPPED
    for part in ("vae", "text_encoder"):
        [made], [shipped] = straight.glob(f"{part}/*.safetensors"), shipped_folder.glob(f"{part}/*.safetensors")
        assert shapes(made) == shapes(shipped), part
    [shipped] = shipped_folder.glob("transformer/*.safetensors")
    full = recipe.model.transformer().state_dict()
    assert {name: list(weight.shape) for name, weight in full.items()} == {
        name: shape for name, (shape, _) in shapes(shipped).items()
    }
    assert json.loads((straight / "model_index.json").read_text()) == json.loads(
        (shipped_folder / "model_index.json").read_text()
    )
    assert (straight / "tokenizer" / "tokenizer.json").read_bytes() == (
        shipped_folder / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    clip = recipe.Studio.open(straight).clip("a red circle moving right", seed=1)
    assert clip.shape == (16, 128, 128, 3)


def test_a_folder_is_not_continued_with_other_settings(recipe: ModuleType, straight: Path) -> None:
    with pytest.raises(recipe.CheckpointMismatchError, match="'steps': 2"):
        recipe.trained(straight.parent, plan=replace(recipe.PLAN, steps=4))


def test_the_codec_is_the_same_in_closed_form_and_as_a_vae(recipe: ModuleType) -> None:
    torch, codec = recipe.torch, recipe.Codec.fit(2, clips=12)
    # The VAE's encoder takes one frame and then four at a time.
    clips, _ = recipe.sample_clips(random.Random(3), 2, frames=5, side=128)
    vae = codec.vae()
    with torch.no_grad():
        latents = vae.encode(clips).latent_dist.mode()
        assert latents.shape == (2, 8, 5, 8, 8)
        error = (latents - codec.raw(codec.latents(recipe.halved(clips)))).abs().amax((0, 2, 3, 4))
        assert (error < 0.01 * codec.std).all()
        restored = vae.decode(latents, return_dict=False)[0]
        blocks = torch.einsum("nzthw,zp->npthw", latents, codec.decode) + codec.bias.view(1, -1, 1, 1, 1)
    assert restored.shape == clips.shape
    assert torch.allclose(restored, recipe.joined(blocks).clamp(-1, 1), atol=2e-2)
    assert (restored - clips).pow(2).mean() < 0.1 * clips.var()


def test_captions_act_in_training_as_the_pipeline_pads_them(recipe: ModuleType) -> None:
    torch, learner = recipe.torch, recipe.DenoiserLearner(recipe.Codec.fit(4, clips=12), seed=4)
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
