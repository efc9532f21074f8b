"""Commands that talk to Temporal itself: one connection, one action, one exit code."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog
from temporalio.client import Client

from activities.deployments import DeploymentError
from api.cli_output import EXIT_CONFIGURATION, EXIT_INTERRUPTED, EXIT_REFUSED, CommandError, complain, leave
from api.problems import TemporalUnavailableError
from api.rollouts import RolloutError
from workers.connection import connect
from workers.errors import ConfigurationError
from workers.settings import Settings, load_settings


def with_temporal(name: str, act: Callable[[Client, Settings], Awaitable[None]]) -> NoReturn:
    """Connect with the settings of the workers, do one thing and end the process."""
    # Stdout is the answer's. What a connection warns of, the workers log too.
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    code = 0
    try:
        asyncio.run(_connected(name, act))
    except CommandError as error:
        code = error.code
        complain(str(error))
    except (DeploymentError, RolloutError) as error:
        code = EXIT_REFUSED
        complain(str(error))
    except ConfigurationError as error:
        code = EXIT_CONFIGURATION
        complain(str(error))
    except TemporalUnavailableError:
        code = EXIT_CONFIGURATION
        complain("Temporal did not answer in time")
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    leave(code)


async def _connected(name: str, act: Callable[[Client, Settings], Awaitable[None]]) -> None:
    settings = load_settings()
    await act(await connect(settings, identity=f"reelgate {name}"), settings)
