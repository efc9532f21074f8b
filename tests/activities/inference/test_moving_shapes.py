"""The words that the model that comes with the product knows."""

from __future__ import annotations

import json

import pytest

from activities.inference.builtin_weights import WEIGHTS
from activities.inference.moving_shapes import EXAMPLES, FILLERS, VOCABULARY


def test_the_vocabulary_is_that_of_the_shipped_tokenizer() -> None:
    tokenizer = json.loads((WEIGHTS / "moving-shapes" / "tokenizer" / "tokenizer.json").read_text())
    known = {word for word in tokenizer["model"]["vocab"] if not word.startswith("<")}
    offered = {word for topic in VOCABULARY.topics for phrase in topic.words for word in phrase.split()}
    assert offered | FILLERS == known
    assert all(set(prompt.split()) <= known for prompt in EXAMPLES)


@pytest.mark.parametrize(
    ("prompt", "known"),
    [
        ("a red circle moving right", True),
        ("A CAT, rising.", True),
        ("\uff52\uff45\uff44", True),
        ("a cat on the background", False),
        ("reddish", False),
        ("一只🦊在跑", False),
    ],
)
def test_one_known_word_is_enough_and_fillers_are_none(prompt: str, known: bool) -> None:
    assert VOCABULARY.knows_any_of(prompt) is known
