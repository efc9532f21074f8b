"""What a running API is made of: built once by the lifespan, handed to the routes as typed state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, TypedDict, cast

from fastapi import Depends
from starlette.requests import Request
from temporalio.client import Client

from activities.egress_policy import EgressPolicy
from activities.inference.catalogue import Catalogue
from activities.storage import ObjectStore
from api.actions import Actions
from api.admission import Admission, TierAdmission
from api.backlog import Backlog
from api.cursors import Cursors
from api.event_stream import EventHub
from api.fleet import Fleet
from api.intake import Intake
from api.jobs import Jobs
from api.listing import Listing
from api.queue_statistics import Queues
from api.readiness import ReadinessProbe
from api.readings import Readings
from api.submission import Submissions
from api.task_view import TaskViews
from api.usage import UsageReports
from workers.keys import KeyRing
from workers.links import SignedLinks
from workers.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """The parts that routes use."""

    settings: Settings
    client: Client
    links: SignedLinks
    catalogue: Catalogue
    store: ObjectStore
    jobs: Jobs
    fleet: Fleet
    queues: Queues
    readings: Readings
    submissions: Submissions
    actions: Actions
    listing: Listing
    views: TaskViews
    readiness: ReadinessProbe
    events: EventHub
    usage: UsageReports


class AppState(TypedDict):
    """State of the application, as the lifespan yields it."""

    gateway: Gateway
    keys: KeyRing


def build_gateway(
    settings: Settings,
    *,
    client: Client,
    store: ObjectStore,
    links: SignedLinks,
    cursors: Cursors,
    catalogue: Catalogue,
    egress: EgressPolicy,
    admission: Admission | None = None,
) -> Gateway:
    """Put the parts together; without an `admission`, that of the settings' tiers."""
    call_limit = timedelta(seconds=settings.temporal_call_timeout_seconds)
    jobs = Jobs(client, call_limit=call_limit)
    fleet = Fleet(client, heartbeat=timedelta(seconds=settings.worker_heartbeat_seconds))
    queues = Queues(client, fleet=fleet, catalogue=catalogue)
    views = TaskViews(settings, links)
    readings = Readings(jobs=jobs, views=views, fleet=fleet)
    return Gateway(
        settings=settings,
        client=client,
        links=links,
        catalogue=catalogue,
        store=store,
        jobs=jobs,
        fleet=fleet,
        queues=queues,
        readings=readings,
        submissions=Submissions(
            jobs=jobs,
            catalogue=catalogue,
            settings=settings,
            egress=egress,
            intake=Intake(
                jobs=jobs,
                store=store,
                admission=admission or TierAdmission(client, settings=settings, queues=queues),
                backlog=Backlog(queues, max_backlog=settings.max_backlog),
            ),
        ),
        actions=Actions(jobs=jobs, readings=readings),
        listing=Listing(client, jobs=jobs, views=views, cursors=cursors, call_limit=call_limit),
        views=views,
        readiness=ReadinessProbe(client, store),
        events=EventHub(client, jobs=jobs, readings=readings, call_limit=call_limit),
        usage=UsageReports(client, settings),
    )


async def _gateway(request: Request) -> Gateway:
    return cast(Gateway, request.state.gateway)


AppGateway = Annotated[Gateway, Depends(_gateway)]
"""The gateway, as a parameter of a route."""
