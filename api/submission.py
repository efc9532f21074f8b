"""Submitting a task: from a checked body to a durable job, once however often the request is sent.

A task id is a hash of the user and an idempotency key and has exactly one run, so Temporal itself makes parallel
equal submissions meet. What runs again is the next link of a chain: its id is a hash that includes the id of the
link that ended, so that parallel repeats meet there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from activities.egress_policy import EgressPolicy, UrlRefusedError
from activities.inference.catalogue import (
    AskedParameters,
    Catalogue,
    InvalidParametersError,
    ModelSpec,
    ResolvedParameters,
)
from activities.inference.catalogue import UnknownModelError as NotInCatalogueError
from api.auth import Caller
from api.chains import Chains
from api.images import ImageFetcher, ImageLimits, InputImage, InvalidImageError, load_image
from api.intake import Intake
from api.jobs import Job, Jobs
from api.problems import (
    FieldError,
    IdempotencyKeyReusedError,
    PriorityNotAllowedError,
    TemporalUnavailableError,
    UnknownModelError,
    ValidationFailedError,
)
from api.schemas import GENERATION_FIELDS, UNKEYED_FIELDS, Submit
from api.task_view import outcome_of
from workers.settings import Settings
from workflows import naming
from workflows.states import TaskStatus
from workflows.tasks import CallbackTarget, GenerationInput, TaskPriority

ENDS_WITHIN: Final = timedelta(seconds=3)
"""How long a canceled task that cannot be taken back is waited for: a step and what follows it."""
MAX_ROUNDS: Final = 5
"""Each round lost means that another request moved the chain on in the same moment."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The task that answers a submission."""

    job: Job
    replayed: bool
    """It existed already."""


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A request that breaks no rule."""

    body: Submit
    spec: ModelSpec
    parameters: ResolvedParameters
    image: InputImage | None
    callback: CallbackTarget | None
    priority: TaskPriority
    fields: dict[str, Any]
    """Every field sent, the image as its hash."""

    @property
    def regenerate(self) -> bool:
        """Another clip of the same prompt is asked for."""
        return bool(self.body.regenerate)


class Submissions:
    """Accepts tasks.

    Args:
        jobs: the tasks there are.
        chains: what was started for a key.
        catalogue: the models on offer.
        settings: limits and tiers.
        egress: where callbacks may go.
        fetch_image: reads input images that are sent as URLs.
        intake: starts the new ones.
    """

    def __init__(
        self,
        *,
        jobs: Jobs,
        chains: Chains,
        catalogue: Catalogue,
        settings: Settings,
        egress: EgressPolicy,
        fetch_image: ImageFetcher,
        intake: Intake,
    ) -> None:
        self._jobs = jobs
        self._chains = chains
        self._catalogue = catalogue
        self._settings = settings
        self._egress = egress
        self._fetch_image = fetch_image
        self._intake = intake

    async def submit(self, caller: Caller, body: Submit, idempotency_key: str | None) -> Submitted:
        """Start the task that the request asks for, or find the one that answers it.

        Args:
            caller: who asks.
            body: what was sent.
            idempotency_key: the client's own; None derives one from what was sent.

        Raises:
            GatewayError: the request is refused, or Temporal or the store does not answer in time.
        """
        user = caller.user
        checked = await self.check(caller, body)
        if idempotency_key is not None:
            key = naming.explicit_key(idempotency_key)
        else:
            key = naming.derived_key({k: v for k, v in checked.fields.items() if k not in UNKEYED_FIELDS})
        self._intake.look_ahead(checked.spec.pool)
        for _ in range(MAX_ROUNDS):
            chain = await self._chains.links(user, key)
            answer = await self._answer(chain, checked, explicit=idempotency_key is not None)
            if answer is not None:
                return Submitted(job=answer, replayed=True)
            newest = chain[-1].request.task_id if chain else None
            request = self._request(caller, checked, key, after=newest, explicit=idempotency_key is not None)
            if await self._intake.start(caller, request, checked.image):
                job = Job(request=request, status=TaskStatus.QUEUED, opened_at=request.accepted_at)
                return Submitted(job=job, replayed=False)
        raise TemporalUnavailableError("Too many equal requests at the same time; repeat this one.")

    async def check(self, caller: Caller, body: Submit) -> CheckedRequest:
        """Check the whole request; nothing has been stored yet.

        Raises:
            ValidationFailedError: it breaks rules; all of them are named.
            PriorityNotAllowedError: the tier does not reach the priority.
        """
        priority = self._priority(caller, body)
        try:
            spec = self._catalogue.get(body.model or self._catalogue.default)
        except NotInCatalogueError as error:
            rule = FieldError(field="model", rule="known_model", message=str(error))
            raise UnknownModelError(str(error), errors=[rule]) from None
        broken: list[FieldError] = []
        callback = self._callback(body, broken)
        image = await self._image(body, broken)
        if body.deadline_seconds is not None and body.deadline_seconds > self._settings.deadline_seconds:
            message = f"can only shorten the deadline of {self._settings.deadline_seconds:g} seconds"
            broken.append(FieldError(field="deadline_seconds", rule="maximum", message=message))
        try:
            parameters = self._catalogue.resolve(spec, _asked(body))
        except InvalidParametersError as error:
            broken += [FieldError(field=v.field, rule=v.rule, message=v.message) for v in error.violations]
        if broken:
            names = ", ".join(dict.fromkeys(error.field for error in broken))
            raise ValidationFailedError(f"Model {spec.name} cannot make this: {names}.", errors=broken)
        return CheckedRequest(
            body=body,
            spec=spec,
            parameters=parameters,
            image=image,
            callback=callback,
            priority=priority,
            fields=body.sent_fields(image.sha256 if image else None),
        )

    def _priority(self, caller: Caller, body: Submit) -> TaskPriority:
        """The priority asked for; a request that names none gets normal, or the tier's highest below it."""
        highest = self._settings.tier(caller.key.tier).max_priority
        asked = body.priority or TaskPriority.NORMAL
        if naming.PRIORITY_KEYS[asked] >= naming.PRIORITY_KEYS[highest]:
            return asked
        if body.priority is None:
            return highest
        raise PriorityNotAllowedError(f"The key's tier allows at most priority {highest}.")

    def _callback(self, body: Submit, broken: list[FieldError]) -> CallbackTarget | None:
        if body.callback_url is None:
            return None
        try:
            self._egress.check_url(body.callback_url)
        except UrlRefusedError as error:
            broken.append(FieldError(field="callback_url", rule=error.rule, message=str(error)))
            return None
        if body.callback_events is None:
            return CallbackTarget(url=body.callback_url)
        return CallbackTarget(url=body.callback_url, events=tuple(body.callback_events))

    async def _image(self, body: Submit, broken: list[FieldError]) -> InputImage | None:
        if body.image is None:
            return None
        limits = ImageLimits(max_bytes=self._settings.max_image_bytes, max_pixels=self._settings.max_image_pixels)
        try:
            return await load_image(body.image, limits, fetch=self._fetch_image)
        except InvalidImageError as error:
            broken.append(FieldError(field="image", rule=error.rule, message=error.message))
            return None

    async def _answer(self, chain: list[Job], checked: CheckedRequest, *, explicit: bool) -> Job | None:
        """The task that answers the request, or None when a new link is to start.

        Raises:
            IdempotencyKeyReusedError: the client's key belongs to another request.
        """
        if not chain:
            return None
        newest = chain[-1]
        if explicit:
            if newest.request.fingerprint != naming.fingerprint(checked.fields):
                raise IdempotencyKeyReusedError(
                    f"The Idempotency-Key belongs to task {newest.request.task_id}, which was sent with another body."
                )
            # In whatever state: a repeat by the network must not undo a cancel.
            return newest
        if newest.closing is None:
            return await self._alive(newest)
        if checked.regenerate:
            return None
        return next((job for job in reversed(chain) if _still_answers(job)), None)

    async def _alive(self, job: Job) -> Job | None:
        """The open job; a soft cancel of it is taken back."""
        if job.status is not TaskStatus.CANCELED:
            return job
        if not await self._jobs.revive(job.request.task_id):
            # It is about to end, and only its end says whether it has a clip.
            await self._jobs.wait_closed(job.request.task_id, ENDS_WITHIN)
        # Revived or ended: what it is now decides, and a closed one starts another round.
        current = await self._jobs.describe(job.request.task_id)
        if current is None or (current.closing is not None and not _still_answers(current)):
            return None
        return current

    def _request(
        self, caller: Caller, checked: CheckedRequest, key: str, *, after: str | None, explicit: bool
    ) -> GenerationInput:
        user = caller.user
        if explicit or checked.regenerate:
            seed = naming.task_seed(naming.task_id(user, key, after=after))
        else:
            seed = naming.derived_seed(user, {k: v for k, v in checked.fields.items() if k in GENERATION_FIELDS})
        return self.plan(caller, checked, key, seed=seed, after=after)

    def plan(
        self, caller: Caller, checked: CheckedRequest, key: str, *, seed: int, after: str | None = None
    ) -> GenerationInput:
        """What the task of a request starts with, but for its places.

        Args:
            caller: whose task it is.
            checked: the request.
            key: its idempotency key.
            seed: used where the client sent none.
            after: the task before it in its chain.
        """
        user, body, spec = caller.user, checked.body, checked.spec
        task_id = naming.task_id(user, key, after=after)
        image = checked.image
        parameters = checked.parameters.with_seed(
            seed,
            image_key=naming.input_key(user, image.sha256) if image else None,
            image_sha256=image.sha256 if image else None,
        )
        return GenerationInput(
            task_id=task_id,
            user=user,
            parameters=parameters,
            model_revision=spec.revision,
            pool=spec.pool,
            artifact_key=naming.artifact_key(user, parameters, spec.revision),
            accepted_at=datetime.now(UTC),
            priority=checked.priority,
            fairness_weight=self._settings.tier(caller.key.tier).fairness_weight,
            limits=self._settings.limits(deadline_seconds=body.deadline_seconds),
            callback=checked.callback,
            labels=tuple(body.labels or ()),
            idempotency_key=key,
            fingerprint=naming.fingerprint(checked.fields),
            retry_of=after,
        )


def _asked(body: Submit) -> AskedParameters:
    return AskedParameters(
        prompt=body.prompt,
        negative_prompt=body.negative_prompt,
        width=body.width,
        height=body.height,
        num_frames=body.num_frames,
        fps=body.fps,
        num_inference_steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        seed=body.seed,
        has_image=body.image is not None,
    )


def _still_answers(job: Job) -> bool:
    """Whether an ended task has a clip to answer with."""
    if outcome_of(job).status is not TaskStatus.SUCCEEDED:
        return False
    artifact = job.record.artifact if job.record else None
    return artifact is None or artifact.expires_at > datetime.now(UTC)
