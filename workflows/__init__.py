"""Pure vocabulary and workflow code: the standard library and temporalio only, deterministic, sandboxed."""
