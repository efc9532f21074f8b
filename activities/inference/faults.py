"""What goes wrong inside the inference process, as failure codes and messages that are safe to show.

A message never carries a prompt or a path. Library errors may quote either, so paths are cut out, and a text that
shares a longer word with the prompt is withheld; the stack, which names only places in code, goes to the log.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from workflows.failures import MAX_MESSAGE_LENGTH, FailureCode
from workflows.tasks import GenerationParameters

_PATH: Final = re.compile(r"(?:[A-Za-z]:\\|~?/)[^\s'\":,;)]*")
_WORD: Final = re.compile(r"\w{4,}")
_CPU_ALLOCATOR: Final = "can't allocate memory"
_DRIVER_WORDS: Final = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL error", "HIP error")


class ModelNotLoadableError(Exception):
    """A model could not be loaded; the message says why and is safe to show."""


class RefusedError(Exception):
    """The input or the frames cannot be used; the message is safe to show."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure, cut loose from the exception, whose frames would keep tensors alive."""

    code: FailureCode
    message: str
    trace: str
    fatal: bool = False
    """The device's context is poisoned: nothing can run in this process any more."""


def fault_of(error: Exception, parameters: GenerationParameters) -> Fault:
    """Classify what a job raised."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    match error:
        case ModelNotLoadableError():
            return Fault(code=FailureCode.MODEL_NOT_LOADABLE, message=str(error), trace=trace)
        case RefusedError():
            return Fault(code=error.code, message=str(error), trace=trace)
    message = f"{type(error).__name__}: {_safe_text(error, parameters)}"[:MAX_MESSAGE_LENGTH]
    if _is_out_of_memory(error):
        return Fault(code=FailureCode.OUT_OF_MEMORY, message=message, trace=trace)
    if _is_driver_fault(error):
        return Fault(code=FailureCode.DRIVER_FAULT, message=message, trace=trace, fatal=True)
    return Fault(code=FailureCode.INFERENCE_FAILED, message=message, trace=trace)


def load_reason(error: Exception, folder: Path) -> str:
    """Why a model could not be loaded, without the place where it should lie."""
    text = _first_line(error).replace(str(folder), "<model folder>")
    return f"{type(error).__name__}: {_PATH.sub('<path>', text)}"[:MAX_MESSAGE_LENGTH]


def _is_out_of_memory(error: Exception) -> bool:
    torch = import_module("torch")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_ALLOCATOR in str(error)


def _is_driver_fault(error: Exception) -> bool:
    torch = import_module("torch")
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _DRIVER_WORDS)


def _safe_text(error: Exception, parameters: GenerationParameters) -> str:
    text = _PATH.sub("<path>", _first_line(error))
    private = set(_WORD.findall(f"{parameters.prompt} {parameters.negative_prompt}".lower()))
    if private & set(_WORD.findall(text.lower())):
        return "(text withheld)"
    return text


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
