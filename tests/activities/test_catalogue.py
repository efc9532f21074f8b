"""The catalogue refuses what a model cannot do, says everything that is wrong, and needs no torch for it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from activities.inference import models
from activities.inference.catalogue import (
    AskedParameters,
    Catalogue,
    CatalogueError,
    InvalidParametersError,
    ModelKind,
    UnknownModelError,
    load_catalogue,
)
from activities.inference.family import FamilyError, discover
from activities.inference.rules import ResolvedParameters, violations

WITHOUT_INFERENCE_PACKAGES = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "diffusers", "transformers", "numpy", "av", "PIL", "tokenizers"}:
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Refuse())
"""


def broken(catalogue: Catalogue, model: str, **changes: object) -> set[tuple[str, str]]:
    asked = AskedParameters(**({"prompt": "a red circle"} | changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidParametersError) as caught:
        catalogue.resolve(catalogue.get(model), asked)
    return {(violation.field, violation.rule) for violation in caught.value.violations}


def test_what_is_left_out_is_filled_in_from_the_model(catalogue: Catalogue) -> None:
    resolved = catalogue.resolve(catalogue.get("moving-shapes"), AskedParameters(prompt="a red circle", seed=3))
    assert resolved == ResolvedParameters(
        model="moving-shapes",
        prompt="a red circle",
        negative_prompt="",
        width=128,
        height=128,
        num_frames=16,
        fps=8.0,
        num_inference_steps=25,
        guidance_scale=3.0,
        seed=3,
    )
    assert resolved.with_seed(9).seed == 3


def test_every_broken_rule_is_told_at_once(catalogue: Catalogue) -> None:
    assert broken(
        catalogue,
        "moving-shapes",
        prompt=" \n",
        negative_prompt="x" * 501,
        width=127,
        height=256,
        num_frames=15,
        fps=0.0,
        num_inference_steps=0,
        guidance_scale=math.nan,
        seed=-1,
        has_image=True,
    ) == {
        ("prompt", "required"),
        ("negative_prompt", "max_length"),
        ("width", "minimum"),
        ("width", "multiple_of"),
        ("width", "max_pixels"),
        ("height", "maximum"),
        ("num_frames", "frame_count"),
        ("fps", "minimum"),
        ("num_inference_steps", "minimum"),
        ("guidance_scale", "finite"),
        ("seed", "minimum"),
        ("image", "forbidden"),
    }


@pytest.mark.parametrize(
    ("model", "frames", "legal"),
    [
        ("tiny-wan", 81, True),
        ("tiny-wan", 80, False),
        ("tiny-wan", 1, False),
        ("tiny-wan", 85, False),
        ("tiny-ltx", 9, True),
        ("tiny-ltx", 13, False),
        ("moving-shapes", 17, False),
    ],
)
def test_frame_counts_follow_the_family(catalogue: Catalogue, model: str, frames: int, legal: bool) -> None:
    spec = catalogue.get(model)
    asked = AskedParameters(prompt="x", num_frames=frames)
    if legal:
        assert catalogue.resolve(spec, asked).num_frames == frames
    else:
        assert broken(catalogue, model, num_frames=frames) == {("num_frames", "frame_count")}


@pytest.mark.parametrize(
    ("model", "width", "rule"),
    [("tiny-wan", 72, "multiple_of"), ("tiny-ltx", 80, "multiple_of"), ("tiny-wan", 48, "minimum")],
)
def test_sizes_follow_the_family(catalogue: Catalogue, model: str, width: int, rule: str) -> None:
    assert broken(catalogue, model, width=width) == {("width", rule)}


def test_a_prompt_is_measured_in_code_points(catalogue: Catalogue) -> None:
    spec = catalogue.get("moving-shapes")
    assert catalogue.resolve(spec, AskedParameters(prompt="é🔴" * 250)).prompt == "é🔴" * 250
    assert broken(catalogue, "moving-shapes", prompt="🔴" * 501) == {("prompt", "max_length")}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_none_are_refused(catalogue: Catalogue, value: float) -> None:
    assert broken(catalogue, "tiny-wan", guidance_scale=value) == {("guidance_scale", "finite")}
    assert broken(catalogue, "tiny-wan", fps=value) == {("fps", "finite")}


def test_an_image_model_needs_an_image(catalogue: Catalogue) -> None:
    assert broken(catalogue, "tiny-ltx-i2v") == {("image", "required")}


def test_a_clip_beyond_memory_is_refused_though_size_and_length_are_legal(tmp_path: Path) -> None:
    catalogue = load_catalogue(
        written(
            tmp_path,
            '[[models]]\npreset = "ltx-video"\npath = "x"\nrevision = "1"\nrules = {max_total_pixels = 90000000}',
        )
    )
    assert broken(catalogue, "ltx-video", width=1280, height=704, num_frames=257) == {
        ("num_frames", "max_total_pixels")
    }


def test_every_preset_is_legal_by_its_own_rules_and_never_finer_than_its_family() -> None:
    for family in discover().values():
        for preset in family.presets:
            example = ResolvedParameters(**(asdict(preset.defaults) | {"model": preset.name, "prompt": "x", "seed": 1}))
            has_image = family.kind is ModelKind.IMAGE_TO_VIDEO
            assert list(violations(preset.rules, family.kind, example, has_image=has_image)) == [], preset.name
            assert preset.rules.size_multiple % family.rules.size_multiple == 0, preset.name


def test_the_description_of_a_model_is_plain_data(catalogue: Catalogue) -> None:
    for spec in catalogue:
        schema = json.loads(json.dumps(spec.schema()))
        assert schema["properties"]["num_frames"]["enum"] == list(spec.rules.frames)
        assert ("image" in schema["required"]) == (spec.kind is ModelKind.IMAGE_TO_VIDEO)


def test_an_unknown_model_is_told_with_what_is_offered(catalogue: Catalogue) -> None:
    with pytest.raises(UnknownModelError, match="moving-shapes"):
        catalogue.get("sora")


def test_only_the_default_model_is_offered_without_being_asked() -> None:
    assert [spec.name for spec in load_catalogue()] == ["moving-shapes"]


def test_catalogue_and_supervisor_work_without_the_inference_packages() -> None:
    code = WITHOUT_INFERENCE_PACKAGES + (
        "from activities.inference.catalogue import AskedParameters, load_catalogue\n"
        "import activities.generation, activities.inference.pool, activities.inference.slots\n"
        "catalogue = load_catalogue(extra_builtin=['tiny-wan'])\n"
        "print(catalogue.resolve(catalogue.get('tiny-wan'), AskedParameters(prompt='x')).num_frames)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "9\n", ran.stderr


def written(folder: Path, text: str) -> Path:
    file = folder / "models.toml"
    file.write_text(text)
    return file


def test_a_models_file_offers_full_size_models(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        default = "wan-small"
        [[models]]
        preset = "wan2.1-t2v-1.3b"
        name = "wan-small"
        path = "weights/wan"
        revision = "2025-03"
        pool = "small"
          [models.rules]
          max_frames = 49
          [models.defaults]
          num_frames = 33
        [[models]]
        family = "ltx"
        name = "our-ltx"
        path = "/models/ltx"
        revision = "7"
        dtype = "float16"
        """,
    )
    catalogue = load_catalogue(file)
    assert [spec.name for spec in catalogue] == ["moving-shapes", "wan-small", "our-ltx"]
    assert catalogue.default == "wan-small"
    small = catalogue.get("wan-small")
    assert (small.path, small.revision, small.pool) == (str(tmp_path / "weights/wan"), "2025-03", "small")
    assert catalogue.resolve(small, AskedParameters(prompt="x")).num_frames == 33
    assert broken(catalogue, "wan-small", num_frames=53) == {("num_frames", "frame_count")}
    assert catalogue.get("our-ltx").dtype == "float16"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "models.toml: "),
        ('[[models]]\npreset = "wan2.1-t2v-14b"\nrevision = "1"', "models[0] wan2.1-t2v-14b: path: "),
        ('[[models]]\npreset = "wan2.1-t2v-14b"\npath = "x"', "models[0] wan2.1-t2v-14b: revision: "),
        ('[[models]]\npreset = "sora"\npath = "x"\nrevision = "1"', "models[0] sora: preset: there is no preset"),
        ('[[models]]\nfamily = "sora"\nname = "a"\npath = "x"\nrevision = "1"', "models[0] a: family: "),
        ('[[models]]\nfamily = "ltx"\npath = "x"\nrevision = "1"', "models[0]: name: "),
        ('[[models]]\nname = "a"\npath = "x"\nrevision = "1"', "models[0] a: preset: give either"),
        ('[[models]]\npreset = "ltx-video"\npath = "x"\nrevision = "1"\nfoo = 1', "models[0] ltx-video: foo: "),
        (
            '[[models]]\npreset = "ltx-video"\npath = "x"\nrevision = "1"\nrules = {size_multiple = 16}',
            "models[0] ltx-video: rules.size_multiple: must be a multiple of 32",
        ),
        (
            '[[models]]\npreset = "ltx-video"\npath = "x"\nrevision = "1"\nrules = {max_frames = 49}',
            "models[0] ltx-video: defaults.num_frames: ",
        ),
        (
            '[[models]]\npreset = "ltx-video"\npath = "x"\nrevision = "1"\ndefaults = {width = "wide"}',
            "models[0] ltx-video: defaults.width: ",
        ),
        ('default = "sora"', "default: 'sora' is not one of the models"),
        ('builtin = ["sora"]', "builtin: there is no model 'sora'"),
        ("builtin = []", "models: the file offers no model"),
    ],
)
def test_errors_of_a_models_file_name_entry_and_field(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(CatalogueError) as caught:
        load_catalogue(written(tmp_path, text))
    assert str(caught.value).startswith(problem)


def test_all_problems_of_a_models_file_are_told_at_once(tmp_path: Path) -> None:
    entry = '[[models]]\npreset = "ltx-video"\npath = "x"\nrevision = "1"\n'
    with pytest.raises(CatalogueError) as caught:
        load_catalogue(written(tmp_path, entry + entry + '[[models]]\npreset = "sora"\npath = "x"\nrevision = "1"\n'))
    assert len(caught.value.problems) == 2
    assert "name of an entry above" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("", "exports no FAMILY"),
        ("FAMILY = object()", "exports no FAMILY"),
        ("from activities.inference.models.ltx import FAMILY", "the family id 'ltx' is taken"),
        (
            "from activities.inference.models.ltx import Ltx\nclass Other(Ltx):\n    id = 'other'\nFAMILY = Other()",
            "the preset 'tiny-ltx' is taken",
        ),
    ],
)
def test_a_family_file_that_breaks_the_protocol_fails_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    name = f"zz_{abs(hash((code, str(tmp_path))))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    with pytest.raises(FamilyError, match=problem):
        discover()
