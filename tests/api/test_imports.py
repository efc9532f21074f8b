"""The API process stays light: it runs where no inference package is installed."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "diffusers", "transformers", "accelerate", "numpy", "av")

SCRIPT = f"""
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(name + " is not for the API")
        return None

sys.meta_path.insert(0, Absent())
from pathlib import Path
from api.app import create_app
from workers.settings import Settings
from activities.inference.catalogue import load_catalogue
app = create_app(Settings(data_dir=Path("unused")))
assert len(app.openapi()["paths"]) > 5
assert len(load_catalogue()) > 0
assert not set({HEAVY!r}) & set(sys.modules)
"""


def test_the_api_imports_and_lists_its_models_without_inference_packages() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
