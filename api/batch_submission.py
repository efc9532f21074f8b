"""Submitting a batch: every item checked by itself, then one place, one object with the items, one durable run.

A batch has an idempotency key and a chain as a task has. What differs: a batch that was posted with a derived key
runs again unless every item has its clip, and the clips that are there answer then, because the items' own keys have
the first batch of the chain in them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from temporalio.service import RPCError

from activities.batches import ITEMS_TYPE, items_body
from activities.egress_policy import EgressPolicy, UrlRefusedError
from activities.storage import ObjectNotFoundError, ObjectStore, StoreUnavailableError
from api.admission import Admission
from api.admission_client import Grant
from api.auth import Caller
from api.backlog import Backlog
from api.batch_jobs import BatchJob, BatchJobs
from api.batch_schemas import OnInvalid, SubmitBatch
from api.images import InputImage
from api.problem_handlers import field_error
from api.problems import (
    FieldError,
    IdempotencyKeyReusedError,
    PriorityNotAllowedError,
    StorageUnavailableError,
    TemporalUnavailableError,
    ValidationFailedError,
)
from api.request_plan import CheckedRequest, RequestPlans
from api.schemas import UNKEYED_FIELDS, Submit
from api.submission import MAX_ROUNDS
from workers.settings import Settings
from workflows import naming
from workflows.batches import CONTENT_DIGITS, BatchInput, ItemState
from workflows.tasks import CallbackTarget, GenerationInput

MAX_NAMED_ERRORS: Final = 200
_PARALLEL_CHECKS: Final = 8
_JSON: Final = "application/json"

REPORT: Final = TypeAdapter(dict[int, list[FieldError]])
"""Rules that rejected items broke, by index."""


@dataclass(frozen=True, kw_only=True)
class SubmittedBatch:
    """The batch that answers a submission."""

    job: BatchJob
    replayed: bool
    """It existed already."""


@dataclass(frozen=True, kw_only=True)
class _Posted:
    """A batch whose items have been checked."""

    body: SubmitBatch
    items: Sequence[CheckedRequest | None]
    """None: it broke a rule."""
    rejected: Mapping[int, list[FieldError]]
    callback: CallbackTarget | None
    fields: Sequence[Mapping[str, Any]]
    """What was sent for each item, images as their hashes; for a rejected one only a hash of it."""
    images: Mapping[str, InputImage] = field(default_factory=dict)
    """Input images by hash."""

    @property
    def keyed(self) -> list[dict[str, Any]]:
        """What makes an item another one."""
        return [{k: v for k, v in sent.items() if k not in UNKEYED_FIELDS} for sent in self.fields]

    @property
    def fingerprint(self) -> str:
        """Hash of everything that was sent."""
        around = self.body.model_dump(mode="json", exclude={"items"}, exclude_none=True)
        return naming.fingerprint({**around, "items": [dict(sent) for sent in self.fields]})


class BatchSubmissions:
    """Accepts batches.

    Args:
        jobs: the batches there are.
        plans: checks items as it checks single requests.
        admission: gives the place.
        backlog: keeps the queues bounded.
        store: where items and input images go.
        egress: where callbacks may go.
        settings: limits and tiers.
    """

    def __init__(
        self,
        *,
        jobs: BatchJobs,
        plans: RequestPlans,
        admission: Admission,
        backlog: Backlog,
        store: ObjectStore,
        egress: EgressPolicy,
        settings: Settings,
    ) -> None:
        self._jobs = jobs
        self._plans = plans
        self._admission = admission
        self._backlog = backlog
        self._store = store
        self._egress = egress
        self._settings = settings

    async def submit(self, caller: Caller, body: SubmitBatch, idempotency_key: str | None) -> SubmittedBatch:
        """Start the batch that the request asks for, or find the one that answers it.

        Raises:
            ValidationFailedError: items break rules and are not to be skipped, or none is left.
            GatewayError: the request is refused, or Temporal or the store does not answer in time.
        """
        user = caller.user
        posted = await self._check(caller, body)
        if idempotency_key is not None:
            key = naming.explicit_key(idempotency_key)
        else:
            key = naming.derived_key({"items": posted.keyed, "callback_url": body.callback_url})
        for _ in range(MAX_ROUNDS):
            chain = await self._jobs.chain(user, key)
            answer = _answer(chain, posted, explicit=idempotency_key is not None)
            if answer is not None:
                return SubmittedBatch(job=answer, replayed=True)
            request, plans = self._request(caller, posted, key, chain)
            if (started := await self._start(caller, posted, request, plans)) is not None:
                return SubmittedBatch(job=BatchJob(request=started), replayed=False)
        raise TemporalUnavailableError("Too many equal requests at the same time; repeat this one.")

    async def report(self, request: BatchInput) -> Mapping[int, list[FieldError]]:
        """The rules that rejected items of a batch broke; empty when retention has removed them.

        Raises:
            StorageUnavailableError: the store did not answer.
        """
        if request.report_key is None:
            return {}
        try:
            return REPORT.validate_json(await self._store.get(request.report_key))
        except ObjectNotFoundError:
            return {}
        except StoreUnavailableError as error:
            raise StorageUnavailableError from error

    async def _check(self, caller: Caller, body: SubmitBatch) -> _Posted:
        """Check the whole batch; nothing has been stored yet."""
        self._check_frame(body)
        turns = asyncio.Semaphore(_PARALLEL_CHECKS)

        async def check(item: dict[str, Any]) -> CheckedRequest | list[FieldError]:
            async with turns:
                # A thousand items take a while; other requests go on meanwhile.
                await asyncio.sleep(0)
                return await self._check_item(caller, item)

        checked = await asyncio.gather(*(check(item) for item in body.items))
        rejected = {index: item for index, item in enumerate(checked) if isinstance(item, list)}
        if rejected and (body.on_invalid is OnInvalid.REJECT_ALL or len(rejected) == len(checked)):
            raise _refusal(rejected, len(checked))
        accepted = [item if isinstance(item, CheckedRequest) else None for item in checked]
        return _Posted(
            body=body,
            items=accepted,
            rejected=rejected,
            callback=CallbackTarget(url=body.callback_url) if body.callback_url else None,
            fields=[
                item.fields if item is not None else {"rejected": _hash(sent)}
                for item, sent in zip(accepted, body.items, strict=True)
            ],
            images={item.image.sha256: item.image for item in accepted if item is not None and item.image is not None},
        )

    def _check_frame(self, body: SubmitBatch) -> None:
        limit, longest = self._settings.max_batch_items, self._settings.batch_deadline_seconds
        if len(body.items) > limit:
            raise ValidationFailedError.of("items", "too_long", f"may have at most {limit} entries")
        if body.deadline_seconds is not None and body.deadline_seconds > longest:
            message = f"can only shorten the deadline of {longest:g} seconds"
            raise ValidationFailedError.of("deadline_seconds", "maximum", message)
        if body.callback_url is not None:
            try:
                self._egress.check_url(body.callback_url)
            except UrlRefusedError as error:
                raise ValidationFailedError.of("callback_url", error.rule, str(error)) from None

    async def _check_item(self, caller: Caller, item: dict[str, Any]) -> CheckedRequest | list[FieldError]:
        try:
            body = Submit.model_validate(item)
            if body.regenerate:
                message = "a batch makes a clip of its own for each item; post it as another batch for other clips"
                return [FieldError(field="regenerate", rule="not_in_batch", message=message)]
            return await self._plans.check(caller, body)
        except ValidationError as error:
            return [field_error(entry) for entry in error.errors(include_url=False)]
        except ValidationFailedError as error:
            return list(error.errors)
        except PriorityNotAllowedError as error:
            return [FieldError(field="priority", rule="tier", message=error.detail)]

    def _request(
        self, caller: Caller, posted: _Posted, key: str, chain: Sequence[BatchJob]
    ) -> tuple[BatchInput, list[GenerationInput | None]]:
        user, after = caller.user, chain[-1].request.batch_id if chain else None
        batch_id = naming.batch_id(user, key, after=after)
        root_id = chain[0].request.root_id if chain else batch_id
        contents = [naming.fingerprint(sent)[:CONTENT_DIGITS] for sent in posted.keyed]
        accepted_at = datetime.now(UTC)
        plans: list[GenerationInput | None] = []
        for index, (checked, content) in enumerate(zip(posted.items, contents, strict=True)):
            if checked is None:
                plans.append(None)
                continue
            item_key = naming.batch_item_key(root_id, index, content)
            seed = naming.batch_item_seed(root_id, index, content)
            plan = self._plans.plan(caller, checked, item_key, seed=seed)
            plans.append(replace(plan, batch_id=batch_id, accepted_at=accepted_at))
        tier = self._settings.tier(caller.key.tier)
        return (
            BatchInput(
                batch_id=batch_id,
                root_id=root_id,
                user=user,
                items_key=naming.batch_items_key(user, batch_id),
                states="".join(ItemState.REJECTED if plan is None else ItemState.CREATED for plan in plans),
                contents="".join(contents),
                accepted_at=accepted_at,
                deadline_seconds=posted.body.deadline_seconds or self._settings.batch_deadline_seconds,
                url=f"{self._settings.public_url}/api/v1/batches/{batch_id}",
                parallelism=tier.batch_parallelism or self._settings.batch_parallelism,
                callback=posted.callback,
                report_key=naming.batch_report_key(user, batch_id) if posted.rejected else None,
                idempotency_key=key,
                fingerprint=posted.fingerprint,
                retry_of=after,
            ),
            plans,
        )

    async def _start(
        self, caller: Caller, posted: _Posted, request: BatchInput, plans: Sequence[GenerationInput | None]
    ) -> BatchInput | None:
        """Start a new batch; None when there is a run of this id already.

        Order as for a task: queues, place, objects, run.
        """
        accepted = [plan for plan in plans if plan is not None]
        for plan in {plan.pool: plan for plan in accepted}.values():
            await self._backlog.check(plan)
        # One place for the whole batch, whatever it holds.
        grant = await self._admission.admit(caller, replace(accepted[0], task_id=request.batch_id))
        try:
            await self._keep(request, posted, plans)
            admitted = replace(request, places=grant.places)
            started = await self._jobs.start(admitted)
        except (StorageUnavailableError, RPCError):
            await self._admission.withdraw(grant)
            raise
        if not started:
            await self._withdraw_unused(grant)
            return None
        return admitted

    async def _keep(self, request: BatchInput, posted: _Posted, plans: Sequence[GenerationInput | None]) -> None:
        try:
            for image in posted.images.values():
                key = naming.input_key(request.user, image.sha256)
                await self._store.put(key, image.content, content_type=image.media_type)
            if request.report_key is not None:
                report = REPORT.dump_json(dict(posted.rejected))
                await self._store.put(request.report_key, report, content_type=_JSON)
            await self._store.put(request.items_key, items_body(plans), content_type=ITEMS_TYPE)
        except StoreUnavailableError as error:
            raise StorageUnavailableError from error

    async def _withdraw_unused(self, grant: Grant) -> None:
        """An equal submission started the batch; the places that the open run carries are in use."""
        job = await self._jobs.describe(grant.task_id)
        used = set(job.request.places) if job is not None and not job.has_ended else set()
        unused = tuple(place for place in grant.places if place not in used)
        if unused:
            await self._admission.withdraw(replace(grant, places=unused))


def _answer(chain: Sequence[BatchJob], posted: _Posted, *, explicit: bool) -> BatchJob | None:
    """The batch that answers the request, or None when a new one is to start.

    Raises:
        IdempotencyKeyReusedError: the client's key belongs to another request.
    """
    if not chain:
        return None
    newest = chain[-1]
    if explicit:
        if newest.request.fingerprint != posted.fingerprint:
            raise IdempotencyKeyReusedError(
                f"The Idempotency-Key belongs to batch {newest.request.batch_id}, which was sent with another body."
            )
        # In whatever state: a repeat by the network must not start anything.
        return newest
    return None if newest.has_ended and not _has_every_clip(newest) else newest


def _has_every_clip(job: BatchJob) -> bool:
    return set(job.states) <= {ItemState.SUCCEEDED, ItemState.REJECTED}


def _refusal(rejected: Mapping[int, list[FieldError]], posted: int) -> ValidationFailedError:
    errors = [
        error.model_copy(update={"field": f"items.{index}.{error.field}"})
        for index, broken in rejected.items()
        for error in broken
    ]
    named = errors[:MAX_NAMED_ERRORS]
    rest = f", the first {len(named)} of {len(errors)} broken rules are named" if len(named) < len(errors) else ""
    return ValidationFailedError(f"{len(rejected)} of {posted} items break rules{rest}.", errors=named)


def _hash(sent: dict[str, Any]) -> str:
    # A lone surrogate is legal here: the item is rejected for it.
    with suppress(RecursionError):
        return naming.fingerprint(json.loads(json.dumps(sent, sort_keys=True)))
    return ""
