"""The least that "generate, then call back" can be: a bare workflow of two empty activities.

A module of its own, so that the sandbox has nothing else to import.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import activity, workflow

BARE_QUEUE = "bare"


@activity.defn
async def first(text: str) -> str:
    """Nothing."""
    return text


@activity.defn
async def second(text: str) -> str:
    """Nothing."""
    return text


@workflow.defn
class BareWorkflow:
    """Two activities in a row: the least that "generate, then call back" can be."""

    @workflow.run
    async def run(self, text: str) -> str:
        """Do both."""
        limit = timedelta(seconds=60)
        text = await workflow.execute_activity(first, text, start_to_close_timeout=limit)
        return await workflow.execute_activity(second, text, start_to_close_timeout=limit)
