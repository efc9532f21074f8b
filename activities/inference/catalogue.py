"""The models that this deployment offers, and the check of a request against the true rules of one of them.

The API resolves and refuses requests with it, the GPU worker finds folders with it; neither needs torch for that.
Models come from the presets of the families and from a models file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from activities.inference.models_file import ModelsFile, read_models_file
from activities.inference.rules import (
    AskedParameters,
    Defaults,
    InvalidParametersError,
    ModelKind,
    ResolvedParameters,
    Rules,
    Violation,
    violations,
)
from activities.inference.specs import CatalogueError, ModelSpec, UnknownModelError, builtin_spec

__all__ = [
    "AskedParameters",
    "Catalogue",
    "CatalogueError",
    "Defaults",
    "InvalidParametersError",
    "ModelKind",
    "ModelSpec",
    "ResolvedParameters",
    "Rules",
    "UnknownModelError",
    "Violation",
    "load_catalogue",
]

DEFAULT_MODEL: Final = "moving-shapes"


class Catalogue:
    """The models on offer, in the order of their definition."""

    def __init__(self, specs: Iterable[ModelSpec], *, default: str) -> None:
        self._specs = {spec.name: spec for spec in specs}
        if default not in self._specs:
            raise CatalogueError((f"default: {default!r} is not one of the models: {', '.join(self._specs)}",))
        self.default = default
        """Name of the model for requests that name none."""

    def __iter__(self) -> Iterator[ModelSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def get(self, name: str) -> ModelSpec:
        """The model of this name.

        Raises:
            UnknownModelError: it is not offered.
        """
        try:
            return self._specs[name]
        except KeyError:
            raise UnknownModelError(name, self._specs) from None

    def resolve(self, spec: ModelSpec, asked: AskedParameters) -> ResolvedParameters:
        """Fill in the model's defaults and check everything against its rules.

        Raises:
            InvalidParametersError: with every rule that is broken, not only the first.
        """
        given = {name: value for name, value in asdict(asked).items() if value is not None}
        has_image = bool(given.pop("has_image", False))
        resolved = ResolvedParameters(**({"seed": None, "model": spec.name} | asdict(spec.defaults) | given))
        broken = tuple(violations(spec.rules, spec.kind, resolved, has_image=has_image))
        if broken:
            raise InvalidParametersError(broken)
        return resolved


def load_catalogue(file: Path | None = None, *, extra_builtin: Collection[str] = ()) -> Catalogue:
    """The catalogue of this deployment.

    Args:
        file: models file in TOML; None offers the built-in models only.
        extra_builtin: names of further built-in models to offer, e.g. `tiny-wan` in development.

    Raises:
        CatalogueError: the file is wrong; the message lists every problem with entry and field.
        UnknownModelError: `extra_builtin` names a model that does not come with the product.
    """
    read = ModelsFile() if file is None else read_models_file(file)
    taken = {spec.name for spec in read.specs}
    names = dict.fromkeys([*((DEFAULT_MODEL,) if read.builtin is None else read.builtin), *extra_builtin])
    specs = [*(builtin_spec(name) for name in names if name not in taken), *read.specs]
    return Catalogue(specs, default=read.default or (DEFAULT_MODEL if DEFAULT_MODEL in names else specs[0].name))
