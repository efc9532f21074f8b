"""What a client names is connected to only if every address behind it is public, and read only within bounds."""

from __future__ import annotations

import asyncio
import ssl
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address

import httpx
import pytest

from activities.dns_cache import DnsCache, NameNotFoundError
from activities.egress_policy import Address, EgressPolicy, address_class
from activities.http_guard import AddressRefusedError, FetchError, GuardedClient, UrlRefusedError
from tests import receiver as receivers
from tests.certificates import CertificateAuthority
from tests.receiver import Receiver, respond

LOOPBACK = EgressPolicy.allowing("127.0.0.0/8")
PNG = b"\x89PNG\r\n\x1a\n" + bytes(1_000)


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority()


def names(**known: str | list[str]) -> DnsCache:
    """A cache over a resolver that knows these names (`_` stands for the dots); each call takes the next answer."""

    async def resolve(name: str) -> tuple[Address, ...]:
        answer = known.get(name.replace(".", "_"))
        if answer is None:
            raise NameNotFoundError(name)
        text = answer if isinstance(answer, str) else answer.pop(0) if len(answer) > 1 else answer[0]
        return tuple(ip_address(address) for address in text.split())

    return DnsCache(resolve, ttl=0)


@asynccontextmanager
async def guarded(
    policy: EgressPolicy, dns: DnsCache | None = None, context: ssl.SSLContext | None = None
) -> AsyncIterator[GuardedClient]:
    client = GuardedClient(policy, dns or names(), ssl_context=context or ssl.create_default_context())
    try:
        yield client
    finally:
        await client.aclose()


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "expected"),
        [
            ("127.0.0.1", "loopback"),
            ("127.255.255.254", "loopback"),
            ("::1", "loopback"),
            ("10.0.0.1", "private"),
            ("172.16.0.1", "private"),
            ("172.31.255.255", "private"),
            ("192.168.1.1", "private"),
            ("169.254.0.1", "link-local"),
            ("fe80::1", "link-local"),
            ("169.254.169.254", "cloud metadata"),
            ("169.254.170.2", "cloud metadata"),
            ("100.100.100.200", "cloud metadata"),
            ("168.63.129.16", "cloud metadata"),
            ("fd00:ec2::254", "cloud metadata"),
            ("100.64.0.1", "carrier-grade NAT"),
            ("100.127.255.255", "carrier-grade NAT"),
            ("0.0.0.1", "unspecified"),
            ("0.1.2.3", "unspecified"),
            ("::", "unspecified"),
            ("::ffff:1.1.1.1", "IPv4-mapped"),
            ("::ffff:127.0.0.1", "IPv4-mapped"),
            ("::127.0.0.1", "IPv4-compatible"),
            ("64:ff9b::7f00:1", "NAT64"),
            ("64:ff9b:1::a00:1", "NAT64"),
            ("2002:7f00:1::", "6to4"),
            ("192.88.99.1", "6to4"),
            ("2001::1", "Teredo"),
            ("2001:db8::1", "documentation"),
            ("3fff::1", "documentation"),
            ("203.0.113.9", "documentation"),
            ("198.19.0.1", "benchmarking"),
            ("192.0.0.8", "protocol assignment"),
            ("2001:20::1", "protocol assignment"),
            ("224.0.0.1", "multicast"),
            ("ff02::1", "multicast"),
            ("240.0.0.1", "reserved"),
            ("255.255.255.255", "reserved"),
            ("fc00::1", "unique local"),
            ("fdff::1", "unique local"),
            ("fec0::1", "site-local"),
            ("100::1", "discard-only"),
            ("5f00::1", "segment routing"),
            ("4000::1", "unallocated"),
        ],
    )
    def test_special_address_is_named(self, address: str, expected: str) -> None:
        assert address_class(ip_address(address)) == expected

    @pytest.mark.parametrize(
        "address",
        [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.167.255.255",
            "223.255.255.255",
            "2606:4700::1111",
        ],
    )
    def test_public_address_passes(self, address: str) -> None:
        assert address_class(ip_address(address)) is None


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "rule"),
        [
            ("http://receiver.example/", "scheme"),
            ("ftp://receiver.example/", "scheme"),
            ("file:///etc/passwd", "scheme"),
            ("//receiver.example/", "scheme"),
            ("https://user:secret@receiver.example/", "userinfo"),
            ("https://@receiver.example/", "userinfo"),
            ("https://receiver.example:22/", "port"),
            ("https://receiver.example:0/", "port"),
            ("https://receiver.example:99999/", "port"),
            ("https:///callbacks", "host"),
            ("https://127.0.0.1/", "address"),
            ("https://[::1]/", "address"),
            ("https://[::ffff:10.0.0.1]/", "address"),
            ("https://169.254.169.254/latest/meta-data", "address"),
            ("https://127。0。0。1/", "address"),
            ("https://2130706433/", "host"),
            ("https://0x7f000001/", "host"),
            ("https://0x7f.0.0.1/", "host"),
            ("https://0177.0.0.1/", "url"),
            ("https://127.1/", "host"),
            ("https://127.0.0.1./", "host"),
            ("https://1.2.3.4.5/", "host"),
            ("https://receiver%2eexample/", "host"),
            ("https://[fe80::1%25eth0]/", "host"),
            ("https://receiver..example/", "host"),
            ("https://receiver.example\\@evil.example/", "url"),
            ("https://receiver.example/a b", "url"),
            ("https://receiver.example/\r\nhost: evil", "url"),
            ("https://\uff11\uff12\uff17.0.0.1/", "url"),
            ("https://receiver.example/" + "x" * 2_048, "length"),
        ],
    )
    def test_odd_url_is_refused_before_anything_is_resolved(self, url: str, rule: str) -> None:
        with pytest.raises(UrlRefusedError) as refused:
            EgressPolicy().check_url(url)
        assert refused.value.rule == rule

    @pytest.mark.parametrize(
        "url",
        [
            "https://receiver.example/hooks?task=1",
            "https://receiver.example:8443/",
            "https://1.1.1.1/",
            "https://a.b./",
            "https://bücher.example/",
            "https://[2606:4700::1111]/",
            "https://under_score.example/",
        ],
    )
    def test_plain_https_url_passes(self, url: str) -> None:
        EgressPolicy().check_url(url)

    def test_development_network_is_reached_over_http_on_any_port_and_no_other_network_is(self) -> None:
        LOOPBACK.check_url("http://127.0.0.1:9000/")
        LOOPBACK.check_url("http://localhost:9000/")  # what it stands for is checked when it is connected to
        for url in ("http://1.1.1.1/", "https://1.1.1.1:9000/", "http://10.0.0.1/", "http://[::1]/"):
            with pytest.raises(UrlRefusedError, match=r"not reachable|a private address|a loopback address"):
                LOOPBACK.check_url(url)


class TestConnections:
    async def test_name_is_kept_in_sni_and_host_while_the_checked_address_is_connected_to(
        self, authority: CertificateAuthority
    ) -> None:
        dns = names(receiver_test="127.0.0.1")
        async with (
            Receiver(tls=authority.server_context("receiver.test"), host="receiver.test") as receiver,
            guarded(LOOPBACK, dns, authority.client_context()) as client,
        ):
            reply = await client.exchange("GET", httpx.URL(receiver.url))
            assert reply.status_code == 200
            assert receiver.requests[0].server_name == "receiver.test"
            assert receiver.requests[0].headers["host"] == f"receiver.test:{receiver.port}"

    async def test_certificate_of_another_name_is_refused(self, authority: CertificateAuthority) -> None:
        async with (
            Receiver(tls=authority.server_context("other.test"), host="receiver.test") as receiver,
            guarded(LOOPBACK, names(receiver_test="127.0.0.1"), authority.client_context()) as client,
        ):
            with pytest.raises(httpx.ConnectError):
                await client.exchange("GET", httpx.URL(receiver.url))
            assert receiver.requests == []

    async def test_rebinding_name_is_refused_at_the_connection_that_would_have_gone_inside(self) -> None:
        async with Receiver() as receiver:
            # The first question, of whoever checks early, hears a harmless address; the one that connects does not.
            rebinding = names(evil_example=["1.1.1.1", "127.0.0.1"])
            url = f"https://evil.example:{receiver.port}/"
            policy = EgressPolicy(ports=frozenset({receiver.port}))
            assert await rebinding.resolve("evil.example") == (ip_address("1.1.1.1"),)
            async with guarded(policy, rebinding) as client:
                with pytest.raises(AddressRefusedError, match="loopback"):
                    await client.exchange("GET", policy.check_url(url))
            assert receiver.connections == 0

    async def test_one_private_address_among_public_ones_refuses_the_name(self) -> None:
        async with guarded(EgressPolicy(), names(mixed_example="1.1.1.1 10.0.0.1")) as client:
            with pytest.raises(AddressRefusedError, match="private"):
                await client.exchange("GET", httpx.URL("https://mixed.example/"))

    async def test_stale_answer_is_still_checked(self) -> None:
        answers: list[tuple[Address, ...] | Exception] = [(ip_address("10.0.0.1"),), OSError("no resolver")]

        async def resolve(name: str) -> tuple[Address, ...]:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        dns = DnsCache(resolve, ttl=0)
        await dns.resolve("inside.example")
        async with guarded(EgressPolicy(), dns) as client:
            with pytest.raises(AddressRefusedError):
                await client.exchange("GET", httpx.URL("https://inside.example/"))

    async def test_plain_http_never_leaves_the_development_networks(self) -> None:
        async with guarded(LOOPBACK, names(public_example="1.1.1.1")) as client:
            with pytest.raises(AddressRefusedError, match="plain HTTP"):
                await client.exchange("GET", httpx.URL("http://public.example/"))

    async def test_url_that_was_not_checked_before_is_checked_by_the_transport(self) -> None:
        async with Receiver() as receiver, guarded(EgressPolicy()) as client:
            with pytest.raises(UrlRefusedError):
                await client.exchange("GET", httpx.URL(receiver.url))
            assert receiver.connections == 0

    async def test_second_address_is_tried_when_the_first_does_not_answer(self) -> None:
        async with (
            Receiver(host="twice.test") as receiver,
            guarded(LOOPBACK, names(twice_test="127.0.0.9 127.0.0.1")) as c,
        ):
            assert (await c.exchange("GET", httpx.URL(receiver.url))).status_code == 200

    async def test_proxy_of_the_environment_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with Receiver() as proxy, Receiver() as receiver:
            for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
                monkeypatch.setenv(name, proxy.url_of(""))
            async with guarded(LOOPBACK) as client:
                await client.exchange("GET", httpx.URL(receiver.url))
            assert proxy.connections == 0
            assert len(receiver.requests) == 1

    async def test_cookie_of_a_receiver_is_not_brought_back_to_it(self) -> None:
        async with Receiver() as receiver, guarded(LOOPBACK) as client:
            receiver.default = respond(headers={"set-cookie": "tenant=other; Path=/"})
            for _ in range(2):
                await client.exchange("GET", httpx.URL(receiver.url))
            assert "cookie" not in receiver.requests[1].headers

    async def test_connection_is_used_again(self) -> None:
        async with Receiver() as receiver, guarded(LOOPBACK) as client:
            for _ in range(5):
                await client.exchange("POST", httpx.URL(receiver.url), content=b"{}")
            assert receiver.connections == 1


class TestBounds:
    async def test_endless_body_is_cut(self) -> None:
        async with Receiver() as receiver, guarded(LOOPBACK) as client:
            receiver.default = receivers.endless()
            reply = await client.exchange("GET", httpx.URL(receiver.url), max_reply_bytes=10_000)
            assert len(reply.body) == 10_000
            assert not reply.complete

    async def test_gzip_bomb_is_cut_without_being_inflated(self) -> None:
        async with Receiver() as receiver, guarded(LOOPBACK) as client:
            receiver.default = receivers.gzip_bomb(megabytes=64)
            tracemalloc.start()
            try:
                reply = await client.exchange("GET", httpx.URL(receiver.url))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert len(reply.body) == 64 * 1024
            assert not reply.complete
            assert peak < 8 << 20

    @pytest.mark.parametrize("behaviour", [receivers.drip, receivers.drip_headers, receivers.hang])
    async def test_slow_reply_ends_with_the_total_time(self, behaviour: Callable[[], receivers.Behaviour]) -> None:
        async with Receiver() as receiver, guarded(LOOPBACK) as client:
            receiver.default = behaviour()
            start = time.monotonic()
            try:
                reply = await client.exchange("GET", httpx.URL(receiver.url), timeout=0.3)
                assert not reply.complete
            except TimeoutError:
                pass
            assert time.monotonic() - start < 1.0
            # Nothing is left behind: neither the connection nor a place in the pool.
            async with asyncio.timeout(2):
                while receiver.in_flight:
                    await asyncio.sleep(0.01)

    async def test_flood_of_headers_is_a_protocol_error(self) -> None:
        async with Receiver() as receiver, guarded(LOOPBACK) as client:
            receiver.default = receivers.flood_headers()
            with pytest.raises(httpx.RemoteProtocolError):
                await client.exchange("GET", httpx.URL(receiver.url))


class TestFetch:
    async def test_whole_answer_comes_back_with_its_type(self) -> None:
        async with Receiver() as receiver, guarded(LOOPBACK) as client:
            receiver.default = respond(200, PNG, headers={"content-type": "image/png"})
            reply = await client.fetch_bounded(receiver.url, max_bytes=len(PNG))
            assert reply.body == PNG
            assert reply.headers["content-type"] == "image/png"

    @pytest.mark.parametrize(
        ("behaviour", "code"),
        [
            (respond(200, PNG + b"x"), "TOO_LARGE"),
            (receivers.endless(), "TOO_LARGE"),
            (receivers.gzip_bomb(megabytes=1), "TOO_LARGE"),
            (respond(404), "HTTP_STATUS"),
            (receivers.redirect("http://169.254.169.254/"), "REDIRECT"),
            (receivers.drip(), "INCOMPLETE"),
            (respond(200, b"x", headers={"content-encoding": "br"}), "INCOMPLETE"),
            (respond(200, b"not gzip", headers={"content-encoding": "gzip"}), "INCOMPLETE"),
            (receivers.close(), "UNREACHABLE"),
            (receivers.reset(), "UNREACHABLE"),
            (receivers.hang(), "TIMEOUT"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    async def test_bad_source_is_an_error_with_its_code(self, behaviour: receivers.Behaviour, code: str) -> None:
        async with Receiver() as receiver, guarded(LOOPBACK) as client:
            receiver.default = behaviour
            with pytest.raises(FetchError) as error:
                await client.fetch_bounded(receiver.url, max_bytes=len(PNG), timeout=0.3)
            assert error.value.code == code
            assert len(receiver.requests) == 1

    async def test_refusal_tells_nothing_about_the_network_inside(self) -> None:
        async with guarded(EgressPolicy(), names(inside_example="10.1.2.3")) as client:
            with pytest.raises(FetchError) as error:
                await client.fetch_bounded("https://inside.example/", max_bytes=10)
            assert error.value.code == "ADDRESS_REFUSED"
            assert "10.1.2.3" not in str(error.value)
            with pytest.raises(FetchError) as error:
                await client.fetch_bounded("https://0x0a.1/", max_bytes=10)
            assert error.value.code == "URL_REFUSED"
