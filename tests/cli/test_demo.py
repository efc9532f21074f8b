"""`reelgate demo`: what `make demo` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.stack import clean_environment, reelgate


@pytest.mark.durability
@pytest.mark.timeout(300)
def test_the_demo_ends_with_a_playable_clip_and_a_verified_callback(tmp_path: Path) -> None:
    done = reelgate("demo", environment=clean_environment(TMPDIR=str(tmp_path)), cwd=tmp_path)
    assert done.returncode == 0, done
    assert [word for word in ("QUEUED", "PROCESSING", "SUCCEEDED") if f"state {word}" in done.stdout] == [
        "QUEUED",
        "PROCESSING",
        "SUCCEEDED",
    ]
    assert "callback task.succeeded delivered; its signature is verified" in done.stdout
    assert "/namespaces/default/workflows/t" in done.stdout
    assert (tmp_path / "reelgate-demo" / "clip.mp4").read_bytes()[4:8] == b"ftyp"
    assert (tmp_path / "reelgate-demo" / "poster.webp").read_bytes()[:4] == b"RIFF"
    assert list(tmp_path.glob("reelgate-demo-*")) == [], "its data folder is removed"
