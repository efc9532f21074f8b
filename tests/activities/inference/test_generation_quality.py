"""What comes out of the pipelines: the right picture, the right shape, the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from activities.inference.catalogue import ModelKind
from activities.inference.health import ModelState
from activities.inference.run import InferenceError
from tests.inference_pools import TINY_MODELS, Studio
from workflows.failures import FailureCode


async def test_a_red_circle_moving_right_is_red_and_moves_right(studio: Studio) -> None:
    frames = (await studio.frames(studio.parameters("moving-shapes"))).astype(float)
    assert frames.shape == (16, 128, 128, 3)
    distance = np.abs(frames - np.array([12, 12, 16])).max(-1)
    shape = distance > 60
    core = distance > 0.6 * np.percentile(distance[shape], 90)
    red, green, blue = frames[core].mean(0)
    assert red > 150
    assert max(green, blue) < 110
    columns = np.arange(128)
    centre = [(mask.sum(0) * columns).sum() / mask.sum() for mask in shape]
    assert np.mean(centre[-5:]) - np.mean(centre[:5]) > 8


async def test_another_prompt_makes_another_picture(studio: Studio) -> None:
    frames = (await studio.frames(studio.parameters("moving-shapes", prompt="a blue square moving left"))).astype(float)
    distance = np.abs(frames - np.array([12, 12, 16])).max(-1)
    shape = distance > 60
    red, _, blue = frames[distance > 0.6 * np.percentile(distance[shape], 90)].mean(0)
    assert blue > red + 60
    centre = [(mask.sum(0) * np.arange(128)).sum() / mask.sum() for mask in shape]
    assert np.mean(centre[-5:]) - np.mean(centre[:5]) < -8


async def test_the_same_seed_makes_the_same_bytes_and_another_seed_does_not(studio: Studio) -> None:
    one = await studio.frames(studio.parameters("tiny-ltx"))
    again = await studio.frames(studio.parameters("tiny-ltx"))
    other = await studio.frames(studio.parameters("tiny-ltx", seed=8))
    assert one.tobytes() == again.tobytes()
    assert one.tobytes() != other.tobytes()


@pytest.mark.parametrize("model", TINY_MODELS)
async def test_every_family_makes_the_frames_that_were_asked_for(studio: Studio, model: str, tmp_path: Path) -> None:
    spec = studio.catalogue.get(model)
    image = None
    if spec.kind is ModelKind.IMAGE_TO_VIDEO:
        image = tmp_path / "in.png"
        Image.new("RGB", (50, 90), (200, 30, 30)).save(image)
    parameters = studio.parameters(model, width=96, height=64, num_frames=17, num_inference_steps=2)
    frames = await studio.frames(parameters, image=image)
    assert frames.shape == (17, 64, 96, 3)
    assert frames.dtype == np.uint8


@pytest.mark.parametrize("model", ["tiny-ltx-i2v", "tiny-wan-i2v"])
async def test_the_input_image_decides_the_clip(studio: Studio, model: str, tmp_path: Path) -> None:
    made = []
    for name, colour in (("red", (220, 20, 20)), ("blue", (20, 20, 220)), ("red-again", (220, 20, 20))):
        image = tmp_path / f"{name}.png"
        Image.new("RGB", (64, 64), colour).save(image)
        made.append((await studio.frames(studio.parameters(model, num_inference_steps=2), image=image)).tobytes())
    assert made[0] == made[2]
    assert made[0] != made[1]


async def test_guidance_off_needs_no_negative_prompt(studio: Studio) -> None:
    for model in ("tiny-wan", "tiny-ltx", "tiny-cogvideox"):
        frames = await studio.frames(studio.parameters(model, guidance_scale=1.0, num_inference_steps=2))
        assert frames.shape == (9, 64, 64, 3)


async def test_an_undecodable_input_image_is_refused(studio: Studio, tmp_path: Path) -> None:
    image = tmp_path / "in.png"
    image.write_bytes(b"not an image")
    with pytest.raises(InferenceError, match="cannot be decoded") as caught:
        await studio.frames(studio.parameters("tiny-ltx-i2v"), image=image)
    assert caught.value.code is FailureCode.VALIDATION_FAILED


async def test_frames_that_the_pipeline_rounded_are_refused(studio: Studio) -> None:
    with pytest.raises(InferenceError, match="instead of") as caught:
        await studio.frames(studio.parameters("tiny-wan", num_frames=10, num_inference_steps=1))
    assert caught.value.code is FailureCode.VALIDATION_FAILED


async def test_frames_that_are_not_finite_are_refused(studio: Studio) -> None:
    with pytest.raises(InferenceError, match="finite") as caught:
        await studio.frames(studio.parameters("tiny-wan", guidance_scale=1e39))
    assert caught.value.code is FailureCode.INVALID_OUTPUT


async def test_a_size_beyond_memory_is_told_only_after_other_models_made_room(studio: Studio) -> None:
    await studio.frames(studio.parameters("tiny-ltx", num_inference_steps=1))
    pid = studio.health().pid
    with pytest.raises(InferenceError) as caught:
        await studio.frames(studio.parameters("tiny-wan", width=2**20, height=2**20))
    assert caught.value.code is FailureCode.OUT_OF_MEMORY
    assert {model.name for model in studio.health().models if model.state is ModelState.READY} == {"tiny-wan"}
    # The process lives on.
    assert (await studio.frames(studio.parameters("tiny-wan", num_inference_steps=1))).shape == (9, 64, 64, 3)
    assert studio.health().pid == pid
