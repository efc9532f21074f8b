"""What a running API is made of: built once by the lifespan, handed to the routes as typed state."""

from __future__ import annotations

from collections.abc import Callable
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
from api.admission_outcomes import CountedAdmission, CountedBacklog
from api.batch_callbacks import BatchCallbacks
from api.batch_jobs import BatchJobs
from api.batch_listing import BatchListing
from api.batch_removals import BatchRemovals
from api.batch_submission import BatchSubmissions
from api.batches import Batches
from api.chains import Chains
from api.cursors import Cursors
from api.deliveries import Deliveries
from api.event_stream import EventHub
from api.fleet import Fleet
from api.images import ImageFetcher
from api.intake import Intake
from api.jobs import Jobs
from api.listing import Listing
from api.metrics import MetricsPage
from api.queue_statistics import Queues
from api.readiness import ReadinessProbe
from api.readings import Readings
from api.redelivery import RangeRedelivery
from api.redrive import RedriveRuns
from api.removals import Removals
from api.request_plan import RequestPlans
from api.retries import Retries
from api.roster import Roster
from api.signature_check import SignatureCheck
from api.statistics import Statistics
from api.submission import Submissions
from api.task_view import TaskViews
from api.timeline import Timelines
from api.usage import UsageReports
from api.visibility import VisibilityPages
from api.waiting import Waiting
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
    batch_submissions: BatchSubmissions
    batches: Batches
    batch_callbacks: BatchCallbacks
    batch_listing: BatchListing
    batch_removals: BatchRemovals
    actions: Actions
    retries: Retries
    removals: Removals
    timelines: Timelines
    deliveries: Deliveries
    range_redelivery: RangeRedelivery
    redrive: RedriveRuns
    listing: Listing
    views: TaskViews
    readiness: ReadinessProbe
    events: EventHub
    usage: UsageReports
    statistics: Statistics
    roster: Roster


class AppState(TypedDict):
    """State of the application, as the lifespan yields it."""

    gateway: Gateway
    keys: KeyRing
    signatures: SignatureCheck
    metrics_page: MetricsPage


def build_gateway(
    settings: Settings,
    *,
    client: Client,
    store: ObjectStore,
    links: SignedLinks,
    cursors: Cursors,
    catalogue: Catalogue,
    egress: EgressPolicy,
    fetch_image: ImageFetcher,
    admission: Admission | None = None,
    count_admission: Callable[[str], None],
) -> Gateway:
    """Put the parts together; without an `admission`, that of the settings' tiers. Its outcomes are counted."""
    call_limit = timedelta(seconds=settings.temporal_call_timeout_seconds)
    pages = VisibilityPages(client, cursors=cursors, call_limit=call_limit)
    jobs = Jobs(client, call_limit=call_limit)
    chains = Chains(jobs)
    fleet = Fleet(
        client,
        heartbeat=timedelta(seconds=settings.worker_heartbeat_seconds),
        slots_per_device=settings.processing_factor,
    )
    queues = Queues(client, fleet=fleet, catalogue=catalogue)
    views = TaskViews(settings, links, catalogue)
    waiting = Waiting(client, catalogue=catalogue)
    readings = Readings(jobs=jobs, views=views, fleet=fleet, queues=queues, waiting=waiting)
    admission = CountedAdmission(admission or TierAdmission(client, settings=settings, queues=queues), count_admission)
    backlog = CountedBacklog(queues, max_backlog=settings.max_backlog, count=count_admission)
    intake = Intake(jobs=jobs, store=store, admission=admission, backlog=backlog)
    plans = RequestPlans(catalogue=catalogue, settings=settings, egress=egress, fetch_image=fetch_image)
    submissions = Submissions(jobs=jobs, chains=chains, plans=plans, intake=intake)
    batch_jobs = BatchJobs(client, call_limit=call_limit)
    batch_submissions = BatchSubmissions(
        jobs=batch_jobs,
        plans=plans,
        admission=admission,
        backlog=backlog,
        store=store,
        egress=egress,
        settings=settings,
    )
    retries = Retries(chains=chains, readings=readings, intake=intake, catalogue=catalogue)
    batches = Batches(batch_jobs=batch_jobs, jobs=jobs, submissions=batch_submissions, views=views, settings=settings)
    deliveries = Deliveries(client, jobs=jobs, readings=readings, egress=egress, call_limit=call_limit)
    stop_limit = timedelta(seconds=settings.delete_stop_seconds)
    removals = Removals(
        client,
        jobs=jobs,
        readings=readings,
        deliveries=deliveries,
        store=store,
        retention=settings.retention,
        stop_limit=stop_limit,
        call_limit=call_limit,
    )
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
        submissions=submissions,
        batch_submissions=batch_submissions,
        batches=batches,
        batch_callbacks=BatchCallbacks(batches=batches, deliveries=deliveries),
        batch_listing=BatchListing(batch_jobs=batch_jobs, batches=batches, pages=pages),
        batch_removals=BatchRemovals(
            client,
            batch_jobs=batch_jobs,
            batches=batches,
            jobs=jobs,
            removals=removals,
            store=store,
            call_limit=call_limit,
        ),
        actions=Actions(jobs=jobs, readings=readings),
        retries=retries,
        removals=removals,
        timelines=Timelines(client, readings=readings, call_limit=call_limit),
        deliveries=deliveries,
        range_redelivery=RangeRedelivery(
            jobs=jobs, batch_jobs=batch_jobs, readings=readings, deliveries=deliveries, pages=pages
        ),
        redrive=RedriveRuns(
            client,
            jobs=jobs,
            chains=chains,
            retries=retries,
            queues=queues,
            backlog=backlog,
            pages=pages,
            call_limit=call_limit,
        ),
        listing=Listing(jobs=jobs, views=views, pages=pages),
        views=views,
        readiness=ReadinessProbe(client, store),
        events=EventHub(client, jobs=jobs, readings=readings, call_limit=call_limit),
        usage=UsageReports(client, settings),
        statistics=Statistics(client, call_limit=call_limit),
        roster=Roster(client, jobs=jobs, fleet=fleet, call_limit=call_limit),
    )


async def _gateway(request: Request) -> Gateway:
    return cast(Gateway, request.state.gateway)


AppGateway = Annotated[Gateway, Depends(_gateway)]
"""The gateway, as a parameter of a route."""
