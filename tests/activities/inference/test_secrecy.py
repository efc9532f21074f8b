"""The inference process keeps to itself what libraries like to print, and is given no secret of the worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.inference.catalogue import Catalogue
from activities.inference.device import ProcessOptions
from activities.inference.pool import InferencePool
from tests.inference_pools import Studio

SECRETS = ("REELGATE_CODEC_KEYS", "TEMPORAL_API_KEY", "AWS_SECRET_ACCESS_KEY")


def environment_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


async def test_a_prompt_that_is_cut_is_not_printed_and_no_secret_is_inherited(
    catalogue: Catalogue,
    model_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "marked-secret")
    monkeypatch.setenv("DIFFUSERS_VERBOSITY", "info")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    options = ProcessOptions(cache=model_cache, max_loaded_models=1, threads=1)
    async with InferencePool(devices=["cpu"], options=options, models=list(catalogue), host="quiet") as pool:
        studio = Studio(pool, catalogue, tmp_path)
        given = environment_of((await studio.until_ready()).pid)
        assert "PATH=" in given
        assert "marked-secret" not in given
        for model in ("tiny-ltx", "tiny-cogvideox"):
            prompt = "a red circle moving right " * 100 + "whispered wish"
            await studio.frames(studio.parameters(model, prompt=prompt, num_inference_steps=1))
        await studio.returns[-1]
    written = "".join(capfd.readouterr())
    assert "circle" not in written
    assert "whispered" not in written
