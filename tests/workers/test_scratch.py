"""Scratch folders of workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from workers.scratch import scratch_folder


def test_a_folder_is_empty_and_gone_afterwards(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "scratch") as folder:
        assert list(folder.iterdir()) == []
        (folder / "clip.mp4").write_bytes(b"x")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_a_killed_worker_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom workers.scratch import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'clip.mp4').write_bytes(b'x'); print(folder, flush=True); time.sleep(60)\n"
    )
    with scratch_folder(tmp_path) as living:
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            left = Path(other.stdout.readline().strip())
            other.kill()
            other.wait()
        assert (left / "clip.mp4").exists()
        with scratch_folder(tmp_path) as new:
            assert set(tmp_path.iterdir()) == {living, new}
