"""Every setting of every Reelgate process, read from `REELGATE_*` environment variables.

One class, so that the API, the workers and the CLI cannot disagree. Nothing below `workers/` reads settings: the
registry turns them into constructor arguments. Values that are secrets are `SecretStr` and never appear in a `repr`.
"""

from __future__ import annotations

import re
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import quote

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from temporalio.envconfig import ClientConfigProfile

from activities.egress_policy import EgressPolicy
from workers.build_id import installed_build_id
from workers.errors import ConfigurationError
from workers.secret_files import SecretFileError, read_secret_file
from workflows.tasks import Limits, TaskPriority

Environment = Literal["development", "production"]


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


_STORE_OPTIONS: Final = TypeAdapter(dict[str, str])

CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list that is written `a,b,c` in the environment."""


class Tier(BaseModel):
    """What the keys of one tier may do. None takes the setting of the same name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_priority: TaskPriority = TaskPriority.HIGH
    """Highest priority a task may ask for; above it 403 `PRIORITY_NOT_ALLOWED`."""
    fairness_weight: float = Field(default=1.0, ge=0.001, le=1000.0)
    """Share of a busy GPU pool relative to users of weight 1."""
    max_pending_tasks: int | None = Field(default=None, ge=1)
    tenant_max_pending_tasks: int | None = Field(default=None, ge=1)
    submit_rate_per_minute: float | None = Field(default=None, gt=0)
    submit_burst: int | None = Field(default=None, ge=1)
    batch_parallelism: int | None = Field(default=None, ge=1, le=50)
    allowance_tasks: int | None = Field(default=None, ge=1)
    """Tasks per user and period; None: no allowance is counted."""
    allowance_gpu_seconds: float | None = Field(default=None, gt=0)
    """GPU seconds per user and period; None: no allowance is counted."""
    allowance_period_days: int = Field(default=1, ge=1, le=7)
    """Length of the period. At most the retention: a fresh count is rebuilt from closed runs."""


def temporal_profile() -> ClientConfigProfile:
    """The standard `TEMPORAL_*` variables and the profile that they choose.

    Raises:
        ConfigurationError: the profile or its file is wrong.
    """
    try:
        return ClientConfigProfile.load()
    except RuntimeError as error:
        # The first line only: behind it stands the line of the file, and that may be the API key's.
        reason = str(error).partition("\n")[0]
    raise ConfigurationError(f"TEMPORAL_PROFILE, TEMPORAL_CONFIG_FILE: {reason}")


class TemporalProfileSource(PydanticBaseSettingsSource):
    """The standard `TEMPORAL_*` variables and Temporal profile file, behind our own variables."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[object, str, bool]:
        """Unused: the profile is read once, in `__call__`."""
        raise NotImplementedError

    def __call__(self) -> dict[str, object]:
        """Address, namespace and API key, where the profile has them."""
        profile = temporal_profile()
        found = {
            "temporal_address": profile.address,
            "namespace": profile.namespace,
            "temporal_api_key": profile.api_key,
        }
        return {name: value for name, value in found.items() if value}


class Settings(BaseSettings):
    """Settings of one process. Each field is the environment variable `REELGATE_<FIELD>`."""

    model_config = SettingsConfigDict(
        env_prefix="REELGATE_", frozen=True, extra="forbid", env_ignore_empty=True, hide_input_in_errors=True
    )

    environment: Environment = "production"
    """`development` allows http:// callbacks to loopback addresses; `reelgate dev` sets it."""
    data_dir: Path = Path(".reelgate")
    """Folder of everything kept on this machine: local store, keys, scratch files, the embedded server's state."""

    # --- Temporal -----------------------------------------------------------------------------------------------
    temporal_address: str = "127.0.0.1:7233"
    """`host:port` of the Temporal frontend. Unset, the standard `TEMPORAL_ADDRESS` or Temporal profile decides."""
    namespace: str = "default"
    """Temporal namespace. Unset, the standard `TEMPORAL_NAMESPACE` or Temporal profile decides."""
    temporal_api_key: SecretStr | None = None
    """API key for Temporal. Switches TLS on."""
    temporal_tls: bool = False
    """Talk TLS to Temporal even without a client certificate or an API key."""
    temporal_tls_server_name: str | None = None
    """Name in the server's certificate, when it is not the host of the address."""
    temporal_tls_ca_file: Path | None = None
    """PEM file of the authority that signed the server's certificate. Switches TLS on."""
    temporal_tls_cert_file: Path | None = None
    """PEM file of the client certificate (mTLS), together with `temporal_tls_key_file`."""
    temporal_tls_key_file: Path | None = None
    """PEM file of the client's private key."""
    temporal_connect_timeout_seconds: float = Field(default=15.0, gt=0)
    """How long a starting process waits for a server that is still booting."""
    worker_heartbeat_seconds: float = Field(default=5.0, ge=1, le=60)
    """How often a worker reports itself to the server: the age of fleet views."""
    metrics_bind: str | None = None
    """`host:port` for the Temporal SDK's own Prometheus metrics. None: off in the API; a worker with a health port
    takes a loopback port for them and shows them there."""

    # --- Storage ------------------------------------------------------------------------------------------------
    store_url: str = Field(default_factory=lambda data: (data["data_dir"].absolute() / "store").as_uri())
    """Root of the object store: `file:///folder` or `s3://bucket/prefix`."""
    store_options: dict[str, SecretStr] = Field(default_factory=dict)
    """Options of the store as JSON, e.g. `{"endpoint": "http://...", "access_key_id": "..."}`."""
    store_options_file: Path | None = None
    """File with the same JSON, used when `store_options` is empty."""
    retention_days: int = Field(default=7, ge=1, le=90)
    """Days until artifacts and records are removed; the namespace's retention should be the same."""

    # --- Secrets ------------------------------------------------------------------------------------------------
    codec_keys: SecretStr | None = None
    """Payload keys, `id:base64` separated by commas; the first encrypts, all decrypt. Goes before the file."""
    codec_key_file: Path = Field(default_factory=lambda data: data["data_dir"] / "codec.keys")
    """File with one `id:base64` per line, used when `codec_keys` is unset."""
    link_secret: SecretStr | None = None
    """Secret that signs result links, at least 32 characters; the same for the API and callback workers."""
    link_secret_file: Path = Field(default_factory=lambda data: data["data_dir"] / "link.secret")
    """File with that secret, used when `link_secret` is unset."""
    keys_file: Path = Field(default_factory=lambda data: data["data_dir"] / "keys.toml")
    """API keys (hashes), tenants' callback secrets and endpoint settings; see `workers.keys`."""
    codec_path_token: SecretStr | None = Field(default=None, min_length=32)
    """Token that stands for an operator key in the path of the codec server, for a Web UI without a log-in."""

    # --- API ----------------------------------------------------------------------------------------------------
    host: str = "127.0.0.1"
    """Address the API listens on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port the API listens on; 0 takes a free one."""
    public_url: str = Field(default_factory=lambda data: f"http://{data['host']}:{data['port']}")
    """Base of every URL given to clients, as they reach the API."""
    web_ui_url: str = "http://127.0.0.1:8233"
    """Base of links into the Temporal Web UI; its origin may call the codec server."""
    request_rate_per_second: float = Field(default=20.0, gt=0)
    """Requests per key or address that the guard in front of every route lets through, sustained."""
    request_burst: int = Field(default=100, ge=1)
    """Requests per key or address in one go."""
    max_request_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Largest request body read."""
    max_image_bytes: int = Field(default=10 * 1024 * 1024, ge=1024)
    """Largest input image, encoded."""
    max_image_pixels: int = Field(default=16_000_000, ge=1024)
    """Largest input image, decoded."""
    image_fetch_seconds: float = Field(default=10.0, gt=0)
    """Time to fetch an input image whole that was sent as a URL."""
    temporal_call_timeout_seconds: float = Field(default=3.0, gt=0)
    """How long the API waits for one answer of Temporal before it answers 503."""
    max_wait_seconds: int = Field(default=60, ge=0, le=600)
    """Longest `Prefer: wait=n` of a submission."""
    delete_stop_seconds: float = Field(default=10.0, ge=0)
    """How long the hard cancel of a deleted task may take before its run is terminated."""
    trusted_proxies: CommaSeparated = ()
    """Addresses or networks whose `X-Forwarded-For` is believed by the request guard."""

    # --- Admission ----------------------------------------------------------------------------------------------
    max_pending_tasks: int = Field(default=3, ge=1)
    """Unfinished tasks per user."""
    tenant_max_pending_tasks: int | None = Field(default=None, ge=1)
    """Unfinished tasks over all end users of a service key; None: no tenant limit."""
    submit_rate_per_minute: float = Field(default=60.0, gt=0)
    """Submissions per user, sustained."""
    submit_burst: int = Field(default=20, ge=1)
    """Submissions per user in one go."""
    max_backlog: int = Field(default=1_000, ge=1)
    """Tasks waiting in a GPU pool above which new ones get 503 `QUEUE_FULL`."""
    tiers: dict[str, Tier] = Field(default_factory=lambda: {"standard": Tier()})
    """Tiers by name as JSON; a key names its tier. `standard` always exists."""

    # --- Batches ------------------------------------------------------------------------------------------------
    max_batch_items: int = Field(default=1_000, ge=1, le=1_000)
    """Items of one batch."""
    batch_parallelism: int = Field(default=2, ge=1, le=50)
    """Tasks of a batch that are open at a time; the batch itself holds one place of its user."""
    batch_deadline_seconds: float = Field(default=86_400.0, gt=0, le=604_800)
    """Deadline of a whole batch; a client may shorten it. At most the retention of its items."""

    # --- Limits of a task ---------------------------------------------------------------------------------------
    queue_timeout_seconds: float = Field(default=180.0, gt=0)
    """Wait in the queue before a task is requeued with raised priority."""
    max_requeues: int = Field(default=2, ge=0)
    """Requeues before `QUEUE_TIMEOUT`."""
    processing_timeout_seconds: float = Field(default=300.0, gt=0)
    """Soft limit of an attempt, counted from the end of the load phase."""
    processing_grace_seconds: float = Field(default=120.0, ge=0)
    """Past the soft limit, for an attempt whose step rate says that it will finish in time."""
    load_timeout_seconds: float = Field(default=600.0, gt=0)
    """Limit of the load phase."""
    encode_prompt_timeout_seconds: float = Field(default=60.0, gt=0)
    """Limit of the prompt encoding phase."""
    step_timeout_seconds: float = Field(default=60.0, gt=0)
    """Limit of a single denoising step."""
    decode_timeout_seconds: float = Field(default=120.0, gt=0)
    """Limit of the decode phase."""
    encode_store_timeout_seconds: float = Field(default=120.0, gt=0)
    """Limit of video encoding and upload together."""
    kill_grace_seconds: float = Field(default=10.0, gt=0)
    """How long a stopped inference process may take to answer before it is killed."""
    heartbeat_timeout_seconds: float = Field(default=10.0, gt=0)
    """Silence after which a worker counts as lost."""
    deadline_seconds: float = Field(default=1_800.0, gt=0)
    """Deadline of a whole task; a client may shorten it."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts that count, per task."""
    max_video_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    """Largest encoded clip."""

    # --- Models and GPU workers ---------------------------------------------------------------------------------
    models_file: Path | None = None
    """TOML file with `[[models]]` beside the built-in ones."""
    extra_models: CommaSeparated = ()
    """Built-in models that are off by default, e.g. `tiny-wan,tiny-ltx`."""
    pool: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """GPU pool that a GPU worker serves (task queue `gpu-<pool>`)."""
    devices: CommaSeparated = ("auto",)
    """Devices of a GPU worker, e.g. `cuda:0,cuda:1` or `cpu:0`; `auto`: every CUDA device, else one `cpu:0`."""
    processing_factor: float = Field(default=1.5, ge=1.0)
    """Tasks in PROCESSING per device of a worker: while one generates, others encode and upload."""
    preload_models: CommaSeparated = ()
    """Models that a GPU worker loads before it takes a task."""
    max_loaded_models: int = Field(default=2, ge=1)
    """Pipelines kept loaded per device; the least recently used makes room."""
    inference_threads: int | None = Field(default=None, ge=1)
    """Threads of one inference process for what runs on the CPU; None: half of the cores, shared by the CPU slots."""
    worker_name: str | None = None
    """Name of this host in worker ids; None: the host name."""
    worker_health_host: str = "127.0.0.1"
    """Address of a worker's health port."""
    worker_health_port: int | None = Field(default=None, ge=0, le=65535)
    """Health port of a worker (`GET /healthz`); None: off."""
    worker_drain_seconds: float = Field(default=60.0, ge=0)
    """After SIGTERM: how long running activities may go on before they are handed back."""
    worker_versioning: bool = False
    """Join the Worker Deployment of its pool (`reelgate-control`, `reelgate-callback`, `reelgate-gpu-<pool>`): such a
    worker gets nothing until its version is the current one, or has a share (`reelgate deploy`)."""
    build_id: str = Field(default_factory=installed_build_id, min_length=1, max_length=255)
    """Version of this worker in task records and in its Worker Deployment; by default package version and commit."""

    # --- Callbacks ----------------------------------------------------------------------------------------------
    callback_slots: int = Field(default=1_000, ge=1)
    """Deliveries in flight per callback worker."""
    callback_connections: int = Field(default=200, ge=1)
    """Connections of a callback worker's pool."""
    callback_keepalive_connections: int = Field(default=50, ge=0)
    """Connections kept open between deliveries."""
    callback_connect_timeout_seconds: float = Field(default=3.0, gt=0)
    """Time to connect to a receiver."""
    callback_timeout_seconds: float = Field(default=10.0, gt=0)
    """Time for a whole delivery attempt."""
    callback_endpoint_concurrency: int = Field(default=4, ge=1)
    """Deliveries to one endpoint at a time per callback worker, unless the endpoint has its own setting."""
    callback_ports: CommaSeparated = ("443", "8443")
    """Ports of receivers and image hosts outside the allowed networks."""
    callback_allowed_networks: CommaSeparated = Field(
        default_factory=lambda data: ("127.0.0.0/8", "::1/128") if data["environment"] == "development" else ()
    )
    """Networks that may be connected to whatever their class, by plain HTTP too; in development: loopback."""
    dns_ttl_seconds: float = Field(default=60.0, ge=0)
    """How long a receiver's addresses are used before the resolver is asked again."""
    dns_stale_seconds: float = Field(default=3_600.0, ge=0)
    """How long they are still used when the resolver fails."""

    # --- Traces -------------------------------------------------------------------------------------------------
    trace_exporter: Literal["none", "otlp", "file", "console"] = "none"
    """Where spans go (extra `otel`); `otlp` takes its address from the standard `OTEL_EXPORTER_OTLP_*` variables."""
    trace_file: Path = Field(default_factory=lambda data: data["data_dir"] / "traces.jsonl")
    """File for `trace_exporter=file`, one JSON span per line."""
    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Part of the traces that is kept; the same in all processes."""

    # --- Logs ---------------------------------------------------------------------------------------------------
    log_format: Literal["json", "console"] = "json"
    """One JSON object per line, or text for a terminal."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe line that is written."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Constructor, then `REELGATE_*`, then Temporal's own profile; no dotenv file, no secrets folder."""
        return init_settings, env_settings, TemporalProfileSource(settings_cls)

    @field_validator("callback_allowed_networks", "trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ip_network(network)
        return value

    @field_validator("callback_ports")
    @classmethod
    def _ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(port.isascii() and port.isdigit() for port in value):
            raise ValueError("port numbers separated by commas")
        return value

    @field_validator("codec_path_token")
    @classmethod
    def _path_segment(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", value.get_secret_value()):
            raise ValueError("letters, digits, `_` and `-`: it is a part of a path")
        return value

    @field_validator("public_url", "web_ui_url")
    @classmethod
    def _base_url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.temporal_tls_cert_file is None) != (self.temporal_tls_key_file is None):
            raise ValueError("temporal_tls_cert_file and temporal_tls_key_file belong together")
        if "standard" not in self.tiers:
            self.tiers["standard"] = Tier()
        return self

    @property
    def development(self) -> bool:
        """Whether this process belongs to a development set-up."""
        return self.environment == "development"

    @property
    def retention(self) -> timedelta:
        """How long artifacts and records are kept."""
        return timedelta(days=self.retention_days)

    @property
    def scratch_dir(self) -> Path:
        """Folder for files of running attempts; a worker empties its own part at start."""
        return self.data_dir / "scratch"

    def limits(self, *, deadline_seconds: float | None = None) -> Limits:
        """Limits of a new task; `deadline_seconds` is the client's own, which can only shorten ours."""
        deadline = self.deadline_seconds if deadline_seconds is None else min(deadline_seconds, self.deadline_seconds)
        return Limits(
            queue_timeout_seconds=self.queue_timeout_seconds,
            max_requeues=self.max_requeues,
            processing_timeout_seconds=self.processing_timeout_seconds,
            processing_grace_seconds=self.processing_grace_seconds,
            load_timeout_seconds=self.load_timeout_seconds,
            encode_prompt_timeout_seconds=self.encode_prompt_timeout_seconds,
            step_timeout_seconds=self.step_timeout_seconds,
            decode_timeout_seconds=self.decode_timeout_seconds,
            encode_store_timeout_seconds=self.encode_store_timeout_seconds,
            kill_grace_seconds=self.kill_grace_seconds,
            heartbeat_timeout_seconds=self.heartbeat_timeout_seconds,
            deadline_seconds=deadline,
            max_attempts=self.max_attempts,
            max_video_bytes=self.max_video_bytes,
        )

    def egress_policy(self) -> EgressPolicy:
        """Which URLs of clients (callbacks, image inputs) may be connected to."""
        return EgressPolicy(
            allowed_networks=tuple(map(ip_network, self.callback_allowed_networks)),
            ports=frozenset(map(int, self.callback_ports)),
        )

    def tier(self, name: str) -> Tier:
        """The tier of a key; an unknown name gets `standard`."""
        return self.tiers.get(name, self.tiers["standard"])

    def clear_store_options(self) -> dict[str, str]:
        """`store_options`, else those of the file, with their secrets in clear: for the store's constructor only.

        Raises:
            ConfigurationError: the file cannot be read, or is no JSON object of strings.
        """
        if self.store_options or self.store_options_file is None:
            return {name: value.get_secret_value() for name, value in self.store_options.items()}
        try:
            return _STORE_OPTIONS.validate_json(read_secret_file(self.store_options_file))
        except SecretFileError as error:
            raise ConfigurationError(f"{error} (REELGATE_STORE_OPTIONS_FILE)") from error
        except ValidationError:
            raise ConfigurationError(
                f"{self.store_options_file} is not a JSON object of strings (REELGATE_STORE_OPTIONS_FILE)"
            ) from None

    def web_ui_link(self, workflow_id: str) -> str:
        """Page of a workflow in the Temporal Web UI."""
        return f"{self.web_ui_url}/namespaces/{quote(self.namespace, safe='')}/workflows/{quote(workflow_id, safe='')}"


def load_settings(**changes: object) -> Settings:
    """Settings from the environment, with `changes` before it.

    Raises:
        ConfigurationError: a setting is wrong; the message names each wrong variable.
    """
    try:
        return Settings.model_validate(changes)
    except ValidationError as error:
        problems = error.errors(include_input=False)
        # A default that is made of a wrong setting is not wrong itself.
        wrong = [problem for problem in problems if problem["type"] != "default_factory_not_called"]
        raise ConfigurationError("\n".join(f"{_variable(p['loc'])}: {p['msg']}" for p in wrong)) from None
    except SettingsError as error:
        raise ConfigurationError(str(error)) from None


def _variable(place: tuple[int | str, ...]) -> str:
    return ".".join(["REELGATE_" + str(place[0]).upper(), *map(str, place[1:])]) if place else "settings"
