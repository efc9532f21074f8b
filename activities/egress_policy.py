"""Where this gateway may connect to when a client names the URL: pure rules over URLs and addresses.

The address table follows the IANA special-purpose registries and the metadata services of the large clouds.
What the standard library calls global is not enough: it holds multicast and some tunnels to be public.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from types import MappingProxyType
from typing import Final

import httpx

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_URL_LENGTH: Final = 2_048
_MAX_NAME_LENGTH: Final = 253
_MAX_PORT: Final = 65_535

_CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        # The most telling name comes first: a metadata address is also link-local.
        "cloud metadata": "169.254.169.254 169.254.170.2 168.63.129.16 100.100.100.200 192.0.0.192 fd00:ec2::254",
        "loopback": "127.0.0.0/8 ::1",
        "link-local": "169.254.0.0/16 fe80::/10",
        "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16",
        "unique local": "fc00::/7",
        "carrier-grade NAT": "100.64.0.0/10",
        "unspecified": "0.0.0.0/8 ::",
        "IPv4-mapped": "::ffff:0:0/96 ::ffff:0:0:0/96",
        "IPv4-compatible": "::/96",
        "NAT64": "64:ff9b::/96 64:ff9b:1::/48",
        "6to4": "2002::/16 192.88.99.0/24",
        "Teredo": "2001::/32",
        "documentation": "192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 2001:db8::/32 3fff::/20",
        "benchmarking": "198.18.0.0/15 2001:2::/48",
        "protocol assignment": "192.0.0.0/24 192.31.196.0/24 192.52.193.0/24 192.175.48.0/24 2001::/23",
        "multicast": "224.0.0.0/4 ff00::/8",
        "reserved": "240.0.0.0/4",
        "discard-only": "100::/64",
        "segment routing": "5f00::/16",
        "site-local": "fec0::/10",
    }
)
_REFUSED: Final[tuple[tuple[str, Network], ...]] = tuple(
    (name, ip_network(network)) for name, networks in _CLASSES.items() for network in networks.split()
)
_GLOBAL_UNICAST_V6: Final = ip_network("2000::/3")

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_ENDS_IN_NUMBER = re.compile(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)\.?$")


def address_class(address: Address) -> str | None:
    """Name the class that keeps an address from being public; None for a public unicast address."""
    for name, network in _REFUSED:
        if address in network:
            return name
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST_V6:
        return "unallocated"
    return None


class UrlRefusedError(Exception):
    """A URL that the policy refuses whatever its name resolves to. `rule` is stable; the message is for people."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


@dataclass(frozen=True, kw_only=True)
class EgressPolicy:
    """Which URLs may be asked for and which addresses connected to. The default is right for production."""

    allowed_networks: tuple[Network, ...] = ()
    """For development: whatever their class, these are connected to, over plain HTTP too and on any port."""
    ports: frozenset[int] = frozenset({443, 8443})
    """Ports of everybody else, over HTTPS."""

    @classmethod
    def allowing(cls, *networks: str) -> EgressPolicy:
        """The default with these networks (CIDR) allowed, e.g. `127.0.0.0/8` and `::1/128` in development."""
        return cls(allowed_networks=tuple(ip_network(network) for network in networks))

    def refusal(self, address: Address, port: int, *, plain_http: bool) -> str | None:
        """Why an address must not be connected to, as a phrase; None when it may."""
        if any(address in network for network in self.allowed_networks):
            return None
        special = address_class(address)
        if special is not None:
            return f"a {special} address"
        if plain_http:
            return "not reachable over plain HTTP, which is allowed to development networks only"
        if port not in self.ports:
            return f"not reachable on port {port}; allowed: {', '.join(map(str, sorted(self.ports)))}"
        return None

    def check_url(self, url: str) -> httpx.URL:
        """Return the parsed URL if nothing in it is refused.

        Names are not resolved here: what a name may stand for is decided by `refusal` when it is connected to.

        Raises:
            UrlRefusedError: `rule` is one of `url`, `length`, `scheme`, `userinfo`, `host`, `port`, `address`.
        """
        if len(url) > MAX_URL_LENGTH:
            raise UrlRefusedError("length", f"the URL is longer than {MAX_URL_LENGTH} characters")
        # Parsers disagree about what these mean, and every disagreement is a way round a check.
        if "\\" in url or any(character <= " " or character == "\x7f" for character in url):
            raise UrlRefusedError("url", "the URL holds a backslash, a space or a control character")
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise UrlRefusedError("url", f"the URL cannot be parsed: {error}") from error
        self.check_parsed(parsed)
        if "@" in re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0]:
            raise UrlRefusedError("userinfo", "the URL carries credentials")
        return parsed

    def check_parsed(self, url: httpx.URL) -> None:
        """The part of `check_url` that the transport repeats for every request."""
        if url.scheme != "https" and not (url.scheme == "http" and self.allowed_networks):
            raise UrlRefusedError("scheme", "the URL must start with https://")
        if url.userinfo:
            raise UrlRefusedError("userinfo", "the URL carries credentials")
        port = effective_port(url)
        if not 0 < port <= _MAX_PORT or (port not in self.ports and not self.allowed_networks):
            raise UrlRefusedError("port", f"port {port} is not one of {', '.join(map(str, sorted(self.ports)))}")
        self._check_host(url.raw_host.decode("ascii").lower(), port, plain_http=url.scheme == "http")

    def _check_host(self, host: str, port: int, *, plain_http: bool) -> None:
        literal = literal_address(host)
        if literal is not None:
            refused = self.refusal(literal, port, plain_http=plain_http)
            if refused is not None:
                raise UrlRefusedError("address", f"{literal} is {refused}")
        # 0x7f.1, 0177.0.0.1 and 2130706433 are addresses to a resolver; only the plain form is one to us.
        elif len(host) > _MAX_NAME_LENGTH or not _NAME.fullmatch(host) or _ENDS_IN_NUMBER.search(host):
            raise UrlRefusedError("host", "the host is neither a name nor an address in plain form")


def effective_port(url: httpx.URL) -> int:
    """The port that a request to a URL goes to."""
    if url.port is not None:
        return url.port
    return 443 if url.scheme == "https" else 80


def literal_address(host: str) -> Address | None:
    """The address that a host is in its canonical form, or None for a name (or for anything odd)."""
    if "%" in host:  # a zone id: link-local by its nature, and never a name
        return None
    try:
        return ip_address(host)
    except ValueError:
        return None
