"""What a person does with tasks and batches that did not go as they should: retry, redeliver, stop the rest."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import httpx
import pytest

from tests.api.stand import Stand, http_client
from tests.browser.chromium import Page
from tests.browser.test_console import CONTRAST, STATUS, entered, own_only, real, submitted


@pytest.fixture
def user() -> str:
    return f"user-{uuid4().hex[:12]}"


def shows(selector: str, text: str) -> str:
    """An expression: the element shows the text."""
    return f"!!document.querySelector({selector!r})?.innerText.includes({text!r})"


async def test_a_failed_task_is_retried_and_its_attempts_are_told(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    failed = await submitted(page, "fail the first time")
    await page.until(f"{STATUS} === 'Failed'", timeout=30)
    await page.until("document.querySelector('.screen').innerText.includes('INVALID_OUTPUT')")
    row = "[...document.querySelectorAll('#stage [aria-label=Attempts] tbody td')].map(cell => cell.textContent)"
    number, worker, started, took, outcome = await page.until(f"({row}).length === 5 && {row}")
    assert (number, worker, outcome) == ("1", "easel/cpu:0", "INVALID_OUTPUT")
    assert ":" in started
    assert took.endswith(" s")
    await page.click(".actions .primary")
    await page.until(f"location.hash.split('/').pop() !== {failed!r}")
    retried = await page.evaluate("location.hash.split('/').pop()")
    await page.until(f"{STATUS} === 'Failed'", timeout=30)
    await page.until("document.querySelectorAll('#tasks li').length === 2")
    async with gallery.user(user) as http:
        assert (await http.get(f"/tasks/{retried}")).json()["retry_of"] == failed
    web_ui = await page.evaluate("document.querySelector('.actions a[target=_blank]').href")
    assert web_ui.endswith(f"/workflows/{retried}")
    # The way back is a link.
    await page.until("[...document.querySelectorAll('.facts a')].some(a => (a.closest('details').open = true))")
    await page.click(".facts a")
    await page.until(f"location.hash.endsWith({failed!r})")


async def test_a_callback_is_sent_again_and_shown(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    await page.evaluate("document.querySelector('#field-callback_url').closest('details').open = true")
    await page.click("#field-callback_url")
    await page.type("http://127.0.0.1:9/hook")
    task_id = await submitted(page, "with a callback")
    await page.until(f"{STATUS} === 'Succeeded'", timeout=30)
    await page.until("document.querySelector('#stage .more summary .pill.succeeded')?.textContent === 'Succeeded'")
    await page.click("#stage summary:has(.pill)")
    await page.until(shows("#stage [aria-label='Delivery attempts']", "200"))
    # What was sent does not make the page wider.
    await page.evaluate("document.querySelectorAll('#stage details').forEach(e => { e.open = true; })")
    await page.until("document.querySelector('#stage pre').innerText.includes('{')")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    await page.click("#stage details .actions button")
    await page.until("document.querySelector('#live').textContent === 'The callback is delivered again'")
    await page.until(shows("#stage", "Redelivery 1"))
    async with gallery.user(user) as http:
        found = (await http.get(f"/tasks/{task_id}/callback")).json()
    assert [later["number"] for later in found["redeliveries"]] == [1]
    assert real(page.complaints) == []


async def test_a_batch_shows_how_far_it_is_and_its_rest_is_stopped(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    assert await page.evaluate("document.querySelector('#batches').hidden")
    await submitted(page, "on its own")
    await page.until(f"{STATUS} === 'Succeeded'", timeout=30)
    async with gallery.user(user) as http:
        items = [{"prompt": prompt} for prompt in ("first of a batch", "hold the second", "hold third", "never")]
        batch = (await http.post("/batches", json={"items": items})).json()
        await listed(http)
        await page.send("Page.reload")
        await page.until(shows("#batch-list", "1 of 4 ended"), timeout=40)
        await page.click("#batch-list button")
        await page.until("document.querySelector('#library-title').textContent.startsWith('Tasks of b')")
        await page.until("document.querySelectorAll('#tasks li').length === 3", timeout=30)
        await page.click("#batch-list button")
        await page.until("document.querySelectorAll('#tasks li').length === 4", timeout=30)
        await page.click("#batch-list .danger")
        await page.until(shows("#batch-list", "4 of 4 ended, 3 without a clip"), timeout=40)
        assert (await http.get(f"/batches/{batch['batch_id']}")).json()["cancel_requested"] == "hard"
    await page.until("document.querySelectorAll('#batch-list .danger').length === 0")
    assert own_only(page, gallery), page.requests
    assert real(page.complaints) == []


async def listed(http: httpx.AsyncClient) -> None:
    """Return when the index has the batch."""
    async with asyncio.timeout(20):
        while not (await http.get("/batches")).json()["items"]:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("dark", [False, True])
async def test_queues_and_workers_are_shown_to_operators_on_a_phone_too(page: Page, gallery: Stand, dark: bool) -> None:
    await page.screen(width=360, height=740, dark=dark, mobile=True)
    async with http_client(f"{gallery.url}/api/v1", {"Authorization": f"Bearer {gallery.keys['operator']}"}) as http:
        held = (await http.post("/tasks", json={"prompt": f"hold for the operator {dark}"})).json()
        async with asyncio.timeout(30):
            while not any(worker["tasks"] for worker in (await http.get("/workers")).json()["items"]):
                await asyncio.sleep(0.1)
        await page.open(gallery.url)
        await page.until("document.activeElement.id === 'key'")
        await page.type(gallery.keys["operator"])
        await page.press("Enter")
        await page.until(shows("[aria-label=Queues]", "default"), timeout=30)
        await page.until(shows("[aria-label=Workers]", "gpu-default"), timeout=40)
        await page.until("document.querySelectorAll('[aria-label=Workers] td a').length > 0", timeout=40)
        assert await page.evaluate(shows("[aria-label=Workers]", "running"))
        await http.post(f"/tasks/{held['task_id']}/cancel", json={"mode": "hard"})
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await page.evaluate(CONTRAST) == []
    assert real(page.complaints) == []


async def test_without_a_mouse_a_clip_is_made_and_another_one_is_stopped(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    await page.evaluate("document.querySelector('.brand').focus()")
    await tab_to(page, "document.activeElement.id === 'field-prompt'")
    await page.type("hold from the keyboard")
    await tab_to(page, "document.activeElement.textContent === 'Generate'")
    await page.press("Enter")
    await page.until("!!document.querySelector('.actions .danger')")
    await tab_to(page, "document.activeElement.textContent === 'Stop now'")
    await page.until("document.querySelector('.doing').textContent.includes('of 25')")
    assert await page.evaluate("document.activeElement.textContent") == "Stop now", "it moved when the state changed"
    assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    await page.press("Enter")
    await page.until(f"{STATUS} === 'Canceled'", timeout=30)
    # The button is gone; who pressed it is still at the task.
    assert await page.evaluate("document.activeElement.id") == "stage"


async def tab_to(page: Page, reached: str) -> None:
    """Press Tab until something has the focus."""
    for _ in range(40):
        await page.press("Tab")
        if await page.evaluate(reached):
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{reached} is not reached by Tab")
