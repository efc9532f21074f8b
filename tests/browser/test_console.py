"""The console as a person uses it, in a real browser against a real gateway.

First what is done with tasks that go as they should, then with those and with batches that do not: retry, redeliver,
stop the rest.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.api.stand import Stand, http_client
from tests.browser.chromium import Page

STATUS = "document.querySelector('#stage .headline .pill')?.textContent"


async def entered(page: Page, gallery: Stand, *, user: str) -> None:
    """Open the console with a key of one end user."""
    await page.open(gallery.url)
    await page.until("!document.querySelector('#gate').hidden")
    await page.click("#gate summary")
    await page.click("#end-user")
    await page.type(user)
    await page.click("#key")
    await page.type(gallery.service_key)
    await page.press("Enter")
    await page.until("!document.querySelector('#studio').hidden")


async def submitted(page: Page, prompt: str) -> str:
    """Submit a prompt from the keyboard; returns the task id."""
    await page.evaluate("document.querySelector('#field-prompt').value = ''")
    await page.click("#field-prompt")
    await page.type(prompt)
    await page.press("Enter", modifiers=2)
    await page.until(f"document.querySelector('#stage-title').textContent === {prompt!r}")
    task_id: str = await page.evaluate("location.hash.split('/').pop()")
    return task_id


@pytest.fixture
def user() -> str:
    return f"user-{uuid4().hex[:12]}"


async def test_a_clip_is_submitted_watched_and_played_and_another_one_canceled(
    page: Page, gallery: Stand, user: str
) -> None:
    await entered(page, gallery, user=user)
    await page.click(".chip")
    assert await page.evaluate("document.querySelector('#field-prompt').value") == "a red circle moving right"
    await page.click("#compose .primary")

    seen = set()
    while not await page.evaluate("!!document.querySelector('video')"):
        seen.add(await page.evaluate("document.querySelector('progress')?.value"))
        await page.until("true")
    assert len({value for value in seen if value}) >= 2, f"the bar did not move: {seen}"
    await page.until(f"{STATUS} === 'Succeeded'")
    await page.until("document.querySelector('video').readyState >= 3")
    await page.until("document.querySelector('video').currentTime > 0.3")
    assert await page.evaluate(
        "[document.querySelector('video').videoWidth, document.querySelector('video').error]"
    ) == [
        128,
        None,
    ]
    assert await page.evaluate("[...document.querySelectorAll('.timeline .what')].map(e => e.textContent)") == [
        "Queued",
        "Processing",
        "Succeeded",
    ]
    assert await page.until("document.querySelector('#tasks img')?.naturalWidth") == 128

    soft = await submitted(page, "hold the first")
    await page.until("document.querySelector('.doing').textContent.includes('of 25')")
    await page.until("document.querySelector('.warnings').textContent.includes('knows none of these words')")
    await page.click(".actions button:nth-of-type(1)")
    await page.until(f"{STATUS} === 'Canceled (finishing)'")
    await page.click(".actions .danger")
    await page.until(f"{STATUS} === 'Canceled'")

    hard = await submitted(page, "hold the second")
    await page.until("document.querySelector('.doing').textContent.includes('of 25')")
    # It moves the buttons down: a click before it may miss them.
    await page.until("document.querySelector('.warnings').textContent.includes('knows none of these words')")
    await page.click(".actions .danger")
    await page.until(f"{STATUS} === 'Canceled'")
    await page.until("document.querySelector('.screen').innerText.includes('CANCELED')")

    async with gallery.user(user) as http:
        for task_id in (soft, hard):
            task = (await http.get(f"/tasks/{task_id}")).json()
            assert (task["status"], task["is_terminal"], task["result_url"]) == ("CANCELED", True, None)
    assert await page.until("document.querySelectorAll('#tasks li').length === 3")
    assert own_only(page, gallery), page.requests
    assert real(page.complaints) == []


async def test_a_task_is_found_again_after_a_reload_with_every_state(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    await submitted(page, "once")
    await page.until(f"{STATUS} === 'Succeeded'")
    await page.send("Page.reload")
    await page.until("document.querySelectorAll('.timeline li').length === 3")
    assert await page.evaluate("document.querySelector('video').getAttribute('src').startsWith('/api/v1/tasks/')")


async def test_what_the_gateway_refuses_is_said_at_the_field(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    await page.click("#compose summary")
    await page.evaluate("document.querySelector('#field-num_inference_steps').value = '1000'")
    await page.click("#field-prompt")
    await page.type("too long")
    await page.press("Enter", modifiers=2)
    await page.until("!document.querySelector('#error-num_inference_steps').hidden")
    assert await page.evaluate("document.activeElement.id") == "field-num_inference_steps"
    assert await page.evaluate("document.activeElement.getAttribute('aria-invalid')") == "true"
    assert await page.evaluate("document.querySelectorAll('#tasks li').length") == 0


async def test_a_wrong_key_is_refused_and_no_key_outlives_the_tab(page: Page, gallery: Stand) -> None:
    await page.open(gallery.url)
    await page.until("document.activeElement.id === 'key'")
    await page.type("rg_nonsense_nonsense")
    await page.press("Enter")
    await page.until("!document.querySelector('#key-error').hidden")
    await page.evaluate("document.querySelector('#key').value = ''")
    await page.click("#key")
    await page.type(gallery.keys["user"])
    await page.press("Enter")
    await page.until("!document.querySelector('#studio').hidden")
    assert await page.evaluate("localStorage.length + document.cookie.length") == 0
    await page.click("#forget")
    await page.until("!document.querySelector('#gate').hidden")
    assert await page.evaluate("sessionStorage.getItem('reelgate.key')") is None


async def test_everything_is_reached_by_keyboard_and_has_a_name(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    await submitted(page, "hold for the keyboard")
    await page.until("!!document.querySelector('.actions .danger')")
    await page.evaluate("document.querySelector('.brand').focus()")
    wanted = {"forget", "field-prompt", "filter"}
    reached: list[Any] = []
    for _ in range(40):
        await page.press("Tab")
        reached.append(
            await page.evaluate(
                "(e => [e.id, e.className, e.getAttribute('aria-label') || e.labels?.[0]?.textContent"
                " || e.textContent])(document.activeElement)"
            )
        )
    assert wanted <= {element_id for element_id, _, _ in reached}
    assert {"danger", "task"} <= {kind for _, kind, _ in reached}
    assert all(name and name.strip() for _, _, name in reached)
    nodes = (await page.send("Accessibility.getFullAXTree"))["nodes"]
    controls = [
        n for n in nodes if n.get("role", {}).get("value") in {"button", "link", "textbox", "combobox", "progressbar"}
    ]
    assert len(controls) > 10
    assert [n for n in controls if not n.get("ignored") and not n.get("name", {}).get("value")] == []
    async with gallery.user(user) as http:
        for task in (await http.get("/tasks")).json()["items"]:
            await http.post(f"/tasks/{task['task_id']}/cancel", json={"mode": "hard"})


async def test_it_fits_a_phone_and_texts_have_contrast(page: Page, gallery: Stand, user: str) -> None:
    await phone(page, dark=False)
    await entered(page, gallery, user=user)
    await submitted(page, "on the phone")
    await page.until(f"{STATUS} === 'Succeeded'")
    await fits_and_has_contrast(page)
    await phone(page, dark=True)
    await fits_and_has_contrast(page)


async def test_the_page_may_load_nothing_but_its_own_files(gallery: Stand) -> None:
    async with httpx.AsyncClient(base_url=gallery.url) as http:
        page = await http.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in re.findall(r'(?:src|href)="(console/[^"]+)"', page.text):
            part = await http.get(name)
            assert part.status_code == 200
            again = await http.get(name, headers={"If-None-Match": part.headers["etag"]})
            assert again.status_code == 304
        assert "<style" not in page.text
        assert not re.search(r"\son\w+=|\sstyle=|https?://(?!www\.w3\.org)", page.text)
        for name in ("console/../app.py", "console/nothing.js", "console/.hidden"):
            assert (await http.get(name)).status_code == 404


def shows(selector: str, text: str) -> str:
    """An expression: the element shows the text."""
    return f"!!document.querySelector({selector!r})?.innerText.includes({text!r})"


async def test_a_failed_task_is_retried_and_its_attempts_are_told(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    failed = await submitted(page, "fail the first time")
    await page.until(f"{STATUS} === 'Failed'")
    await page.until("document.querySelector('.screen').innerText.includes('INVALID_OUTPUT')")
    row = "[...document.querySelectorAll('#stage [aria-label=Attempts] tbody td')].map(cell => cell.textContent)"
    number, worker, started, took, outcome = await page.until(f"({row}).length === 5 && {row}")
    assert (number, worker, outcome) == ("1", "easel/cpu:0", "INVALID_OUTPUT")
    assert ":" in started
    assert took.endswith(" s")
    await page.click(".actions .primary")
    await page.until(f"location.hash.split('/').pop() !== {failed!r}")
    retried = await page.evaluate("location.hash.split('/').pop()")
    await page.until(f"{STATUS} === 'Failed'")
    await page.until("document.querySelectorAll('#tasks li').length === 2")
    async with gallery.user(user) as http:
        assert (await http.get(f"/tasks/{retried}")).json()["retry_of"] == failed
    web_ui = await page.evaluate("document.querySelector('.actions a[target=_blank]').href")
    assert web_ui.endswith(f"/workflows/{retried}")
    # The way back is a link. It stays where it is once the attempts are there.
    await page.until(f"({row}).length === 5")
    await page.until("[...document.querySelectorAll('.facts a')].some(a => (a.closest('details').open = true))")
    await page.click(".facts a")
    await page.until(f"location.hash.endsWith({failed!r})")


async def test_what_is_drawn_again_stays_under_the_pointer(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    draw = """
        const { h, redraw } = await import("/console/page.js");
        const row = (done) => h("li", {}, h("progress", { max: 4, value: done }), h("button", {}, "Cancel rest"));
        const place = h("ul");
        const draw = (...numbers) => redraw(place, numbers.map(row));
    """
    told = await page.evaluate(f"""(async () => {{ {draw}
        draw(1, 0);
        const [first, second] = place.children;
        const button = first.querySelector("button");
        draw(2, 0, 0);
        return [first.contains(button), first.querySelector("progress").value, place.children[1] === second,
            place.children.length, (draw(3), place.outerHTML)];
    }})()""")
    row = '<li><progress max="4" value="3"></progress><button>Cancel rest</button></li>'
    assert told == [True, 2, True, 3, f"<ul>{row}</ul>"]


async def test_a_callback_is_sent_again_and_shown(page: Page, gallery: Stand, user: str) -> None:
    await entered(page, gallery, user=user)
    await page.evaluate("document.querySelector('#field-callback_url').closest('details').open = true")
    await page.click("#field-callback_url")
    await page.type("http://127.0.0.1:9/hook")
    task_id = await submitted(page, "with a callback")
    await page.until(f"{STATUS} === 'Succeeded'")
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
    await page.until(f"{STATUS} === 'Succeeded'")
    async with gallery.user(user) as http:
        items = [{"prompt": prompt} for prompt in ("first of a batch", "hold the second", "hold third", "never")]
        batch = (await http.post("/batches", json={"items": items})).json()
        await listed(http)
        await page.send("Page.reload")
        await page.until(shows("#batch-list", "1 of 4 ended"))
        await page.click("#batch-list button")
        await page.until("document.querySelector('#library-title').textContent.startsWith('Tasks of b')")
        await page.until("document.querySelectorAll('#tasks li').length === 3")
        await page.click("#batch-list button")
        await page.until("document.querySelectorAll('#tasks li').length === 4")
        await page.click("#batch-list .danger")
        await page.until(shows("#batch-list", "4 of 4 ended, 3 without a clip"))
        assert (await http.get(f"/batches/{batch['batch_id']}")).json()["cancel_requested"] == "hard"
    await page.until("document.querySelectorAll('#batch-list .danger').length === 0")
    assert own_only(page, gallery), page.requests
    assert real(page.complaints) == []


async def listed(http: httpx.AsyncClient) -> None:
    """Return when the index has the batch."""
    async with asyncio.timeout(20):
        while not (await http.get("/batches")).json()["items"]:
            await asyncio.sleep(0.05)


async def test_queues_and_workers_are_shown_to_operators_on_a_phone_too(page: Page, gallery: Stand) -> None:
    await phone(page, dark=True)
    async with http_client(f"{gallery.url}/api/v1", {"Authorization": f"Bearer {gallery.keys['operator']}"}) as http:
        held = (await http.post("/tasks", json={"prompt": "hold for the operator"})).json()
        async with asyncio.timeout(30):
            while not any(worker["tasks"] for worker in (await http.get("/workers")).json()["items"]):
                await asyncio.sleep(0.1)
        await page.open(gallery.url)
        await page.until("document.activeElement.id === 'key'")
        await page.type(gallery.keys["operator"])
        await page.press("Enter")
        await page.until(shows("[aria-label=Queues]", "default"))
        await page.until(shows("[aria-label=Workers]", "gpu-default"))
        await page.until("document.querySelectorAll('[aria-label=Workers] td a').length > 0")
        assert await page.evaluate(shows("[aria-label=Workers]", "running"))
        await http.post(f"/tasks/{held['task_id']}/cancel", json={"mode": "hard"})
    await fits_and_has_contrast(page)
    await phone(page, dark=False)
    await fits_and_has_contrast(page)
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
    await page.until(f"{STATUS} === 'Canceled'")
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


async def phone(page: Page, *, dark: bool) -> None:
    """Look at the page on a phone by day or by night."""
    await page.screen(width=360, height=740, dark=dark, mobile=True)
    await page.until(f"matchMedia('(prefers-color-scheme: {'dark' if dark else 'light'})').matches")


async def fits_and_has_contrast(page: Page) -> None:
    # Colours may be on their way from one scheme to the other.
    await page.until("document.getAnimations().every(each => !(each instanceof CSSTransition))")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await page.evaluate(CONTRAST) == []


def own_only(page: Page, gallery: Stand) -> bool:
    return all(url.startswith((gallery.url, "data:")) for url in page.requests)


def real(complaints: list[str]) -> list[str]:
    """Without the answers of endpoints that a gateway need not offer."""
    return [text for text in complaints if not re.match(r"network: .* 40[34] ", text)]


CONTRAST = """
(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest(".unseen, option")) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push([element.tagName, element.className, element.textContent.slice(0, 30), ratio.toFixed(2)]);
  }
  return bad;
})()
"""
