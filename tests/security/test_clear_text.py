"""Where clear text is, and where it is not, after a whole run of a real site: `reelgate dev` with marked secrets."""

from __future__ import annotations

import asyncio
import json
import subprocess
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from temporalio.api.common.v1 import Payload
from temporalio.client import Client

from tests.api.stand import NO_TLS
from tests.browser.chromium import chromium, chromium_path
from tests.cli.stack import Dev
from tests.receiver import Receiver
from workers.devserver import temporal_binary
from workers.settings import load_settings

PROMPT = "a red circle moving right, whispered-wish"
NEGATIVE_PROMPT = "unwanted-thing"
CALLBACK_TOKEN = "receivers-own-secret"
LINK_SECRET = "marked-link-secret-0123456789-0123456789"
CODEC_KEY = b64encode(b"marked-payload-key-of-32-bytes!!").decode()

pytestmark = [pytest.mark.durability, pytest.mark.timeout(300)]


class Site:
    """A running site after one task with a callback and one that was refused."""

    def __init__(self, dev: Dev, task_id: str) -> None:
        self.dev = dev
        self.task_id = task_id
        access = json.loads((dev.folder / "client.json").read_text())
        self.api_key: str = access["api_key"]
        self.url: str = access["url"]
        self.web_ui: str = access["web_ui_url"]
        self.temporal: str = access["temporal_address"]
        with httpx.Client(verify=NO_TLS) as http:
            ui_settings = http.get(f"{self.web_ui}/api/v1/settings").json()
        self.codec_endpoint: str = ui_settings["Codec"]["Endpoint"]

    @property
    def codec_token(self) -> str:
        return self.codec_endpoint.rpartition("/")[2]

    def logs(self) -> str:
        """Everything that any process wrote, but for what `dev` shows a person at its first start."""
        files = [*(self.dev.folder / "logs").iterdir()]
        shown_once = ("API key", "callback secret", "Try: ")
        lines = [line for line in self.dev.output.splitlines() if not line.strip().startswith(shown_once)]
        return "\n".join([*(file.read_text() for file in files), *lines])

    def database(self) -> bytes:
        """The server's own files."""
        files = list(self.dev.folder.glob("temporal.db*"))
        assert files
        return b"".join(file.read_bytes() for file in files)

    async def payloads(self) -> list[Payload]:
        """Every encrypted payload at the top of the events of the task's history, read without a key."""
        client = await Client.connect(self.temporal)
        history = await client.get_workflow_handle(self.task_id).fetch_history()
        started = history.events[0].workflow_execution_started_event_attributes
        return [*started.input.payloads, *started.memo.fields.values()]


@pytest_asyncio.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("marked")
    dev = Dev(folder)
    dev.environment |= {
        "REELGATE_LINK_SECRET": LINK_SECRET,
        "REELGATE_CODEC_KEYS": f"marked:{CODEC_KEY}",
        "REELGATE_LOG_LEVEL": "DEBUG",
    }
    try:
        await asyncio.to_thread(dev.start)
        async with Receiver() as receiver:
            task = await asyncio.to_thread(
                dev.json,
                *("submit", PROMPT, "--negative-prompt", NEGATIVE_PROMPT, "--num-inference-steps", "2", "--wait"),
                *("--callback-url", receiver.url_of(f"/hook?token={CALLBACK_TOKEN}")),
            )
            assert task["status"] == "SUCCEEDED", task
            await receiver.wait_for(1)
            refused = await asyncio.to_thread(dev.run, "submit", PROMPT, "--width", "7")
            assert refused.returncode == 3
            assert "whispered" not in refused.stderr
        yield Site(dev, str(task["task_id"]))
    finally:
        await asyncio.to_thread(dev.kill)


def secrets_of(site: Site) -> dict[str, str]:
    """What must not be found, by what it is."""
    keys = (site.dev.folder / "keys.toml").read_text()
    return {
        "prompt": "whispered-wish",
        "negative prompt": NEGATIVE_PROMPT,
        "token of the callback's URL": CALLBACK_TOKEN,
        "link secret": LINK_SECRET,
        "payload key": CODEC_KEY,
        "API key": site.api_key,
        "callback secret": next(word.strip('[]",') for word in keys.split() if "whsec_" in word),
        "token of the codec server": site.codec_token,
    }


def test_no_log_line_has_a_secret(site: Site) -> None:
    logs = site.logs()
    assert site.task_id in logs
    assert '"level": "debug"' in logs
    assert [what for what, text in secrets_of(site).items() if text in logs] == []


async def test_the_servers_own_database_has_neither_prompt_nor_secret(site: Site) -> None:
    client = await Client.connect(site.temporal)
    await client.start_workflow("Unencrypted", "written-in-clear", id="control", task_queue="nobody")
    await asyncio.sleep(0.5)
    database = site.database()
    assert site.task_id.encode() in database
    assert b"written-in-clear" in database, "this way of looking finds what is there"
    assert [what for what, text in secrets_of(site).items() if text.encode() in database] == []


async def test_the_history_has_neither_prompt_nor_secret_without_the_key(site: Site) -> None:
    client = await Client.connect(site.temporal)
    for workflow_id in (site.task_id, f"callback-{site.task_id}"):
        history = (await client.get_workflow_handle(workflow_id).fetch_history()).to_json()
        assert site.task_id in history
        assert [what for what, text in secrets_of(site).items() if text in history] == []


def test_no_setting_shows_a_secret(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in site.dev.environment.items():
        if name.startswith("REELGATE_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("REELGATE_STORE_OPTIONS", '{"secret_access_key": "marked-store-secret"}')
    monkeypatch.setenv("REELGATE_TEMPORAL_API_KEY", "marked-temporal-key")
    monkeypatch.setenv("REELGATE_CODEC_PATH_TOKEN", site.codec_token)
    settings = load_settings()
    assert settings.clear_store_options() == {"secret_access_key": "marked-store-secret"}
    for shown in (repr(settings), str(settings), settings.model_dump_json()):
        assert "marked-" not in shown
        assert CODEC_KEY not in shown
        assert site.codec_token not in shown


async def test_the_path_that_dev_gives_the_web_ui_decodes_for_the_web_ui_only(site: Site) -> None:
    body = {
        "payloads": [
            {
                "metadata": {name: b64encode(value).decode() for name, value in payload.metadata.items()},
                "data": b64encode(payload.data).decode(),
            }
            for payload in await site.payloads()
        ]
    }
    async with httpx.AsyncClient(verify=NO_TLS) as http:
        from_ui = await http.post(f"{site.codec_endpoint}/decode", json=body, headers={"Origin": site.web_ui})
        elsewhere = await http.post(f"{site.codec_endpoint}/decode", json=body, headers={"Origin": "http://evil.test"})
        guessed = await http.post(f"{site.url}/api/v1/codec/{'x' * 43}/decode", json=body)
    assert from_ui.status_code == 200, from_ui.text
    assert from_ui.headers["access-control-allow-origin"] == site.web_ui
    clear = [b64decode(payload["data"]).decode() for payload in from_ui.json()["payloads"]]
    assert any(PROMPT in text for text in clear)
    assert (elsewhere.status_code, guessed.status_code) == (403, 404)


def test_the_temporal_cli_reads_with_an_operator_key_and_not_without(site: Site) -> None:
    def shown(*more: str) -> str:
        command = [temporal_binary(), "workflow", "show", "-w", site.task_id, "--address", site.temporal]
        done = subprocess.run([*command, "--detailed", *more], capture_output=True, text=True, timeout=30, check=False)
        return done.stdout + done.stderr

    endpoint = ("--codec-endpoint", f"{site.url}/api/v1/codec")
    assert PROMPT in shown(*endpoint, "--codec-auth", f"Bearer {site.api_key}")
    assert PROMPT not in shown(*endpoint)
    assert PROMPT not in shown()


@pytest.mark.skipif(chromium_path() is None, reason="no Chromium on this machine")
async def test_the_web_ui_shows_the_prompt_in_clear(site: Site, tmp_path: Path) -> None:
    async with chromium(tmp_path / "profile") as browser, browser.tab() as page:
        await page.screen(width=1400, height=1000)
        await page.open(f"{site.web_ui}/namespaces/default/workflows/{site.task_id}")
        # The input, in a viewer that keeps only a part of its lines in the page.
        await page.until("document.body.innerText.includes('idempotency_key')", timeout=40)
        await page.evaluate("[...document.links].find(link => link.textContent.includes('User Metadata')).click()")
        # Summary and details, each drawn in a frame of its own.
        frames = "[...document.querySelectorAll('iframe')].map(frame => decodeURIComponent(frame.src))"
        await page.until(f"{frames}.some(source => source.includes({PROMPT!r}))")
        asked = {url.partition("?")[0] for url in page.requests if "/codec/" in url}
        assert asked == {f"{site.codec_endpoint}/decode"}
        assert "whispered-wish" not in site.logs(), "the page asks its server to draw it, by a URL"
