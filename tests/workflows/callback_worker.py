"""A callback worker as a process of its own, for the test that kills it: `python -m ... ADDRESS`."""

from __future__ import annotations

import asyncio
import sys

from temporalio.client import Client

from tests.activities.couriers import courier
from tests.workflows.jobs import callback_worker


async def main(address: str) -> None:
    """Deliver callbacks until killed."""
    client = await Client.connect(address)
    async with courier(total_timeout=60) as sender:
        await callback_worker(client, sender.delivery).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
