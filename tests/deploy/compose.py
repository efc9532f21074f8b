"""The compose file as Docker reads it: variables filled in, merge keys resolved, one object per service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.temporal.yml"
ENV_EXAMPLE = ROOT / "deploy" / ".env.example"
DOCKERFILES = (ROOT / "deploy/docker/Dockerfile.api", ROOT / "deploy/docker/Dockerfile.gpu")

_VARIABLE = re.compile(r"\$\$|\$\{([A-Z0-9_]+)(?::-([^}]*)|:\+((?:[^{}]|\$\{[A-Z0-9_]+\})*))?\}|\$")
"""`${NAME}`, `${NAME:-default}`, or `${NAME:+instead of a value}` with variables in it."""
_UNITS = {"s": 1, "m": 60, "h": 3600}


def variables() -> dict[str, str]:
    """Every variable that the file asks for, with its default."""
    return {match[1]: match[2] or "" for match in _VARIABLE.finditer(FILE.read_text()) if match[1]}


def env_example() -> dict[str, str]:
    """The variables of `.env.example`."""
    lines = [line for line in ENV_EXAMPLE.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@cache
def document() -> dict[str, Any]:
    """The whole file with its defaults."""
    return filled({})


def filled(values: Mapping[str, str]) -> dict[str, Any]:
    """The whole file with `values` and else the defaults. As Docker does it: in the text of parsed values."""

    def value_of(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        assert match[1], f"a lone $ in {match.string!r}"
        if match[3] is not None:
            return _VARIABLE.sub(value_of, match[3]) if values.get(match[1]) else ""
        return values.get(match[1]) or match[2] or ""

    def walk(node: object) -> object:
        match node:
            case str():
                return _VARIABLE.sub(value_of, node)
            case list():
                return [walk(each) for each in node]
            case dict():
                return {key: walk(each) for key, each in node.items()}
        return node

    return {key: walk(node) for key, node in yaml.safe_load(FILE.read_text()).items()}


@dataclass(frozen=True)
class Service:
    """One service."""

    name: str
    spec: Mapping[str, Any]

    @property
    def ours(self) -> bool:
        """Whether it runs an image built here."""
        return str(self.spec["image"]).startswith("reelgate-")

    @property
    def one_shot(self) -> bool:
        """Whether it is meant to end by itself."""
        return "restart" not in self.spec or self.spec["restart"] == "no"

    @property
    def environment(self) -> dict[str, str]:
        """Its variables; Docker passes every value as text."""
        return {name: str(value) for name, value in self.spec.get("environment", {}).items()}

    @property
    def argv(self) -> list[str]:
        """Entrypoint and command together."""
        return [*self.spec.get("entrypoint", ()), *self.spec.get("command", ())]

    @property
    def secrets(self) -> list[str]:
        """Names under /run/secrets."""
        return list(self.spec.get("secrets", ()))

    @property
    def mounts(self) -> dict[str, str]:
        """Target by source."""
        parts = [mount.split(":") for mount in self.spec.get("volumes", ())]
        return {source: target for source, target, *_ in parts}

    @property
    def published(self) -> dict[str, str]:
        """Container port by `address:port` of the host."""
        return {port.rpartition(":")[0]: port.rpartition(":")[2] for port in self.spec.get("ports", ())}

    def reelgate_command(self) -> list[str] | None:
        """The `reelgate ...` words it runs, through a shell or not."""
        line = " ".join(self.argv)
        found = re.search(r"(?:^|exec )reelgate ([a-z ]+?)\s*$", line)
        return found[1].split() if found else None


def services() -> dict[str, Service]:
    """Every service by name."""
    return {name: Service(name, spec) for name, spec in document()["services"].items()}


def duration(text: str) -> timedelta:
    """A compose duration of one unit."""
    return timedelta(seconds=int(text[:-1]) * _UNITS[text[-1]])
