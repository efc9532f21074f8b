"""`/healthz` and `/readyz`: for supervisors and load balancers, without a key."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Response

from api.schemas import Health, Readiness
from api.state import AppGateway

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Whether the process answers")
async def healthz() -> Health:
    """Asks nobody else."""
    return Health()


@router.get(
    "/readyz",
    summary="Whether Temporal and the store answer",
    responses={HTTPStatus.SERVICE_UNAVAILABLE: {"model": Readiness, "description": "One of them does not."}},
)
async def readyz(gateway: AppGateway, response: Response) -> Readiness:
    """503 while a dependency does not answer."""
    readiness = await gateway.readiness.readiness()
    if readiness.status != "ready":
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return readiness
