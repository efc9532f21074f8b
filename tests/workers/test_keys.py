"""The key ring and the commands that change `keys.toml`."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from workers.keys import CHECK_INTERVAL_SECONDS, EndpointSettings, KeyRing, KeysFileError, Scope
from workers.keys_admin import (
    UnknownKeyError,
    create_key,
    list_keys,
    revoke_key,
    rotate_callback_secret,
    rotate_key,
)
from workers.keys_file import read_keys_file, render_keys_file

HASH = "0" * 64
KEY = f'[[keys]]\nid = "abcd"\nsha256 = "{HASH}"\ntenant = "acme"\nscope = "user"\ntier = "standard"\n'
CREATED = "created_at = 2026-01-01T00:00:00Z\n"


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "conf" / "keys.toml"


def test_a_new_key_opens_and_the_file_holds_only_its_hash(file: Path) -> None:
    new = create_key(file, tenant="acme", scope=Scope.SERVICE, tier="gold")
    assert new.token.startswith(f"rg_{new.key.key_id}_")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert new.token not in file.read_text()
    assert new.token not in repr(new)
    key = KeyRing(file).authenticate(new.token)
    assert key == new.key
    assert (key.tenant, key.scope, key.tier) == ("acme", Scope.SERVICE, "gold")


def test_wrong_tokens_open_nothing(file: Path) -> None:
    new = create_key(file, tenant="acme")
    other = create_key(file, tenant="other")
    ring = KeyRing(file)
    swapped = f"rg_{other.key.key_id}_{new.token.split('_', 2)[2]}"
    for token in (
        "",
        "rg_",
        new.token[:-1],
        new.token + "x",
        new.token.upper(),
        swapped,
        f" {new.token}",
        "rg_é_" + "a" * 43,
    ):
        assert ring.authenticate(token) is None, token


def test_a_tenants_first_key_comes_with_a_callback_secret_that_the_official_library_takes(file: Path) -> None:
    first = create_key(file, tenant="acme")
    second = create_key(file, tenant="acme")
    assert first.callback_secret is not None
    assert second.callback_secret is None
    assert KeyRing(file).callback_secrets("acme") == (first.callback_secret,)
    assert KeyRing(file).callback_secrets("nobody") == ()
    Webhook(first.callback_secret).sign("t1", datetime.now(UTC), "{}")


def test_rotating_a_callback_secret_keeps_two_alive_newest_first(file: Path) -> None:
    first = create_key(file, tenant="acme").callback_secret
    second = rotate_callback_secret(file, "acme")
    assert KeyRing(file).callback_secrets("acme") == (second, first)
    third = rotate_callback_secret(file, "acme")
    assert KeyRing(file).callback_secrets("acme") == (third, second)
    with pytest.raises(UnknownKeyError, match="'nobody'"):
        rotate_callback_secret(file, "nobody")


def test_a_rotated_key_and_its_successor_both_open_until_the_overlap_ends(file: Path) -> None:
    old = create_key(file, tenant="acme", scope=Scope.OPERATOR, tier="gold", signing=True)
    new = rotate_key(file, old.key.key_id, overlap=timedelta(hours=1))
    ring = KeyRing(file)
    later = datetime.now(UTC) + timedelta(hours=2)
    assert ring.authenticate(old.token) is not None
    assert ring.authenticate(old.token, now=later) is None
    successor = ring.authenticate(new.token, now=later)
    assert successor is not None
    assert (successor.scope, successor.tier) == (Scope.OPERATOR, "gold")
    assert successor.signing_secret not in (None, old.key.signing_secret)
    again = rotate_key(file, old.key.key_id, overlap=timedelta(days=9))
    assert KeyRing(file).authenticate(old.token, now=later) is None, "a second rotation must not lengthen its life"
    assert again.token != new.token


def test_a_revoked_key_is_refused_by_a_running_ring_within_five_seconds(file: Path) -> None:
    clock = Clock()
    new = create_key(file, tenant="acme")
    ring = KeyRing(file, clock=clock)
    assert ring.authenticate(new.token)
    revoke_key(file, new.key.key_id)
    clock.now += CHECK_INTERVAL_SECONDS + 0.1
    assert ring.authenticate(new.token) is None
    assert CHECK_INTERVAL_SECONDS < 5
    with pytest.raises(UnknownKeyError):
        revoke_key(file, new.key.key_id)


@pytest.mark.parametrize("harm", [lambda f: f.write_text("[[keys]\n"), lambda f: f.unlink()], ids=["broken", "gone"])
def test_a_file_that_breaks_leaves_working_keys_working_until_it_is_mended(
    file: Path, harm: Callable[[Path], None]
) -> None:
    clock = Clock()
    new = create_key(file, tenant="acme")
    good = file.read_text()
    ring = KeyRing(file, clock=clock)
    harm(file)
    clock.now += 3
    assert ring.authenticate(new.token)
    file.write_text(good)
    late = create_key(file, tenant="late")
    clock.now += 3
    assert ring.authenticate(late.token)


def test_parallel_creates_lose_no_key(file: Path) -> None:
    threads = [threading.Thread(target=create_key, args=(file,), kwargs={"tenant": f"t{n}"}) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.tenant for key in list_keys(file)} == {f"t{n}" for n in range(12)}


def test_what_is_written_reads_back_the_same_with_endpoints_and_odd_characters(file: Path) -> None:
    create_key(file, tenant="acme", tier='go"ld\\\x7f\t\u2028é', signing=True)
    with file.open("a") as out:
        out.write(
            '[[endpoints]]\ntenant = "acme"\nurl = "https://a.example/\\"x"\nmerge_window_ms = 250\nconcurrency = 2\n'
        )
    content = read_keys_file(file)
    file.write_text(render_keys_file(content))
    assert read_keys_file(file) == content
    ring = KeyRing(file)
    assert ring.endpoint("acme", 'https://a.example/"x') == EndpointSettings(merge_window_ms=250, concurrency=2)
    assert ring.endpoint("other", 'https://a.example/"x') == EndpointSettings()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (KEY, "keys entry 1: `created_at`"),
        (KEY + CREATED + KEY + CREATED, "'abcd' stands twice"),
        (KEY + CREATED + 'sope = "user"\n', "keys entry 1: unknown field `sope`"),
        (KEY.replace('"user"', '"root"') + CREATED, "`scope` is one of user, service, operator"),
        (KEY + "created_at = 2026-01-01T00:00:00\n", "keys entry 1: `created_at` is a time with an offset"),
        (KEY.replace(HASH, "xyz") + CREATED, "keys entry 1: `sha256`"),
        ('[tenants.acme]\ncallback_secrets = ["whsec_short"]\n', "tenants.acme: callback secret 1"),
        ('[tenants."A b"]\ncallback_secrets = []\n', "not a tenant name"),
        ('[[endpoints]]\ntenant = "acme"\nurl = "u"\nmerge_window_ms = 9999\n', "endpoints entry 1: `merge_window_ms`"),
        ("keys = 3\n", "written as"),
        ("[other]\n", "unknown field `other`"),
        ("= broken", "line 1"),
    ],
)
def test_a_wrong_entry_is_named_with_its_file(file: Path, text: str, complaint: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(KeysFileError, match=complaint) as raised:
        KeyRing(file)
    assert str(file) in str(raised.value)


def test_a_missing_file_says_how_to_make_one(file: Path) -> None:
    with pytest.raises(KeysFileError, match="reelgate keys create"):
        KeyRing(file)


@pytest.mark.parametrize("tenant", ["", "A", "a b", "-a", "a" * 65, 'a"'])
def test_a_tenant_name_that_is_no_name_is_refused(file: Path, tenant: str) -> None:
    with pytest.raises(KeysFileError, match="tenant"):
        create_key(file, tenant=tenant)
    assert not file.exists()


def test_scopes_include_each_other_in_one_direction() -> None:
    assert Scope.OPERATOR.includes(Scope.SERVICE)
    assert Scope.SERVICE.includes(Scope.USER)
    assert Scope.USER.includes(Scope.USER)
    assert not Scope.USER.includes(Scope.SERVICE)
    assert not Scope.SERVICE.includes(Scope.OPERATOR)
