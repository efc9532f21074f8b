"""The signature check by itself: what it refuses, how it remembers, and that it has one error for every input."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from api.problems import UnauthenticatedError
from api.request_signing import SCHEME, MalformedSignatureError, RequestSigner
from api.signature_check import TOLERANCE, SignatureCheck, SignedRequest, UsedNonces
from tests.scale import scaled
from workers.keys import KeyRing
from workers.keys_admin import create_key, revoke_key

NOW = 1_700_000_000
INPUTS_PER_EXAMPLE = 50


class Signing:
    """A key that signs, and a check that knows it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.toml"
        self.key = create_key(self.file, tenant="acme", signing=True).key
        self.signing_key = f"{self.key.key_id}:{self.key.signing_secret}"
        self.now = float(NOW)
        self.check = SignatureCheck(KeyRing(self.file), clock=lambda: self.now)

    def request(self, *, signed_at: float = NOW) -> dict[str, object]:
        """A signed request as the server sees it."""
        request = httpx.Request("POST", "http://gateway/api/v1/tasks?b=2&a=1", content=b'{"prompt": "x"}')
        signed = next(RequestSigner(self.signing_key, clock=lambda: signed_at).auth_flow(request))
        return scope_of(signed)


def scope_of(request: httpx.Request) -> dict[str, object]:
    path, _, query = request.url.raw_path.partition(b"?")
    headers = [(name.lower(), value) for name, value in request.headers.raw]
    return {"method": request.method, "raw_path": path, "query_string": query, "headers": headers}


def credentials_of(scope: dict[str, object]) -> str:
    headers = scope["headers"]
    assert isinstance(headers, list)
    scheme, _, credentials = dict(headers)[b"authorization"].decode().partition(" ")
    assert scheme == SCHEME
    return str(credentials)


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Signing:
    return Signing(tmp_path_factory.mktemp("signing"))


def checked(signing: Signing, scope: dict[str, object]) -> SignedRequest:
    return signing.check.signed(scope, credentials_of(scope))


def test_the_signer_and_the_check_agree(signing: Signing) -> None:
    assert checked(signing, signing.request()).key == signing.key


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("method", "DELETE"),
        ("raw_path", b"/api/v1/tasks/other"),
        ("query_string", b"a=1&b=3"),
        ("query_string", b""),
    ],
)
def test_another_method_path_or_query_does_not_pass(signing: Signing, part: str, value: object) -> None:
    with pytest.raises(UnauthenticatedError, match="signature is wrong"):
        checked(signing, {**signing.request(), part: value})


@pytest.mark.parametrize("header", [b"x-user-id", b"idempotency-key"])
def test_another_end_user_or_idempotency_key_does_not_pass(signing: Signing, header: bytes) -> None:
    scope = signing.request()
    headers = scope["headers"]
    assert isinstance(headers, list)
    with pytest.raises(UnauthenticatedError, match="signature is wrong"):
        checked(signing, {**scope, "headers": [*headers, (header, b"bob")]})


@pytest.mark.parametrize(
    ("field", "value"), [("timestamp", str(NOW + 1)), ("nonce", "another-nonce-of-24-char"), ("body", "0" * 64)]
)
def test_another_time_nonce_or_body_in_the_header_does_not_pass(signing: Signing, field: str, value: str) -> None:
    scope = signing.request()
    fields = dict(part.split("=") for part in credentials_of(scope).split(","))
    assert fields[field] != value
    changed = ",".join(f"{name}={each}" for name, each in {**fields, field: value}.items())
    with pytest.raises(UnauthenticatedError, match="signature is wrong"):
        signing.check.signed(scope, changed)


def test_each_field_stands_once_and_no_other_does(signing: Signing) -> None:
    scope = signing.request()
    good = credentials_of(scope)
    key, _, others = good.partition(",")
    for credentials in (f"{good},{key}", f"{good},more=1", others):
        with pytest.raises(UnauthenticatedError, match="each once"):
            signing.check.signed(scope, credentials)


def test_a_header_that_is_sent_twice_is_not_the_one_that_was_signed(signing: Signing) -> None:
    request = httpx.Request("GET", "http://gateway/api/v1/models", headers={"X-User-Id": "alice"})
    scope = scope_of(next(RequestSigner(signing.signing_key, clock=lambda: NOW).auth_flow(request)))
    checked(signing, scope)
    headers = scope["headers"]
    assert isinstance(headers, list)
    for both in ([(b"x-user-id", b"bob"), *headers], [*headers, (b"x-user-id", b"bob")]):
        with pytest.raises(UnauthenticatedError, match="signature is wrong"):
            checked(signing, {**scope, "headers": both})


def test_a_user_id_outside_of_ascii_is_signed_byte_for_byte(signing: Signing) -> None:
    request = httpx.Request("GET", "http://gateway/api/v1/models", headers=[(b"X-User-Id", "zoë".encode())])
    scope = scope_of(next(RequestSigner(signing.signing_key, clock=lambda: NOW).auth_flow(request)))
    assert checked(signing, scope).key == signing.key


def test_a_proxy_may_sort_the_query(signing: Signing) -> None:
    checked(signing, {**signing.request(), "query_string": b"a=1&b=2"})


def test_five_minutes_are_allowed_and_not_a_second_more(signing: Signing) -> None:
    limit = TOLERANCE.total_seconds()
    for off in (-limit, limit):
        checked(signing, signing.request(signed_at=NOW + off))
    with pytest.raises(UnauthenticatedError, match="301 s before our time; at most 300 s"):
        checked(signing, signing.request(signed_at=NOW - limit - 1))
    with pytest.raises(UnauthenticatedError, match="301 s after our time"):
        checked(signing, signing.request(signed_at=NOW + limit + 1))


def test_a_key_without_a_signing_secret_and_a_revoked_one_do_not_sign(tmp_path: Path) -> None:
    signing = Signing(tmp_path)
    scope = signing.request()
    bearer_only = create_key(signing.file, tenant="acme").key
    own = RequestSigner(f"{bearer_only.key_id}:{bearer_only.sha256}", clock=lambda: NOW)
    forged = scope_of(next(own.auth_flow(httpx.Request("GET", "http://gateway/api/v1/models"))))
    fresh = SignatureCheck(KeyRing(signing.file), clock=lambda: NOW)
    assert fresh.signed(scope, credentials_of(scope)).key == signing.key
    with pytest.raises(UnauthenticatedError, match="may not sign"):
        fresh.signed(forged, credentials_of(forged))
    revoke_key(signing.file, signing.key.key_id)
    with pytest.raises(UnauthenticatedError, match="unknown"):
        SignatureCheck(KeyRing(signing.file), clock=lambda: NOW).signed(scope, credentials_of(scope))


def test_a_nonce_is_good_once_as_long_as_its_time_is_good(signing: Signing) -> None:
    request = checked(signing, signing.request(signed_at=NOW + 200))
    signing.check.use(request)
    for later in (0.0, 100.0, 499.0):
        signing.now = NOW + later
        with pytest.raises(UnauthenticatedError, match="used before"):
            signing.check.use(request)
    signing.now = NOW


def test_memory_is_bounded_and_what_was_forgotten_is_refused_not_let_through() -> None:
    used = UsedNonces(max_per_key=100)
    for second in range(1_000):
        assert used.use("key1", f"nonce-{second:012}", signed_at=NOW + second // 10, now=NOW)
    assert len(used) <= 100
    for second in range(1_000):
        assert not used.use("key1", f"nonce-{second:012}", signed_at=NOW + second // 10, now=NOW)
    assert used.use("key2", "nonce-of-another-key", signed_at=NOW, now=NOW), "one key does not shut another out"


def test_nonces_of_keys_that_went_quiet_are_dropped() -> None:
    used = UsedNonces()
    used.use("key1", "n" * 16, signed_at=NOW, now=NOW)
    used.use("key2", "n" * 16, signed_at=NOW + 1_000, now=NOW + 1_000)
    assert len(used) == 1


@pytest.mark.parametrize("signing_key", ["", "abcd", "abcd:", ":secret", "AB:secret"])
def test_a_malformed_signing_key_is_refused_without_being_shown(signing_key: str) -> None:
    with pytest.raises(MalformedSignatureError) as raised:
        RequestSigner(signing_key)
    assert "abcd" not in str(raised.value)
    assert "secret>" in str(raised.value)


LATIN_1 = st.characters(max_codepoint=255)


@st.composite
def _mutations(draw: st.DrawFn) -> tuple[int, int, str]:
    """Where to cut, how much, and what to put there."""
    return draw(st.integers(0, 300)), draw(st.integers(0, 3)), draw(st.text(LATIN_1, max_size=3))


@pytest.mark.soak
@hypothesis_settings(
    max_examples=scaled(100_000) // INPUTS_PER_EXAMPLE,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    inputs=st.lists(
        st.one_of(_mutations(), st.text(LATIN_1, max_size=80)),
        min_size=INPUTS_PER_EXAMPLE,
        max_size=INPUTS_PER_EXAMPLE,
    )
)
def test_whatever_is_sent_passes_only_as_it_was_signed_and_fails_with_one_error(
    signing: Signing, inputs: list[tuple[int, int, str] | str]
) -> None:
    scope = signing.request()
    good = credentials_of(scope)
    original = signing.check.signed(scope, good).signature
    for each in inputs:
        sent = each if isinstance(each, str) else good[: each[0]] + each[2] + good[each[0] + each[1] :]
        try:
            passed = signing.check.signed(scope, sent)
        except UnauthenticatedError:
            continue
        assert passed.signature == original, sent
