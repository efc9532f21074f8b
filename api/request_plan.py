"""From a request to the task that it asks for: every rule checked, every parameter resolved, nothing stored yet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

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
from api.images import ImageFetcher, ImageLimits, InputImage, InvalidImageError, load_image
from api.problems import FieldError, PriorityNotAllowedError, UnknownModelError, ValidationFailedError
from api.schemas import Submit
from workers.settings import Settings
from workflows import naming
from workflows.tasks import CallbackTarget, GenerationInput, TaskPriority


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


class RequestPlans:
    """Checks requests and makes tasks of them.

    Args:
        catalogue: the models on offer.
        settings: limits and tiers.
        egress: where callbacks may go.
        fetch_image: reads input images that are sent as URLs.
    """

    def __init__(
        self, *, catalogue: Catalogue, settings: Settings, egress: EgressPolicy, fetch_image: ImageFetcher
    ) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._egress = egress
        self._fetch_image = fetch_image

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
