"""The inference process: the only one that imports torch and diffusers. One per device, started by `child.py`.

`python -m activities.inference.process FD PARENT_PID` serves the socket FD until its supervisor is gone. One thread
does everything in turn; a stop request is looked for after every denoising step and between the phases. The process
leaves SIGINT and SIGTERM to its supervisor, which may be draining, and dies with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from collections import OrderedDict
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from activities.inference.builtin_weights import DamagedWeightsError, verified_folder
from activities.inference.family import BUILTIN, Family, Pipeline, discover
from activities.inference.faults import Fault, ModelNotLoadableError, RefusedError, fault_of, load_reason
from activities.inference.health import ModelState
from activities.inference.messages import (
    Channel,
    Configure,
    Failed,
    Finished,
    Generate,
    Load,
    ModelChanged,
    PhaseStarted,
    Ready,
    SetupFailed,
    StepDone,
    Stop,
    Stopped,
    SupervisorGoneError,
)
from activities.inference.specs import ModelSpec
from workflows.failures import FailureCode
from workflows.tasks import GenerationParameters, Phase

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_PR_SET_PDEATHSIG: Final = 1


class StopRequestedError(BaseException):
    """Raised in the step callback. Not an `Exception`, so that no library on the way swallows it."""


class InferenceProcess:
    """The loaded pipelines and the job that runs on one of them."""

    def __init__(self, channel: Channel, configured: Configure) -> None:
        self._channel = channel
        self._device = configured.device
        self._weights = Path(configured.weights)
        self._cache = Path(configured.cache)
        self._max_loaded = configured.max_loaded_models
        self._families = discover()
        self._loaded: OrderedDict[ModelSpec, Pipeline] = OrderedDict()
        """Least recently used first."""

    def serve(self) -> None:
        """Answer messages.

        Raises:
            SupervisorGoneError: the channel is closed.
        """
        while True:
            match self._channel.receive():
                case Generate() as job:
                    self._run(job)
                case Load(spec=spec):
                    self._preload(spec)
                case _:
                    pass  # A stop that came when its job had ended.

    def _preload(self, spec: ModelSpec) -> None:
        with suppress(ModelNotLoadableError):  # `ModelChanged` has said so.
            self._pipeline(spec)

    def _run(self, job: Generate) -> None:
        try:
            fault = self._attempt(job)
            if fault is not None and fault.code is FailureCode.OUT_OF_MEMORY and self._unload_all_but(job.spec):
                # Another model held memory; whether this size fits is known only without it.
                fault = self._attempt(job)
        except StopRequestedError:
            self._free_hooks(job.spec)
            self._channel.send(Stopped(job=job.job))
            return
        if fault is None:
            self._channel.send(Finished(job=job.job))
            return
        self._free_hooks(job.spec)
        self._channel.send(
            Failed(job=job.job, code=fault.code, message=fault.message, trace=fault.trace, fatal=fault.fatal)
        )
        if fault.fatal:
            sys.exit(1)

    def _attempt(self, job: Generate) -> Fault | None:
        try:
            frames = self._frames(job)
            self._stop_if_asked(job)
            _save(frames, Path(job.frames))
        except SupervisorGoneError:
            raise
        except Exception as error:  # Whatever the libraries raise fails this job, not the process.
            return fault_of(error, job.parameters)
        return None

    def _frames(self, job: Generate) -> NDArray[np.uint8]:
        torch = import_module("torch")
        family = self._families[job.spec.family]
        self._channel.send(PhaseStarted(job=job.job, phase=Phase.LOAD))
        pipe = self._pipeline(job.spec)
        image = None if job.image is None else _fitted(Path(job.image), job.parameters)
        self._enter(job, Phase.ENCODE_PROMPT)
        with torch.no_grad():
            prompt = family.encode_prompt(pipe, job.parameters)
            self._enter(job, Phase.STEP)
            return _as_bytes(self._denoise(job, family, pipe, prompt, image), job.parameters)

    def _denoise(
        self, job: Generate, family: Family, pipe: Pipeline, prompt: dict[str, object], image: Image | None
    ) -> NDArray[np.float32]:
        def on_step(step: int, total: int) -> None:
            self._stop_if_asked(job)
            self._channel.send(StepDone(job=job.job, step=step, total_steps=total))
            if step == total:
                self._channel.send(PhaseStarted(job=job.job, phase=Phase.DECODE))

        return family.generate(pipe, job.parameters, prompt, image, on_step)

    def _enter(self, job: Generate, phase: Phase) -> None:
        self._stop_if_asked(job)
        self._channel.send(PhaseStarted(job=job.job, phase=phase))

    def _stop_if_asked(self, job: Generate) -> None:
        while self._channel.pending():
            match self._channel.receive():
                case Stop(job=job.job):
                    raise StopRequestedError
                case _:
                    pass  # A stop for an earlier job.

    def _pipeline(self, spec: ModelSpec) -> Pipeline:
        """The loaded pipeline of a model; the least recently used one makes room for it.

        Raises:
            ModelNotLoadableError: with the reason.
        """
        if spec in self._loaded:
            self._loaded.move_to_end(spec)
            return self._loaded[spec]
        self._channel.send(ModelChanged(name=spec.name, state=ModelState.LOADING))
        while len(self._loaded) >= self._max_loaded:
            self._unload(next(iter(self._loaded)))
        try:
            self._loaded[spec] = self._load(spec)
        except ModelNotLoadableError as error:
            self._channel.send(ModelChanged(name=spec.name, state=ModelState.FAILED, reason=str(error)))
            raise
        self._channel.send(ModelChanged(name=spec.name, state=ModelState.READY))
        return self._loaded[spec]

    def _load(self, spec: ModelSpec) -> Pipeline:
        folder = self._folder(spec)
        if not (folder / "model_index.json").is_file():
            raise ModelNotLoadableError(f"the folder of {spec.name!r} is not a pipeline folder: no model_index.json")
        dtype = spec.dtype
        if dtype == "auto":
            dtype = "float32" if self._device.startswith("cpu") else "bfloat16"
        try:
            return self._families[spec.family].load(folder, self._device, dtype)
        except Exception as error:
            raise ModelNotLoadableError(load_reason(error, folder)) from error

    def _folder(self, spec: ModelSpec) -> Path:
        if not spec.path.startswith(BUILTIN):
            return Path(spec.path)
        name = spec.path.removeprefix(BUILTIN)
        try:
            released = verified_folder(self._weights, name)
        except DamagedWeightsError as error:
            raise ModelNotLoadableError(str(error)) from error
        except OSError as error:
            raise ModelNotLoadableError(load_reason(error, self._weights)) from error
        if released is not None:
            return released
        tiny = import_module("activities.inference.tiny")
        try:
            folder: Path = tiny.build(name, self._cache)
        except (KeyError, OSError) as error:
            raise ModelNotLoadableError(load_reason(error, self._cache)) from error
        return folder

    def _unload_all_but(self, spec: ModelSpec) -> bool:
        others = [loaded for loaded in self._loaded if loaded != spec]
        for other in others:
            self._unload(other)
        return bool(others)

    def _unload(self, spec: ModelSpec) -> None:
        del self._loaded[spec]
        gc.collect()
        torch = import_module("torch")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._channel.send(ModelChanged(name=spec.name, state=ModelState.NOT_LOADED))

    def _free_hooks(self, spec: ModelSpec) -> None:
        """What the pipeline call does at its own end, which an error or a stop skips."""
        if spec in self._loaded:
            self._loaded[spec].maybe_free_model_hooks()


def _fitted(path: Path, parameters: GenerationParameters) -> Image:
    """The input image cropped to the clip's aspect ratio and scaled to its size.

    Raises:
        RefusedError: it is not an image.
    """
    pil, ops = import_module("PIL.Image"), import_module("PIL.ImageOps")
    try:
        with pil.open(path) as image:
            upright = ops.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, pil.DecompressionBombError) as error:
        raise RefusedError(FailureCode.VALIDATION_FAILED, "The input image cannot be decoded.") from error
    fitted: Image = ops.fit(upright, (parameters.width, parameters.height))
    return fitted


def _as_bytes(frames: NDArray[np.float32], parameters: GenerationParameters) -> NDArray[np.uint8]:
    """Check frames and scale them to 0..255.

    Raises:
        RefusedError: they are not finite, or not of the size asked for.
    """
    numpy = import_module("numpy")
    asked = (parameters.num_frames, parameters.height, parameters.width, 3)
    if frames.shape != asked:
        message = f"The pipeline made frames of shape {list(frames.shape)} instead of {list(asked)}."
        raise RefusedError(FailureCode.VALIDATION_FAILED, message)
    if not numpy.isfinite(frames).all():
        raise RefusedError(FailureCode.INVALID_OUTPUT, "Some values are not finite.")
    scaled: NDArray[np.uint8] = (frames.clip(0, 1) * 255).round().astype(numpy.uint8)
    return scaled


def _save(frames: NDArray[np.uint8], path: Path) -> None:
    with path.open("wb") as file:
        import_module("numpy").save(file, frames, allow_pickle=False)


def _set_up(configured: Configure) -> str:
    """Import what every job needs, make sure that the device can be used, and describe both."""
    # What the imports make stays: to look through all of it again and again costs a tenth of the start.
    gc.disable()
    torch = import_module("torch")
    if configured.threads is not None:
        torch.set_num_threads(configured.threads)
    torch.zeros(1, device=configured.device)  # Before the imports that take the longest.
    diffusers = import_module("diffusers")
    import_module("transformers").utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    _ = diffusers.DiffusionPipeline  # Imports the base of all pipelines now, not in the first task's time.
    gc.freeze()
    gc.enable()
    name = torch.cuda.get_device_name(configured.device) if configured.device.startswith("cuda") else "CPU"
    return f"{name}, torch {torch.__version__}, diffusers {diffusers.__version__}"


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # It died before the line above.


def main() -> None:
    """Serve the socket given on the command line."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with(parent)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        configured = channel.receive()
        if not isinstance(configured, Configure):
            sys.exit(2)
        try:
            description = _set_up(configured)
        except Exception as error:  # A missing package or a broken driver: said, not crashed with.
            channel.send(SetupFailed(reason=f"{type(error).__name__}: {error}"[:500]))
            sys.exit(1)
        channel.send(Ready(description=description))
        InferenceProcess(channel, configured).serve()
    except SupervisorGoneError:
        sys.exit(0)


if __name__ == "__main__":
    main()
