"""Checks of this machine: secrets, keys, store, versions and where callbacks may go. None needs Temporal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Final
from uuid import uuid4

from activities.storage import ObjectNotFoundError, StoreUnavailableError
from api.doctor.findings import Finding, broken, look, ok
from workers.codec import codec_from
from workers.devices import resolve_devices
from workers.errors import ConfigurationError
from workers.keys_file import Scope, read_keys_file
from workers.links import links_from
from workers.registry import catalogue, object_store
from workers.settings import Settings

TORCH: Final = "2.13.0"
PROBE_PREFIX: Final = "doctor"
"""Where the probe of the store is put, and removed."""


def secrets(settings: Settings) -> list[Finding]:
    """Payload keys, the secret of the result links, and API keys."""
    found = []
    try:
        ids = codec_from(settings).key_ids
    except ConfigurationError as error:
        remedy = "mount the deployment's key file: without its keys nothing that Temporal stores can be read"
        found.append(broken("codec key", str(error), remedy))
    else:
        others = f", also reads {', '.join(ids[1:])}" if ids[1:] else ""
        found.append(ok("codec key", f"writes with {ids[0]}{others}"))
    try:
        links_from(settings)
    except ConfigurationError as error:
        found.append(broken("link secret", str(error), "mount the same secret on every API and callback worker"))
    else:
        found.append(ok("link secret", "there is one"))
    found.append(_api_keys(settings))
    return found


def _api_keys(settings: Settings) -> Finding:
    try:
        keys = read_keys_file(settings.keys_file).keys
    except ConfigurationError as error:
        return broken("keys file", str(error), "reelgate keys create, or mount the deployment's keys.toml")
    live = [key for key in keys if key.live(datetime.now(UTC))]
    operators = sum(key.scope is Scope.OPERATOR for key in live)
    detail = f"{len(live)} live keys, {operators} of them operators'"
    if not live:
        return broken("keys file", detail, "reelgate keys create --tenant TENANT")
    unknown = sorted({key.tier for key in live} - set(settings.tiers) - {"standard"})
    if unknown:
        return broken("keys file", f"keys name tiers that do not exist: {', '.join(unknown)}", "set REELGATE_TIERS")
    if not operators:
        return look("keys file", detail, "redrive, workers and quota need one: reelgate keys create --scope operator")
    return ok("keys file", detail)


def models(settings: Settings) -> list[Finding]:
    """The catalogue."""
    try:
        offered = catalogue(settings)
    except ConfigurationError as error:
        return [broken("models", str(error), "correct the file or the setting; every process reads the same")]
    pools = sorted({spec.pool for spec in offered})
    return [ok("models", f"{len(list(offered))} models in pools {', '.join(pools)}")]


async def store(settings: Settings) -> Sequence[Finding]:
    """Put, read and delete a small object."""
    opened = object_store(settings)
    key, body = f"{PROBE_PREFIX}/{uuid4().hex}", uuid4().bytes
    step = "write"
    try:
        await opened.put(key, body, content_type="application/octet-stream")
        step = "read"
        if await opened.get(key) != body:
            return [broken("store", f"{opened.name} gives back something else than was put there", _STORE_REMEDY)]
        step = "delete"
        await opened.delete([key])
    except (StoreUnavailableError, ObjectNotFoundError) as error:
        return [broken("store", f"cannot {step}: {error}", _STORE_REMEDY)]
    return [ok("store", f"{opened.name}: written, read, deleted")]


_STORE_REMEDY: Final = (
    "look at the store itself, then at REELGATE_STORE_URL and REELGATE_STORE_OPTIONS; the key needs put, get and "
    "delete on the whole prefix"
)


async def versions(settings: Settings) -> Sequence[Finding]:
    """What this machine runs."""
    python = ".".join(map(str, sys.version_info[:3]))
    found = [ok("versions", f"reelgate {version('reelgate')}, temporalio {version('temporalio')}, python {python}")]
    devices = await asyncio.to_thread(resolve_devices, settings.devices)
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    gpus = [device for device in devices if device.startswith("cuda")]
    install = f"pip install 'reelgate[gpu]', which asks for torch=={TORCH}"
    if torch is None:
        if gpus:
            found.append(broken("torch", f"{len(gpus)} GPUs and no torch", install))
        else:
            found.append(ok("torch", "not installed; only GPU workers need it"))
    elif torch.partition("+")[0] != TORCH:
        found.append(broken("torch", f"{torch}; tried out is {TORCH}", install))
    else:
        found.append(ok("torch", f"{torch} for {', '.join(devices)}"))
    return found


def egress(settings: Settings) -> list[Finding]:
    """Where callbacks may go."""
    networks, ports = settings.callback_allowed_networks, ", ".join(settings.callback_ports)
    if not networks:
        return [ok("callback egress", f"public addresses over https, ports {ports}")]
    detail = f"{settings.environment}: {', '.join(networks)} over plain http and on any port, too"
    if settings.environment == "development":
        return [ok("callback egress", detail)]
    return [
        look(
            "callback egress",
            detail,
            "clients choose callback URLs: keep REELGATE_CALLBACK_ALLOWED_NETWORKS to networks where every server may "
            "be asked by them",
        )
    ]
