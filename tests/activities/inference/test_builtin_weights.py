"""Weights that were changed since their release are refused.

That the inference process asks before it loads them is in `test_supervision.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from activities.inference.builtin_weights import WEIGHTS, DamagedWeightsError, verified_folder

MODEL = "moving-shapes"
TRANSFORMER = "moving-shapes/transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A copy of the released weights."""
    copy = tmp_path / "weights"
    shutil.copytree(WEIGHTS, copy)
    return copy


def flip_one_bit(file: Path) -> None:
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(body)


def test_the_weights_that_come_with_the_product_are_the_released_ones() -> None:
    assert verified_folder(WEIGHTS, MODEL) == WEIGHTS / MODEL


def test_a_model_without_weights_has_no_folder() -> None:
    assert verified_folder(WEIGHTS, "tiny-wan") is None


def test_hidden_files_of_a_desktop_do_no_harm(weights: Path) -> None:
    (weights / MODEL / ".DS_Store").touch()
    assert verified_folder(weights, MODEL) == weights / MODEL


def test_a_missing_a_changed_and_an_added_file_are_told_at_once(weights: Path) -> None:
    (weights / MODEL / "model_index.json").unlink()
    (weights / MODEL / "vae" / "other.safetensors").touch()
    flip_one_bit(weights / TRANSFORMER)
    with pytest.raises(DamagedWeightsError) as caught:
        verified_folder(weights, MODEL)
    assert str(caught.value) == (
        "the weights of moving-shapes are damaged, install them again: "
        "moving-shapes/model_index.json is missing; "
        "moving-shapes/vae/other.safetensors is not part of the release; "
        f"{TRANSFORMER} has another checksum than the release"
    )


def test_line_endings_changed_by_a_checkout_are_noticed(weights: Path) -> None:
    config = weights / MODEL / "vae" / "config.json"
    config.write_bytes(config.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(DamagedWeightsError, match=r"vae/config\.json has another checksum"):
        verified_folder(weights, MODEL)


def test_a_long_list_is_cut(weights: Path) -> None:
    shutil.rmtree(weights / MODEL)
    with pytest.raises(DamagedWeightsError, match=r"is missing; and 7 more$"):
        verified_folder(weights, MODEL)


@pytest.mark.parametrize("text", ["nonsense", "0123  moving-shapes/model_index.json"])
def test_a_damaged_manifest_is_told(weights: Path, text: str) -> None:
    (weights / f"{MODEL}.sha256").write_text(text)
    with pytest.raises(DamagedWeightsError, match=r"manifest moving-shapes\.sha256 is damaged"):
        verified_folder(weights, MODEL)


def test_weights_without_a_manifest_are_refused(weights: Path) -> None:
    (weights / f"{MODEL}.sha256").unlink()
    with pytest.raises(DamagedWeightsError, match="have no manifest"):
        verified_folder(weights, MODEL)
