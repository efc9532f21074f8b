"""The deploy files are legal, and everything that they name exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import typer
import yaml
from compose_spec import PyCompose
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from api.app import create_app
from api.cli import app as cli
from tests.deploy.compose import (
    DOCKERFILES,
    ROOT,
    Service,
    document,
    duration,
    env_example,
    filled,
    services,
    variables,
)
from workers.devserver import DYNAMIC_CONFIG
from workers.run import WATCHDOG_SECONDS
from workers.settings import Settings, load_settings

SERVICES = services()
OURS = [service for service in SERVICES.values() if service.ours]
WORKERS = [service for service in OURS if (service.reelgate_command() or [""])[0] == "worker"]
SETTINGS = {f"REELGATE_{name.upper()}" for name in Settings.model_fields}

by_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
by_service_of_ours = pytest.mark.parametrize("service", OURS, ids=lambda service: service.name)
by_worker = pytest.mark.parametrize("service", WORKERS, ids=lambda service: service.name)
by_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def instructions(dockerfile: Path, word: str) -> list[str]:
    """What follows each instruction `word`, continuations joined and comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [rest.strip() for first, _, rest in (line.partition(" ") for line in joined.splitlines()) if first == word]


def image_environment(dockerfile: Path) -> dict[str, str]:
    """Variables that the image sets."""
    return dict(pair.split("=", 1) for text in instructions(dockerfile, "ENV") for pair in shlex.split(text))


def dockerfile_of(service: Service) -> Path:
    """The Dockerfile of a service's image, which another service may build."""
    built = {other.spec["image"]: other.spec["build"]["dockerfile"] for other in OURS if "build" in other.spec}
    return ROOT / str(built[service.spec["image"]])


def assert_command_of_the_cli(words: Sequence[str]) -> None:
    below: Mapping[str, object] = vars(typer.main.get_command(cli))["commands"]
    for word in words:
        assert word in below, f"reelgate {' '.join(words)}"
        below = getattr(below[word], "commands", {})
    assert not below, f"reelgate {' '.join(words)} only prints its help"


def served_paths(method: str) -> set[str]:
    """Paths of the API for a method."""
    paths = create_app(Settings()).openapi()["paths"]
    return {path for path, operations in paths.items() if method in operations}


class TestTheFilesAreLegal:
    @pytest.mark.parametrize("values", [{}, env_example()], ids=["defaults", "env-example"])
    def test_the_compose_specification_accepts_the_compose_file(self, values: dict[str, str]) -> None:
        compose = PyCompose.from_json(json.dumps(filled(values)))
        compose.validate()
        assert set(compose.service_names()) == set(SERVICES)

    @by_dockerfile
    def test_hadolint_has_nothing_to_say(self, dockerfile: Path) -> None:
        lint = [str(Path(sys.executable).parent / "hadolint"), "--no-color", str(dockerfile)]
        done = subprocess.run(lint, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")

    def test_the_example_settings_are_the_variables_of_the_compose_file_with_its_defaults(self) -> None:
        assert env_example() == variables()

    def test_the_image_context_is_what_the_images_copy(self) -> None:
        ignored = (ROOT / ".dockerignore").read_text().splitlines()
        kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
        copied = {
            source
            for dockerfile in DOCKERFILES
            for text in instructions(dockerfile, "COPY")
            if "--from" not in text
            for source in text.split()[:-1]
        }
        assert "*" in ignored
        assert kept == copied
        assert all((ROOT / path).exists() for path in kept)


class TestEverythingNamedExists:
    @by_service_of_ours
    def test_reelgate_commands_are_commands_of_the_cli(self, service: Service) -> None:
        if service.name == "data-folders":
            pytest.skip("runs no reelgate command")
        words = service.reelgate_command()
        assert words, f"{service.name} runs no reelgate command: {service.argv}"
        assert_command_of_the_cli(words)

    @by_dockerfile
    def test_the_default_command_of_an_image_is_a_command_of_the_cli(self, dockerfile: Path) -> None:
        (command,) = instructions(dockerfile, "CMD")
        program, *words = json.loads(command)
        assert program == "reelgate"
        assert_command_of_the_cli(words)

    @by_service
    def test_reelgate_variables_are_settings_and_given_to_our_processes_only(self, service: Service) -> None:
        named = {name for name in service.environment if name.startswith("REELGATE_")}
        exported = set(re.findall(r"\b(REELGATE_[A-Z_]+)=", " ".join(service.argv)))
        assert named | exported <= (SETTINGS if service.ours else set())

    @by_dockerfile
    def test_reelgate_variables_of_an_image_are_settings(self, dockerfile: Path) -> None:
        assert {name for name in image_environment(dockerfile) if name.startswith("REELGATE_")} <= SETTINGS

    @by_service_of_ours
    def test_the_settings_of_a_service_are_accepted(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {**image_environment(dockerfile_of(service)), **service.environment}.items():
            if name.startswith("REELGATE_") and "$" not in value:
                monkeypatch.setenv(name, value)
        assert not load_settings().development

    @by_service
    def test_mounted_files_of_the_repository_exist(self, service: Service) -> None:
        files = [ROOT / source for source in service.mounts if source.startswith("./") and source != "./models"]
        assert all(file.is_file() for file in files), files

    @by_service
    def test_secrets_and_paths_in_commands_and_variables_are_mounted(self, service: Service) -> None:
        text = " ".join([*service.argv, *service.environment.values()])
        assert set(re.findall(r"/run/secrets/(\w+)", text)) == set(service.secrets)
        of_the_image = ["/etc/temporal/entrypoint.sh"]
        for path in re.findall(r"(?<![\w:/])/(?:deploy|etc|keys|gpu-data|models|var/lib/reelgate)/[\w./-]+", text):
            targets = [*service.mounts.values(), *of_the_image]
            assert any(path == target or path.startswith(f"{target}/") for target in targets), path

    def test_volumes_networks_and_secrets_that_are_declared_are_used(self) -> None:
        declared = document()
        used = [service.spec for service in SERVICES.values()]
        sources = {source for service in SERVICES.values() for source in service.mounts if source[0] != "."}
        assert sources == set(declared["volumes"])
        assert {name for spec in used for name in spec.get("networks", ())} == set(declared["networks"])
        assert {name for spec in used for name in spec.get("secrets", ())} == set(declared["secrets"])

    def test_the_temporal_server_has_the_settings_of_the_embedded_one(self) -> None:
        loaded = yaml.safe_load((ROOT / "deploy/temporal/dynamicconfig.yaml").read_text())
        assert all(len(values) == 1 and set(values[0]) == {"value"} for values in loaded.values())
        assert {key: values[0]["value"] for key, values in loaded.items()} == {
            key: json.loads(value) for key, value in DYNAMIC_CONFIG
        }


class TestAddressesAgree:
    def test_every_host_that_a_service_names_is_a_service_of_its_networks(self) -> None:
        for service in SERVICES.values():
            text = " ".join(service.environment.values())
            for host in re.findall(r"(?:^|[ /@])(temporal|postgres|s3):\d+", text):
                assert set(service.spec["networks"]) & set(SERVICES[host].spec["networks"]), (service.name, host)

    def test_the_ports_of_the_api_agree(self) -> None:
        api = SERVICES["api"]
        (port,) = instructions(DOCKERFILES[0], "EXPOSE")
        assert port == str(Settings.model_fields["port"].default)
        assert list(api.published.values()) == [port]
        assert api.environment["REELGATE_PUBLIC_URL"] == f"http://localhost:{port}"
        assert "REELGATE_PORT" not in api.environment

    @by_dockerfile
    def test_the_health_check_asks_the_port_and_path_that_api_and_workers_serve(self, dockerfile: Path) -> None:
        (check,) = instructions(dockerfile, "HEALTHCHECK")
        assert "http://127.0.0.1:8080/healthz" in check
        assert image_environment(dockerfile)["REELGATE_WORKER_HEALTH_PORT"] == "8080"
        assert "/healthz" in served_paths("get")

    def test_links_into_the_web_ui_lead_to_its_published_port(self) -> None:
        ui = SERVICES["temporal-ui"]
        ((host, port),) = ui.published.items()
        assert port == ui.environment["TEMPORAL_UI_PORT"]
        assert SERVICES["api"].environment["REELGATE_WEB_UI_URL"].endswith(host.rpartition(":")[2])

    def test_the_web_ui_decodes_at_a_route_of_the_api(self) -> None:
        api, ui = SERVICES["api"], SERVICES["temporal-ui"]
        prefix = ui.environment["TEMPORAL_CODEC_ENDPOINT"].removeprefix(api.environment["REELGATE_PUBLIC_URL"])
        assert f"{prefix}/decode" in served_paths("post")

    def test_the_path_token_reaches_the_api_and_the_web_ui_together(self) -> None:
        token = "a-token-that-nobody-can-guess-0123456789"
        given = filled({"REELGATE_CODEC_PATH_TOKEN": token, "REELGATE_PUBLIC_URL": "https://gate.example"})["services"]
        assert given["api"]["environment"]["REELGATE_CODEC_PATH_TOKEN"] == token
        endpoint = given["temporal-ui"]["environment"]["TEMPORAL_CODEC_ENDPOINT"]
        assert endpoint == f"https://gate.example/api/v1/codec/{token}"
        assert not SERVICES["api"].environment["REELGATE_CODEC_PATH_TOKEN"], "nobody reads unless somebody decides so"

    def test_api_and_callback_workers_agree_on_links(self) -> None:
        names = ("REELGATE_PUBLIC_URL", "REELGATE_LINK_SECRET_FILE", "REELGATE_KEYS_FILE")
        api, callback = SERVICES["api"].environment, SERVICES["callback-worker"].environment
        assert [api[name] for name in names] == [callback[name] for name in names]

    def test_namespace_and_retention_are_the_same_for_the_job_and_our_processes(self) -> None:
        job = SERVICES["temporal-namespace"].environment
        for service in [SERVICES["api"], *WORKERS]:
            assert service.environment["REELGATE_NAMESPACE"] == job["TEMPORAL_NAMESPACE"]
            assert service.environment["REELGATE_RETENTION_DAYS"] == job["RETENTION_DAYS"]


class TestOperation:
    def test_there_is_one_worker_service_of_each_kind_and_profile(self) -> None:
        kinds = {service.name: (service.reelgate_command(), service.spec.get("profiles")) for service in WORKERS}
        assert kinds == {
            "control-worker": (["worker", "control"], None),
            "callback-worker": (["worker", "callback"], None),
            "gpu-worker": (["worker", "gpu"], ["gpu"]),
            "cpu-worker": (["worker", "gpu"], ["cpu"]),
        }

    @by_service
    def test_images_are_pinned(self, service: Service) -> None:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", str(service.spec["image"]))

    @by_dockerfile
    def test_base_images_are_pinned_and_processes_are_not_root(self, dockerfile: Path) -> None:
        stages = [re.split(r"\s+AS\s+", text) for text in instructions(dockerfile, "FROM")]
        names = {name for _, name in stages}
        assert all(base in names or re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", base) for base, _ in stages)
        assert len(stages) > 1
        assert instructions(dockerfile, "USER") == ["10001:10001"]
        assert image_environment(dockerfile)["PYTHONUNBUFFERED"] == "1"

    @by_service
    def test_services_that_stay_are_limited_checked_and_started_again(self, service: Service) -> None:
        resources = service.spec["deploy"]["resources"]
        assert {"cpus", "memory"} <= set(resources["limits"])
        if service.one_shot:
            assert "healthcheck" not in service.spec or service.spec["healthcheck"] == {"disable": True}
            return
        assert service.spec["restart"] == "unless-stopped"
        assert {"cpus", "memory"} <= set(resources["reservations"])
        if service.ours:
            assert instructions(dockerfile_of(service), "HEALTHCHECK")
        else:
            assert service.spec["healthcheck"]["test"]

    def test_nothing_waits_for_the_end_of_a_service_that_stays(self) -> None:
        for service in SERVICES.values():
            for name, wanted in service.spec.get("depends_on", {}).items():
                expected = "service_completed_successfully" if SERVICES[name].one_shot else "service_healthy"
                assert wanted["condition"] == expected, (service.name, name)

    @by_worker
    def test_a_worker_has_time_to_drain_before_it_is_killed(self, service: Service) -> None:
        drain = timedelta(seconds=float(service.environment["REELGATE_WORKER_DRAIN_SECONDS"]) + WATCHDOG_SECONDS)
        assert duration(service.spec["stop_grace_period"]) > drain

    def test_gpus_are_reserved_by_the_gpu_profile_only(self) -> None:
        with_devices = [
            service.name
            for service in SERVICES.values()
            if "devices" in service.spec["deploy"]["resources"].get("reservations", {})
        ]
        assert with_devices == ["gpu-worker"]

    @by_service
    def test_ports_are_published_to_this_machine_only_by_default(self, service: Service) -> None:
        assert all(host.startswith("127.0.0.1:") for host in service.published)

    def test_only_the_server_and_its_schema_reach_the_database(self) -> None:
        assert document()["networks"]["database"] == {"internal": True}
        inside = {name for name, service in SERVICES.items() if "database" in service.spec.get("networks", ())}
        assert inside == {"postgres", "temporal", "temporal-schema"}

    def test_the_callback_worker_that_talks_to_strangers_reaches_neither_store_nor_database(self) -> None:
        callback = SERVICES["callback-worker"]
        assert callback.spec["networks"] == ["temporal"]
        assert set(callback.secrets) == {"codec_keys", "link_secret"}

    @by_service
    def test_no_secret_stands_in_the_file(self, service: Service) -> None:
        for name, value in service.environment.items():
            if re.search(r"PASSWORD|PWD|SECRET|_KEYS?(_|$)|OPTIONS", name):
                assert value.startswith(("/run/secrets/", "/var/lib/reelgate/keys/")), name


class TestVersionsInTheImages:
    def test_the_pinned_versions_are_ones_that_the_package_allows(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        lines = (ROOT / "deploy/docker/constraints.txt").read_text().splitlines()
        pins = dict(line.split("==") for line in lines if not line.startswith("#"))
        extras = project["optional-dependencies"]
        for text in (*project["dependencies"], *extras["gpu"], *extras["otel"]):
            wanted = Requirement(text)
            assert Version(pins[canonicalize_name(wanted.name)]) in wanted.specifier, text

    def test_the_gpu_image_installs_the_torch_of_the_package(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        (torch,) = (text for text in project["optional-dependencies"]["gpu"] if Requirement(text).name == "torch")
        assert any(text.endswith(f" {torch}") for text in instructions(DOCKERFILES[1], "RUN"))
