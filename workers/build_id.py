"""Which build of Reelgate this process runs: the version of the package and, where it is known, the commit.

`REELGATE_BUILD_ID` goes before it; images have theirs from the build argument `BUILD_ID`. The commit is known to a
checkout (`pip install -e`) and to an installation from a repository (`pip install git+https://...`).
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_PACKAGE: Final = "reelgate"
_COMMIT_DIGITS: Final = 12


@cache
def installed_build_id() -> str:
    """`<version>+<commit>`, or the version alone."""
    try:
        package = distribution(_PACKAGE)
    except PackageNotFoundError:
        # Run from a folder of sources that was never installed.
        return "unknown"
    commit = _commit(package.read_text("direct_url.json"))
    return f"{package.version}+{commit[:_COMMIT_DIGITS]}" if commit else package.version


def _commit(direct_url: str | None) -> str | None:
    """Commit of an installation, from the record that the installer keeps of where it came from (PEP 610)."""
    if direct_url is None:
        return None
    origin = json.loads(direct_url)
    if "vcs_info" in origin:
        return str(origin["vcs_info"]["commit_id"])
    if origin.get("dir_info", {}).get("editable"):
        return checked_out(Path(unquote(urlsplit(origin["url"]).path)))
    return None


def checked_out(folder: Path) -> str | None:
    """Commit that is checked out in a folder; None: it is no Git checkout, or one without a commit."""
    try:
        git = folder / ".git"
        if git.is_file():  # A further worktree: the file names its own folder.
            git = (folder / git.read_text().removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head or None
        name = head.removeprefix("ref:").strip()
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        if (shared / name).is_file():
            return (shared / name).read_text().strip() or None
        packed = (shared / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
