"""What a client is told about a prompt that is legal but will not show what it says."""

from __future__ import annotations

from activities.inference.catalogue import ModelSpec
from api.schemas import TaskWarning, WarningCode


def advice(spec: ModelSpec, prompt: str) -> list[TaskWarning]:
    """Warnings about a prompt for a model; none for a model that takes free text."""
    vocabulary = spec.vocabulary
    if vocabulary is None or vocabulary.knows_any_of(prompt):
        return []
    example = f', for example "{spec.examples[0]}"' if spec.examples else ""
    message = (
        f"Model {spec.name} knows none of these words and makes a clip of its own choice. "
        f"GET /api/v1/models lists the words that it knows{example}."
    )
    return [TaskWarning(code=WarningCode.PROMPT_OUTSIDE_VOCABULARY, message=message)]
