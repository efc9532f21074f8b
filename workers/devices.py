"""Which devices a GPU worker serves, found out without importing torch in the worker's own process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

AUTO: Final = "auto"
_DRIVER_FOLDER: Final = Path("/proc/driver/nvidia/gpus")
_PROBE_TIMEOUT_SECONDS: Final = 10


def resolve_devices(asked: Sequence[str], *, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Devices by the names torch gives them; `auto` is every visible CUDA device, else one CPU slot."""
    if tuple(asked) != (AUTO,):
        return tuple(asked)
    return tuple(f"cuda:{index}" for index in range(_visible_gpus(environment))) or ("cpu:0",)


def inference_threads(devices: Sequence[str], asked: int | None) -> int | None:
    """Threads of one inference process; None leaves torch's choice, which suits a process whose work is on a GPU.

    On CPU slots half of the cores are left to the other processes: torch's threads wait for each other spinning,
    and one more than there are free cores makes a step many times slower, not a little.
    """
    if asked is not None:
        return asked
    cpu_slots = sum(device.startswith("cpu") for device in devices)
    return max(1, (os.cpu_count() or 1) // 2 // cpu_slots) if cpu_slots else None


def _visible_gpus(environment: Mapping[str, str]) -> int:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As CUDA reads it: the list ends at the first entry that is no device, such as -1.
        entries = [entry.strip() for entry in visible.split(",")]
        ends = [n for n, entry in enumerate(entries) if not entry or entry.startswith("-")]
        return min(ends[0] if ends else len(entries), _present_gpus())
    return _present_gpus()


def _present_gpus() -> int:
    probe = shutil.which("nvidia-smi")
    if probe is not None:
        try:
            listed = subprocess.run(  # noqa: S603 - a fixed command
                [probe, "-L"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return len(list(_DRIVER_FOLDER.iterdir())) if _DRIVER_FOLDER.is_dir() else 0
