"""The training loop: seeded, resumable, with averaged weights.

Whatever a step draws, its clips as well as its noise, comes from the seed and the number of the step. So a run that
was interrupted goes on from its checkpoint as if it had not been, and no state of a random generator is stored.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = TypeVar("Batch")

OnStep = Callable[[int, float], None]
"""Called after each step with the steps done and the loss."""

_STRIDE: Final = 1_000_003


class CheckpointMismatchError(Exception):
    """The checkpoint in the folder belongs to a run with other settings."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train on what."""

    steps: int
    batch: int
    """Clips to a step."""
    seed: int = 0
    checkpoint_every: int = 100
    """Steps."""
    workers: int = 1
    """Processes that draw clips; 0 draws them in this one."""

    def settings(self) -> dict[str, int]:
        """What must not change between the parts of one run."""
        return {name: value for name, value in asdict(self).items() if name in {"steps", "batch", "seed"}}


class Learner(ABC, Generic[Batch]):
    """What is trained."""

    parameters: list[torch.nn.Parameter]
    optimisers: list[torch.optim.Optimizer]
    average_over: int
    """Steps over which the weights are averaged at most, roughly."""

    @abstractmethod
    def learning_rate(self, step: int, steps: int) -> float:
        """Of step `step`, from 0, of `steps`."""

    @abstractmethod
    def draw(self, rng: random.Random, count: int) -> Batch:
        """Draw the data of one step. May run in another process."""

    @abstractmethod
    def loss(self, batch: Batch, noise: torch.Generator) -> Tensor:
        """The loss of one step; everything random comes from `noise`."""


class _Batches(Dataset[Batch]):
    """The data of a run by the number of the step."""

    def __init__(self, learner: Learner[Batch], plan: Plan) -> None:
        self._draw = learner.draw
        self._plan = plan

    def __len__(self) -> int:
        return self._plan.steps

    def __getitem__(self, step: int) -> Batch:
        return self._draw(random.Random(_seed(self._plan, step)), self._plan.batch)


def train(learner: Learner[Batch], plan: Plan, checkpoint: Path, on_step: OnStep) -> None:
    """Train to the end of the plan, from the checkpoint if there is one, and leave the averaged weights in place.

    Raises:
        CheckpointMismatchError: the checkpoint belongs to another run.
    """
    average = [parameter.detach().clone() for parameter in learner.parameters]
    done = _resume(learner, average, plan, checkpoint)
    if done:
        on_step(done, float("nan"))
    for step, batch in enumerate(_batches(learner, plan, first=done), start=done):
        for optimiser in learner.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learner.learning_rate(step, plan.steps)
            optimiser.zero_grad()
        loss = learner.loss(batch, torch.Generator().manual_seed(_seed(plan, step)))
        loss.backward()  # type: ignore[no-untyped-call] # torch annotates it not
        torch.nn.utils.clip_grad_norm_(learner.parameters, 1.0)
        for optimiser in learner.optimisers:
            optimiser.step()
        with torch.no_grad():
            keep = min(1 - 1 / learner.average_over, (step + 1) / (step + 1 + learner.average_over / 10))
            torch._foreach_lerp_(average, [parameter.detach() for parameter in learner.parameters], 1 - keep)
        if (step + 1) % plan.checkpoint_every == 0 or step + 1 == plan.steps:
            _save(learner, average, plan, checkpoint, done=step + 1)
        on_step(step + 1, loss.item())
    with torch.no_grad():
        for parameter, averaged in zip(learner.parameters, average, strict=True):
            parameter.copy_(averaged)


def _seed(plan: Plan, step: int) -> int:
    return plan.seed * _STRIDE + step


def _batches(learner: Learner[Batch], plan: Plan, *, first: int) -> Iterator[Batch]:
    return iter(
        DataLoader(
            _Batches(learner, plan),
            batch_size=None,
            sampler=range(first, plan.steps),
            num_workers=plan.workers,
            prefetch_factor=4 if plan.workers else None,
            collate_fn=lambda drawn: drawn,
        )
    )


def _save(learner: Learner[Any], average: list[Tensor], plan: Plan, checkpoint: Path, *, done: int) -> None:
    draft = checkpoint.with_suffix(".part")
    state = {
        "settings": plan.settings(),
        "done": done,
        "parameters": [parameter.detach() for parameter in learner.parameters],
        "average": average,
        "optimisers": [optimiser.state_dict() for optimiser in learner.optimisers],
    }
    torch.save(state, draft)
    draft.replace(checkpoint)


def _resume(learner: Learner[Any], average: list[Tensor], plan: Plan, checkpoint: Path) -> int:
    """Take over a checkpoint; returns the steps it has done."""
    if not checkpoint.is_file():
        return 0
    state = torch.load(checkpoint, weights_only=True)
    if state["settings"] != plan.settings():
        raise CheckpointMismatchError(
            f"{checkpoint} belongs to a run with {state['settings']}; use the same settings or another folder"
        )
    with torch.no_grad():
        for parameter, saved in zip(learner.parameters, state["parameters"], strict=True):
            parameter.copy_(saved)
        for averaged, saved in zip(average, state["average"], strict=True):
            averaged.copy_(saved)
    for optimiser, saved in zip(learner.optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    done: int = state["done"]
    return done
