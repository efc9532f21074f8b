"""What a process keeps of what it learnt: the newest so many."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remember(memory: OrderedDict[K, V], key: K, value: V, *, at_most: int) -> None:
    """Keep a value as the newest, and no more than `at_most`."""
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > at_most:
        memory.popitem(last=False)
