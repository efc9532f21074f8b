"""`/metrics`: for Prometheus, without a key. It has numbers of the whole service and none of a user."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from workers.metrics import CONTENT_TYPE

router = APIRouter(tags=["health"])


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """In the Prometheus text format."""
    return Response(await request.state.metrics_page.text(), media_type=CONTENT_TYPE)
