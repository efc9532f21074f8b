"""The metrics pages of all processes of one stack."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from api.cli_client import Access
from tests.api.stand import http_client


@dataclass(frozen=True)
class Pages:
    """The pages of one moment."""

    texts: Mapping[str, str]
    """By process: `api`, `control`, `callback`, `gpu`."""

    @cached_property
    def families(self) -> dict[str, Metric]:
        """All families, by the name of their samples' common part."""
        return {family.name: family for text in self.texts.values() for family in text_string_to_metric_families(text)}

    @cached_property
    def samples(self) -> dict[str, set[str]]:
        """Label names by name of the sample."""
        found: dict[str, set[str]] = {}
        for family in self.families.values():
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        return found

    def value(self, page: str, name: str, **labels: str) -> float | None:
        """A sample of a process."""
        for family in text_string_to_metric_families(self.texts[page]):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None


async def read_pages(access: Access) -> Pages:
    """Scrape the API and, where the workers say they are, their health ports."""
    assert access.api_key is not None
    async with http_client(headers={"Authorization": f"Bearer {access.api_key}"}) as http:
        texts = {"api": (await http.get(f"{access.url}/metrics")).raise_for_status().text}
        workers = (await http.get(f"{access.url}/api/v1/workers")).raise_for_status().json()["items"]
        for worker in workers:
            address = worker["identity"].rpartition(" health ")[2]
            page = await http.get(f"http://{address}/metrics")
            assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            texts[worker["kind"]] = page.raise_for_status().text
    return Pages(texts)


async def until_counted(access: Access) -> Pages:
    """The pages once a callback is counted, and the rates and the length of a task have come in."""
    async with asyncio.timeout(60):
        while True:
            pages = await read_pages(access)
            if (
                len(pages.texts) == 4
                and pages.value("callback", "reelgate_callbacks_ended_total", status="SUCCEEDED")
                and pages.value("api", "reelgate_queue_drain_seconds", queue="gpu-default") is not None
            ):
                return pages
            await asyncio.sleep(0.3)
