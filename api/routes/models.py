"""`/models`: what can be asked for, and whether anyone is there to make it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header

from activities.inference.catalogue import ModelSpec
from api.auth import DECLARED_IN_OPENAPI, AuthenticatedRoute
from api.problems import ForbiddenError, InternalError, RateLimitedError, UnauthenticatedError, problem_responses
from api.problems import ValidationFailedError as InvalidRequestError
from api.schemas import ModelInfo, ModelList
from api.state import AppGateway

router = APIRouter(
    prefix="/api/v1/models", tags=["models"], route_class=AuthenticatedRoute, dependencies=DECLARED_IN_OPENAPI
)


@router.get(
    "",
    summary="List the models",
    responses=problem_responses(
        UnauthenticatedError, ForbiddenError, InvalidRequestError, RateLimitedError, InternalError
    ),
)
async def list_models(gateway: AppGateway, _user: Annotated[str | None, Header(alias="X-User-Id")] = None) -> ModelList:
    """The catalogue, with what each pool's live workers can take."""
    pools = sorted({spec.pool for spec in gateway.catalogue})
    states = dict(zip(pools, await asyncio.gather(*map(gateway.fleet.pool, pools)), strict=True))
    loaded = {spec.name: await gateway.fleet.model(spec.name, pool=spec.pool) for spec in gateway.catalogue}
    return ModelList(
        items=[
            ModelInfo(
                name=spec.name,
                title=spec.title,
                family=spec.family,
                kind=spec.kind,
                revision=spec.revision,
                default=spec.name == gateway.catalogue.default,
                parameters=spec.schema(),
                examples=list(spec.examples),
                vocabulary=_words(spec),
                serving=states[spec.pool],
                loaded=loaded[spec.name],
            )
            for spec in gateway.catalogue
        ]
    )


def _words(spec: ModelSpec) -> dict[str, list[str]] | None:
    return None if spec.vocabulary is None else {topic.name: list(topic.words) for topic in spec.vocabulary.topics}
