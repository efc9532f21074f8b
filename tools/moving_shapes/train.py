"""Trains a `moving-shapes` pipeline from nothing.

    python -m tools.moving_shapes.train FOLDER

First the codec (closed form), then its decoder, then text encoder and transformer. Interrupted, the same command goes
on from the last checkpoint. The pipeline ends up in FOLDER/moving-shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools.moving_shapes import model
from tools.moving_shapes.clips import NAME, quiet
from tools.moving_shapes.codec import Codec
from tools.moving_shapes.decoder import DecoderLearner
from tools.moving_shapes.denoiser import DenoiserLearner
from tools.moving_shapes.loop import CheckpointMismatchError, OnStep, Plan, train

DECODER_STEPS: Final = 1_500
STEPS: Final = 8_000
DECODER_BATCH: Final = 8
BATCH: Final = 32
START_CLIPS: Final = 120

_SMOOTHING: Final = 0.98

out = Console(stderr=True)


def run(
    folder: Path,
    *,
    decoder: Plan,
    denoiser: Plan,
    on_decoder: OnStep,
    on_denoiser: OnStep,
    start_clips: int = START_CLIPS,
    layers: int = model.LAYERS,
) -> Path:
    """Train everything that is not trained yet.

    Args:
        folder: codec and checkpoints; made when missing.
        decoder: plan of the decoder.
        denoiser: plan of text encoder and transformer.
        on_decoder: called after each step of the decoder.
        on_denoiser: called after each step of the transformer.
        start_clips: clips that the codec and the decoder's first weights are computed from.
        layers: of the transformer.

    Returns:
        The pipeline folder.

    Raises:
        CheckpointMismatchError: the folder belongs to a run with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    codec = _codec(folder / "codec.safetensors", seed=denoiser.seed, clips=start_clips)
    sharpening = DecoderLearner(codec, seed=decoder.seed, start_clips=start_clips)
    train(sharpening, decoder, folder / "decoder.pt", on_decoder)
    denoising = DenoiserLearner(codec, seed=denoiser.seed, layers=layers)
    train(denoising, denoiser, folder / "denoiser.pt", on_denoiser)
    trained = model.pipeline(
        tokens=denoising.tokens,
        encoder=denoising.encoder.eval(),
        vae=sharpening.vae.eval(),
        denoiser=denoising.transformer.eval(),
    )
    place = folder / NAME
    trained.to(torch.float16).save_pretrained(place)
    for file in place.rglob("*"):
        # Weights are saved with mode 0600: another user could not load them.
        file.chmod(0o755 if file.is_dir() else 0o644)
    return place


def _codec(file: Path, *, seed: int, clips: int) -> Codec:
    if not file.is_file():
        draft = file.with_suffix(".part")
        Codec.fit(seed, clips=clips).save(draft)
        draft.replace(file)
    return Codec.load(file)


@contextmanager
def _bars(decoder_steps: int, steps: int) -> Iterator[tuple[OnStep, OnStep]]:
    """A progress bar for each part, with a running mean of its loss."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=out) as progress:

        def bar(name: str, total: int) -> OnStep:
            task = progress.add_task(name, total=total, loss=float("nan"))

            def on_step(done: int, loss: float) -> None:
                before = progress.tasks[task].fields["loss"]
                mean = loss if before != before else _SMOOTHING * before + (1 - _SMOOTHING) * loss  # noqa: PLR0124 - NaN
                progress.update(task, completed=done, loss=mean)

            return on_step

        yield bar("decoder", decoder_steps), bar("transformer", steps)


def main(
    folder: Annotated[Path, typer.Argument(help="Where codec, checkpoints and the pipeline go.")],
    *,
    decoder_steps: Annotated[int, typer.Option(min=1)] = DECODER_STEPS,
    steps: Annotated[int, typer.Option(min=1, help="Of text encoder and transformer.")] = STEPS,
    batch: Annotated[int, typer.Option(min=1, help="Clips to a step of the transformer.")] = BATCH,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of torch; one more process draws the clips.")] = 1,
) -> None:
    """Train from nothing, or go on where an interrupted run stopped."""
    quiet()
    torch.set_num_threads(threads)
    decoder = Plan(steps=decoder_steps, batch=DECODER_BATCH, seed=seed)
    denoiser = Plan(steps=steps, batch=batch, seed=seed)
    try:
        with _bars(decoder_steps, steps) as (on_decoder, on_denoiser):
            place = run(folder, decoder=decoder, denoiser=denoiser, on_decoder=on_decoder, on_denoiser=on_denoiser)
    except CheckpointMismatchError as error:
        out.print(f"[red]{error}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        out.print("stopped; the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None
    out.print(f"saved {place}")


if __name__ == "__main__":
    typer.run(main)
