from __future__ import annotations

from importlib.util import cache_from_source
from pathlib import Path

from workers.registry import keep_workflows_compiled
from workflows import generation


def test_the_sandbox_finds_each_workflow_module_compiled() -> None:
    bytecode = Path(cache_from_source(generation.__file__))
    bytecode.unlink(missing_ok=True)
    assert keep_workflows_compiled()
    # Bytes 8 to 12 of a bytecode file are the time of the source that it was made from.
    compiled_at = int.from_bytes(bytecode.read_bytes()[8:12], "little")
    assert compiled_at == int(Path(generation.__file__).stat().st_mtime)
