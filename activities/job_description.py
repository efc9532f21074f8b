"""What the Temporal Web UI shows of a job. Like the input, these texts are encrypted on their way."""

from __future__ import annotations

from typing import Final

from workflows.tasks import GenerationInput

_SUMMARY_BYTES: Final = 200
"""The server takes 400; encryption adds to it."""
_DETAILS_CHARACTERS: Final = 4_000


def summary(request: GenerationInput) -> str:
    """One line, for lists."""
    p = request.parameters
    line = f"{p.model} {p.width}x{p.height} {p.num_frames} frames, {request.priority}: {p.prompt}"
    return " ".join(line.split()).encode("utf-8")[:_SUMMARY_BYTES].decode("utf-8", errors="ignore")


def details(request: GenerationInput) -> str:
    """Markdown, for the page of the job."""
    p = request.parameters
    rows = {
        "prompt": p.prompt,
        "negative prompt": p.negative_prompt,
        "model": f"{p.model}@{request.model_revision} (pool {request.pool})",
        "size": f"{p.width}x{p.height}, {p.num_frames} frames at {p.fps:g} fps",
        "steps, guidance, seed": f"{p.num_inference_steps}, {p.guidance_scale:g}, {p.seed}",
        "input image": p.image_sha256 or "",
        "labels": ", ".join(request.labels),
        "retry of": request.retry_of or "",
        "callback": "yes" if request.callback else "",
    }
    return "\n".join(f"- **{name}**: {' '.join(text.split())}" for name, text in rows.items() if text)[
        :_DETAILS_CHARACTERS
    ]
