"""Makes clips with a `moving-shapes` pipeline folder exactly as a GPU worker does: same family code, same defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from activities.inference.builtin_weights import WEIGHTS
from activities.inference.catalogue import AskedParameters, load_catalogue
from activities.inference.family import discover

NAME: Final = "moving-shapes"
SHIPPED: Final = WEIGHTS / NAME


def quiet() -> None:
    """Keep the libraries offline and their remarks and progress bars out of ours."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("diffusers", "transformers"):
        logging = import_module(name).utils.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()


@dataclass(frozen=True)
class Studio:
    """A loaded pipeline."""

    pipeline: Any

    @classmethod
    def open(cls, folder: Path) -> Studio:
        """Load a pipeline folder for the CPU, on one thread: as tests and `reelgate dev` run it."""
        torch.set_num_threads(1)
        quiet()
        spec = load_catalogue().get(NAME)
        return cls(discover()[spec.family].load(folder, "cpu", spec.dtype))

    def clip(self, prompt: str, seed: int) -> NDArray[np.uint8]:
        """One clip as uint8 [T, H, W, 3]."""
        catalogue = load_catalogue()
        spec = catalogue.get(NAME)
        family = discover()[spec.family]
        parameters = catalogue.resolve(spec, AskedParameters(prompt=prompt)).with_seed(seed)
        with torch.no_grad():
            embeddings = family.encode_prompt(self.pipeline, parameters)
            frames = family.generate(self.pipeline, parameters, embeddings, None, lambda _step, _total: None)
        scaled: NDArray[np.uint8] = (frames.clip(0, 1) * 255).round().astype(np.uint8)
        return scaled
