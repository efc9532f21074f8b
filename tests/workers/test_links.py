"""Signed links to clips and posters."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from workers.links import LinkSecretError, SignedLinks, create_secret, links_from
from workers.settings import Settings

EXPIRES = datetime(2026, 1, 8, tzinfo=UTC)
NOW = EXPIRES - timedelta(days=1)
LINKS = SignedLinks("https://gate.example/", "s" * 32)


def _parts(url: str) -> tuple[str, str]:
    query = parse_qs(urlsplit(url).query)
    return query["exp"][0], query["sig"][0]


def test_a_link_is_stable_and_opens_its_own_object_only() -> None:
    url = LINKS.video_url("t1", EXPIRES)
    assert url == LINKS.video_url("t1", EXPIRES)
    assert url.startswith("https://gate.example/api/v1/tasks/t1/video?exp=")
    exp, sig = _parts(url)
    assert LINKS.verify("t1", "video", exp, sig, now=NOW)
    assert not LINKS.verify("t2", "video", exp, sig, now=NOW)
    assert not LINKS.verify("t1", "poster", exp, sig, now=NOW)
    assert not LINKS.verify("t1", "video", str(int(exp) + 1), sig, now=NOW)
    assert not SignedLinks("https://gate.example", "o" * 32).verify("t1", "video", exp, sig, now=NOW)
    assert LINKS.verify("t1", "poster", *_parts(LINKS.poster_url("t1", EXPIRES)), now=NOW)


def test_a_link_ends_with_its_expiry() -> None:
    exp, sig = _parts(LINKS.video_url("t1", EXPIRES))
    assert LINKS.verify("t1", "video", exp, sig, now=EXPIRES - timedelta(seconds=1))
    assert not LINKS.verify("t1", "video", exp, sig, now=EXPIRES)


@pytest.mark.parametrize(
    ("exp", "sig"), [("", ""), ("-1", "a"), ("x", "a"), ("\u0661", "a"), ("1767830400", "\u00e9"), ("9" * 400, "a")]
)
def test_nonsense_is_refused_without_an_error(exp: str, sig: str) -> None:
    assert not LINKS.verify("t1", "video", exp, sig, now=NOW)


def test_the_secret_file_is_made_once_for_its_owner_and_read_by_every_process(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with pytest.raises(LinkSecretError, match="REELGATE_LINK_SECRET_FILE"):
        links_from(settings)
    create_secret(settings.link_secret_file)
    url = links_from(settings).video_url("t1", EXPIRES)
    create_secret(settings.link_secret_file)
    assert links_from(settings).video_url("t1", EXPIRES) == url
    assert stat.S_IMODE(settings.link_secret_file.stat().st_mode) == 0o600


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(LinkSecretError, match="32"):
        SignedLinks("https://gate.example", "short")
