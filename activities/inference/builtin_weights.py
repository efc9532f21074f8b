"""The weights that come with the product, and the check that they are the ones that were released.

Beside the folder of a model lies `<name>.sha256`, in the format of `sha256sum`; `sha256sum --check` reads it too.
Files that a half-finished copy, a line-ending filter or a stray edit has changed are refused with their names,
instead of making clips that nobody can explain.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

WEIGHTS: Final = Path(__file__).parent / "weights"
MAX_NAMED: Final = 3


class DamagedWeightsError(Exception):
    """The files are not those that were released; the message names them, but not the place."""


def verified_folder(weights: Path, name: str) -> Path | None:
    """The pipeline folder of a built-in model, every file in it checked.

    Args:
        weights: folder of the released weights.
        name: the model.

    Returns:
        The folder; None when no weights of that name come with the product.

    Raises:
        DamagedWeightsError: a file is missing, changed or not part of the release.
        OSError: a file cannot be read.
    """
    folder, manifest = weights / name, weights / f"{name}.sha256"
    if not manifest.is_file():
        if folder.is_dir():
            raise DamagedWeightsError(f"the weights of {name} have no manifest {manifest.name}")
        return None
    released = _read(manifest)
    # Loaders pick files by name: one too many can win over one that was released. They look at no hidden ones.
    present = {
        file.relative_to(weights).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }
    problems = [f"{file} is missing" for file in sorted(released.keys() - present)]
    problems += [f"{file} is not part of the release" for file in sorted(present - released.keys())]
    problems += [
        f"{file} has another checksum than the release"
        for file in sorted(released.keys() & present)
        if _sha256(weights / file) != released[file]
    ]
    if problems:
        told = "; ".join(problems[:MAX_NAMED])
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise DamagedWeightsError(f"the weights of {name} are damaged, install them again: {told}{more}")
    return folder


def _read(manifest: Path) -> dict[str, str]:
    """Checksums by file, as they stand in a manifest."""
    released = {}
    for line in manifest.read_text(encoding="utf-8").splitlines():
        checksum, _, file = line.partition("  ")
        if len(checksum) != 2 * hashlib.sha256().digest_size or not file:
            raise DamagedWeightsError(f"the manifest {manifest.name} is damaged")
        released[file] = checksum
    return released


def _sha256(file: Path) -> str:
    with file.open("rb") as body:
        return hashlib.file_digest(body, "sha256").hexdigest()
