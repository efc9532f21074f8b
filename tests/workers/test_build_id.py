"""The build id of an installation names its version and its commit."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from workers.build_id import _commit, checked_out, installed_build_id
from workers.settings import Settings


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "one")
    return folder


def test_a_checkout_names_its_commit_on_a_branch_packed_detached_and_in_a_worktree(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert checked_out(checkout) == commit
    git(checkout, "pack-refs", "--all")
    assert checked_out(checkout) == commit
    git(checkout, "worktree", "add", "--quiet", "-b", "other", "../other")
    git(checkout.parent / "other", "commit", "--quiet", "--allow-empty", "--message", "two")
    assert checked_out(checkout.parent / "other") == git(checkout, "rev-parse", "other") != commit
    git(checkout, "checkout", "--quiet", "--detach")
    assert checked_out(checkout) == commit


def test_a_folder_without_a_commit_has_none(tmp_path: Path) -> None:
    assert checked_out(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert checked_out(tmp_path) is None


def test_an_installation_from_a_repository_names_its_commit_and_one_from_an_index_none(checkout: Path) -> None:
    assert _commit(json.dumps({"url": "https://x/y", "vcs_info": {"vcs": "git", "commit_id": "c" * 40}})) == "c" * 40
    assert _commit(json.dumps({"url": checkout.as_uri(), "dir_info": {"editable": True}})) == checked_out(checkout)
    assert _commit(json.dumps({"url": checkout.as_uri(), "dir_info": {}})) is None
    assert _commit(None) is None


def test_the_setting_goes_before_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REELGATE_BUILD_ID", raising=False)
    assert Settings().build_id == installed_build_id()
    assert installed_build_id().partition("+")[0] == version("reelgate")
    monkeypatch.setenv("REELGATE_BUILD_ID", "")
    assert Settings().build_id == installed_build_id()
    monkeypatch.setenv("REELGATE_BUILD_ID", "2026-11-30.1")
    assert Settings().build_id == "2026-11-30.1"
