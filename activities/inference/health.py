"""Health of the inference processes as plain data, read by the worker's health endpoint and the log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DeviceState(StrEnum):
    """State of one device's inference process."""

    STARTING = "STARTING"
    LOADING = "LOADING"
    """Loading a model, before the first task or for one."""
    READY = "READY"
    BUSY = "BUSY"
    SETUP_FAILED = "SETUP_FAILED"
    """The process cannot use the device; tried again, at most every 30 s."""
    RESTARTING = "RESTARTING"


class ModelState(StrEnum):
    """State of one model on one device."""

    NOT_LOADED = "NOT_LOADED"
    LOADING = "LOADING"
    READY = "READY"
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True)
class ModelHealth:
    """One model on one device."""

    name: str
    state: ModelState = ModelState.NOT_LOADED
    reason: str | None = None
    """Why it failed to load."""


@dataclass(frozen=True, kw_only=True)
class DeviceHealth:
    """One device."""

    device: str
    worker_id: str
    state: DeviceState
    reason: str | None
    """Why the setup failed, or why the process was last restarted."""
    pid: int | None
    leased: bool
    busy_seconds: float
    """Since the pool started, a running task not included."""
    tasks: int
    """Attempts ended since the pool started, whatever their outcome."""
    restarts: int
    models: tuple[ModelHealth, ...]
