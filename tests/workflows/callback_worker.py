"""A callback worker as a process of its own, for the test that kills it: `python -m ... ADDRESS`."""

from __future__ import annotations

import asyncio
import sys

from temporalio.client import Client
from temporalio.worker import Worker

from tests.activities.couriers import courier
from workflows.naming import CALLBACK_QUEUE


async def main(address: str) -> None:
    """Deliver callbacks until killed."""
    client = await Client.connect(address)
    async with courier(total_timeout=60) as sender:
        await Worker(client, task_queue=CALLBACK_QUEUE, activities=[sender.delivery.deliver_callback]).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
