"""The words that a small model was trained on, as data: offered to clients, and the reason for a warning.

Models that take free text have no vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_WORD: Final = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class Topic:
    """Words of one kind, e.g. colours."""

    name: str
    """Plural noun, as a client shows it."""
    words: tuple[str, ...]
    """Words or phrases; the first of several with one meaning comes first."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a model understands. Everything else in a prompt is ignored by it."""

    topics: tuple[Topic, ...]
    fillers: frozenset[str]
    """Words that it has seen and that mean nothing by themselves."""

    def knows_any_of(self, prompt: str) -> bool:
        """Whether a prompt holds one word that decides what the clip shows."""
        return not self._meaningful().isdisjoint(words_of(prompt))

    def _meaningful(self) -> frozenset[str]:
        phrases = (phrase for topic in self.topics for phrase in topic.words)
        return frozenset(word for phrase in phrases for word in phrase.split()) - self.fillers


def words_of(text: str) -> Iterator[str]:
    """The words of a text, normalised as the tokenizers of our models do it."""
    return (match[0] for match in _WORD.finditer(unicodedata.normalize("NFKC", text).lower()))
