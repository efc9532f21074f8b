"""Failures are told apart by what can be done about them, and tell nothing private."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from activities.inference.faults import ModelNotLoadableError, fault_of, load_reason
from workflows.failures import MAX_MESSAGE_LENGTH, FailureCode
from workflows.tasks import GenerationParameters

PARAMETERS = GenerationParameters(
    model="tiny-wan",
    prompt="a Red circle near grandmother",
    negative_prompt="blurry",
    width=64,
    height=64,
    num_frames=9,
    fps=8.0,
    num_inference_steps=1,
    guidance_scale=1.0,
    seed=1,
)


def of_torch(name: str, *arguments: object) -> Exception:
    """An error of torch, which takes seconds to import: not when the tests are collected."""
    error: Exception = getattr(import_module("torch"), name)(*arguments)
    return error


@pytest.mark.parametrize(
    ("error", "code", "fatal"),
    [
        (lambda: of_torch("OutOfMemoryError", "CUDA out of memory. Tried 2 GiB"), FailureCode.OUT_OF_MEMORY, False),
        (MemoryError, FailureCode.OUT_OF_MEMORY, False),
        (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"), FailureCode.OUT_OF_MEMORY, False),
        (lambda: of_torch("AcceleratorError", "device-side assert triggered", 710), FailureCode.DRIVER_FAULT, True),
        (lambda: RuntimeError("CUDA error: an illegal memory access"), FailureCode.DRIVER_FAULT, True),
        (lambda: RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), FailureCode.DRIVER_FAULT, True),
        (lambda: RuntimeError("shape '[1, 4]' is invalid for input of size 3"), FailureCode.INFERENCE_FAILED, False),
        (lambda: ValueError("CUDA error in a text"), FailureCode.INFERENCE_FAILED, False),
        (lambda: ModelNotLoadableError("no folder"), FailureCode.MODEL_NOT_LOADABLE, False),
    ],
)
def test_every_kind_of_error_has_its_code(error: Callable[[], Exception], code: FailureCode, fatal: bool) -> None:
    fault = fault_of(error(), PARAMETERS)
    assert (fault.code, fault.fatal) == (code, fatal)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sizes of tensors must match: 64 and 48", "RuntimeError: sizes of tensors must match: 64 and 48"),
        ("cannot read /var/models/wan/vae/config.json now", "RuntimeError: cannot read <path> now"),
        ("`prompt` has to be str but is 'Grandmother'", "RuntimeError: (text withheld)"),
        ("truncated: BLURRY", "RuntimeError: (text withheld)"),
        ("first line\nsecond line with secrets", "RuntimeError: first line"),
        ("", "RuntimeError: "),
    ],
)
def test_a_message_tells_neither_prompt_nor_path(text: str, told: str) -> None:
    assert fault_of(RuntimeError(text), PARAMETERS).message == told


def test_a_message_is_cut() -> None:
    assert len(fault_of(RuntimeError("9" * 10_000), PARAMETERS).message) == MAX_MESSAGE_LENGTH


def test_a_load_reason_names_the_file_but_not_the_place() -> None:
    error = OSError("no file named model.safetensors found in directory /srv/private/wan.")
    assert load_reason(error, Path("/srv/private/wan")) == (
        "OSError: no file named model.safetensors found in directory <model folder>."
    )
