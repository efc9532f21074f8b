"""`reelgate usage` and `reelgate quota`: what a key or a user holds, has left and has used."""

from __future__ import annotations

from api.cli_output import EXIT_CONFIGURATION, CommandError, out
from api.cli_tasks import gateway
from api.usage_schemas import AmountUsed, Quota, Usage


def usage(*, as_json: bool) -> int:
    """Show the usage of the key's own user."""
    with gateway() as gate:
        found = gate.usage()
    if as_json:
        out.print_json(found.model_dump_json())
    else:
        _print(_usage_rows(found))
    return 0


def show(user: str, *, shared: bool, as_json: bool) -> int:
    """Show a user's account."""
    tenant, end_user = _account(user, shared=shared)
    with gateway() as gate:
        found = gate.quota(tenant, end_user, shared=shared)
    if as_json:
        out.print_json(found.model_dump_json())
    else:
        _print(_quota_rows(found))
    return 0


def reset(user: str, *, shared: bool) -> int:
    """Reset a user's account."""
    tenant, end_user = _account(user, shared=shared)
    with gateway() as gate:
        gate.reset_quota(tenant, end_user, shared=shared)
    out.print(f"the quota of {user}{' (shared)' if shared else ''} is reset", markup=False)
    return 0


def _account(user: str, *, shared: bool) -> tuple[str, str | None]:
    """`TENANT` or `TENANT/END_USER`; a tenant's name has no slash, an end user's id may have some.

    Raises:
        CommandError: an end user of the shared account.
    """
    tenant, _, end_user = user.partition("/")
    if shared and end_user:
        raise CommandError("--shared is the account of a whole tenant: give TENANT alone", EXIT_CONFIGURATION)
    return tenant, end_user or None


def _usage_rows(usage: Usage) -> list[tuple[str, str]]:
    pending, left, allowance = usage.pending, usage.submissions, usage.allowance
    rows = [
        ("tier", usage.tier),
        ("pending", f"{pending.used} of {pending.limit}"),
        *(("", task_id) for task_id in pending.task_ids),
        ("submissions", f"{left.available:g} of {left.burst} at once, {left.per_minute:g} per minute"),
        ("used", _amount(usage.used)),
    ]
    if usage.tenant_pending is not None:
        rows.append(("tenant", f"{usage.tenant_pending.used} of {usage.tenant_pending.limit} pending"))
    if allowance is not None:
        limits = [f"{allowance.tasks} tasks"] if allowance.tasks is not None else []
        limits += [f"{allowance.gpu_seconds:g} GPU seconds"] if allowance.gpu_seconds is not None else []
        rows.append(("allowance", f"{', '.join(limits)} until {allowance.ends_at:%F %H:%M} UTC"))
    return rows


def _quota_rows(quota: Quota) -> list[tuple[str, str]]:
    left = quota.submissions_available
    return [
        ("account", "/".join(filter(None, (quota.tenant, quota.end_user))) + (" (shared)" if quota.shared else "")),
        ("pending", str(quota.pending)),
        *(("", task_id) for task_id in quota.task_ids),
        ("submissions", "bucket full" if left is None else f"{left:g} in the bucket"),
        ("used", _amount(quota.used) if quota.used is not None else "not counted"),
    ]


def _amount(used: AmountUsed) -> str:
    return f"{used.tasks} tasks, {used.gpu_seconds:g} GPU seconds since {used.since:%F %H:%M} UTC"


def _print(rows: list[tuple[str, str]]) -> None:
    for name, value in rows:
        out.print(f"{name:>11}  ", style="dim", end="")
        out.print(value, markup=False)
