from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path

import workflows
from workers.registry import WORKFLOWS, keep_workflows_compiled
from workflows import generation


def test_the_sandbox_finds_each_workflow_module_compiled() -> None:
    bytecode = Path(cache_from_source(generation.__file__))
    bytecode.unlink(missing_ok=True)
    assert keep_workflows_compiled()
    # Bytes 8 to 12 of a bytecode file are the time of the source that it was made from.
    compiled_at = int.from_bytes(bytecode.read_bytes()[8:12], "little")
    assert compiled_at == int(Path(generation.__file__).stat().st_mtime)


def test_every_workflow_there_is_is_registered() -> None:
    modules = (import_module(f"workflows.{module.name}") for module in pkgutil.iter_modules(workflows.__path__))
    defined = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and "__temporal_workflow_definition" in vars(value)
    }
    assert defined == set(WORKFLOWS)
