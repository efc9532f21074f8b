"""Devices of a GPU worker, found without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.devices import inference_threads, resolve_devices


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver lists two GPUs, one of them with a MIG slice."""
    probe = tmp_path / "nvidia-smi"
    listed = ("GPU 0: H200 (UUID: GPU-1)", "  MIG 1g.18gb (UUID: MIG-1)", "GPU 1: H200 (UUID: GPU-2)")
    probe.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in listed))
    probe.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_devices_that_are_named_are_taken_as_they_are() -> None:
    assert resolve_devices(("cuda:1", "cpu:0"), environment={}) == ("cuda:1", "cpu:0")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("cuda:0", "cuda:1")),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("cuda:0",)),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ("cuda:0", "cuda:1")),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ("cuda:0",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("cpu:0",)),
    ],
)
def test_auto_takes_every_visible_gpu_under_the_names_torch_gives_them(
    environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert resolve_devices(("auto",), environment=environment) == expected


def test_auto_is_one_cpu_slot_where_the_driver_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = tmp_path / "nvidia-smi"
    probe.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    probe.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert resolve_devices(("auto",), environment={}) == ("cpu:0",)


@pytest.mark.parametrize(
    ("cores", "devices", "asked", "expected"),
    [
        (2, ("cpu:0",), None, 1),
        (16, ("cpu:0",), None, 8),
        (16, ("cpu:0", "cpu:1"), None, 4),
        (1, ("cpu:0",), None, 1),
        (16, ("cuda:0",), None, None),
        (2, ("cpu:0",), 2, 2),
    ],
)
def test_cpu_slots_leave_half_of_the_cores_to_the_other_processes(
    monkeypatch: pytest.MonkeyPatch, cores: int, devices: tuple[str, ...], asked: int | None, expected: int | None
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert inference_threads(devices, asked) == expected
