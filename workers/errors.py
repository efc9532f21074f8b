"""The root of what keeps a process from starting, or a command from working, as it is configured."""

from __future__ import annotations


class ConfigurationError(Exception):
    """Something outside the program has to change; the message says what, and never holds a secret."""
