"""Input images: what is really a picture within the limits, and where it goes."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import httpx
import pytest
from PIL import Image

from activities.dns_cache import DnsCache
from activities.egress_policy import Address, EgressPolicy
from activities.http_guard import GuardedClient
from api.images import ImageFetcher, ImageLimits, InvalidImageError, check_image, guarded_fetch, load_image
from tests.api.stand import Stand
from tests.api.test_problems import assert_problem
from tests.certificates import CertificateAuthority
from tests.receiver import Behaviour, Receiver, close, drip, endless, gzip_bomb, hang, redirect, respond
from workflows import naming
from workflows.tasks import GenerationInput, User

LIMITS = ImageLimits(max_bytes=200_000, max_pixels=1_000_000)


def picture(kind: str, size: tuple[int, int] = (64, 48), **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("RGB").save(buffer, kind, **options)
    return buffer.getvalue()


def animation(kind: str) -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that unfolds into width x height pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1_000))
        + chunk(b"IEND", b"")
    )


def scanned(times: int) -> bytes:
    """A progressive JPEG of a megapixel, whose last scan is repeated with nothing in it."""
    whole = picture("JPEG", (1_000, 1_000), progressive=True)
    header = whole[whole.rfind(b"\xff\xda") :][:10]
    assert header[:4] == b"\xff\xda\x00\x08"
    return whole.removesuffix(b"\xff\xd9") + (header + b"\0") * times + b"\xff\xd9"


def data_url(content: bytes, label: str = "image/png") -> str:
    return f"data:{label};base64,{base64.b64encode(content).decode()}"


async def no_fetch(url: str, max_bytes: int) -> bytes:
    raise AssertionError(f"a data URL needs no request to {url}")


@pytest.mark.parametrize(("kind", "media_type"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")])
async def test_the_type_comes_from_the_content_and_the_bytes_are_kept(kind: str, media_type: str) -> None:
    content = picture(kind)
    image = await load_image(data_url(content, "text/plain"), LIMITS, fetch=no_fetch)
    assert (image.media_type, image.width, image.height, image.content) == (media_type, 64, 48, content)
    assert image.sha256 == hashlib.sha256(content).hexdigest()


def test_a_phones_jpeg_with_a_second_picture_inside_is_taken() -> None:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    frames[0].save(buffer, "MPO", save_all=True, append_images=frames[1:])
    assert check_image(buffer.getvalue(), LIMITS).media_type == "image/jpeg"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "image_decodable"),
        (b"GIF89a" + b"\0" * 100, "image_decodable"),
        (picture("BMP"), "image_decodable"),
        (picture("TIFF"), "image_decodable"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image_decodable"),
        (picture("PNG")[:-200], "image_decodable"),
        (picture("JPEG")[:-100], "image_decodable"),
        (picture("WEBP")[:-100], "image_decodable"),
        (picture("PNG").replace(b"IDAT", b"IDAX", 1), "image_decodable"),
        (animation("PNG"), "image_animated"),
        (animation("WEBP"), "image_animated"),
        (picture("PNG", (1_001, 1_000)), "image_pixels"),
        (png_claiming(30_000, 30_000), "image_pixels"),
        (png_claiming(2**31 - 1, 2**31 - 1), "image_pixels"),
        (scanned(10_000), "image_scans"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 200_001, "image_bytes"),
    ],
    ids=[
        *("empty", "gif", "bmp", "tiff", "svg", "cut png", "cut jpeg", "cut webp", "broken png"),
        *("animated png", "animated webp", "too many pixels", "bomb", "huge bomb", "scan bomb", "too many bytes"),
    ],
)
def test_what_is_no_picture_within_the_limits_is_refused(content: bytes, rule: str) -> None:
    with pytest.raises(InvalidImageError) as caught:
        check_image(content, LIMITS)
    assert caught.value.rule == rule


def test_a_progressive_jpeg_as_encoders_write_it_is_taken() -> None:
    assert check_image(scanned(5), LIMITS).media_type == "image/jpeg"


async def test_a_data_url_is_measured_before_it_is_decoded() -> None:
    with pytest.raises(InvalidImageError) as caught:
        await load_image("data:image/png;base64," + "!" * 400_000, LIMITS, fetch=no_fetch)
    assert caught.value.rule == "image_bytes"


@asynccontextmanager
async def fetcher(
    authority: CertificateAuthority, policy: EgressPolicy, timeout: float = 2.0
) -> AsyncIterator[ImageFetcher]:
    """Reads images as the API does, trusting the tests' own authority; every name is this machine's."""

    async def resolve(name: str) -> tuple[Address, ...]:
        return (ip_address("127.0.0.1"),)

    client = GuardedClient(policy, DnsCache(resolve), ssl_context=authority.client_context())
    try:
        yield guarded_fetch(client, timeout=timeout)
    finally:
        await client.aclose()


async def test_an_image_is_read_over_https() -> None:
    authority, content = CertificateAuthority(), picture("PNG")
    async with (
        Receiver(tls=authority.server_context("images.example"), host="images.example") as host,
        fetcher(authority, EgressPolicy.allowing("127.0.0.0/8")) as fetch,
    ):
        host.default = respond(200, content)
        image = await load_image(host.url_of("/cat.png"), LIMITS, fetch=fetch)
        assert (image.content, image.media_type) == (content, "image/png")
        [request] = host.requests
        assert (request.method, request.server_name) == ("GET", "images.example")


@pytest.mark.parametrize(
    ("behaviour", "rule"),
    [
        (respond(404), "image_http_status"),
        (redirect("https://10.0.0.1/"), "image_redirect"),
        (respond(200, b"<html>no picture</html>"), "image_decodable"),
        (respond(200, picture("PNG", (1_001, 1_000))), "image_pixels"),
        (respond(200, b"x" * 200_001), "image_bytes"),
        (endless(), "image_bytes"),
        (gzip_bomb(), "image_bytes"),
        (drip(), "image_incomplete"),
        (hang(), "image_timeout"),
        (close(), "image_unreachable"),
    ],
    ids=["404", "redirect", "html", "pixels", "large", "endless", "bomb", "drip", "hang", "close"],
)
async def test_what_cannot_be_fetched_as_a_picture_names_its_rule(behaviour: Behaviour, rule: str) -> None:
    authority = CertificateAuthority()
    async with (
        Receiver(tls=authority.server_context("images.example"), host="images.example") as host,
        fetcher(authority, EgressPolicy.allowing("127.0.0.0/8"), timeout=0.5) as fetch,
    ):
        host.default = behaviour
        with pytest.raises(InvalidImageError) as caught:
            await load_image(host.url_of("/cat.png"), LIMITS, fetch=fetch)
        assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://images.example/cat.png", "scheme"),
        ("https://images.example:22/cat.png", "port"),
        ("https://127.0.0.1/cat.png", "address"),
        ("https://images.example/cat.png", "address"),
    ],
    ids=["plain http", "port", "literal", "a name that is this machine"],
)
async def test_in_production_nothing_of_this_machine_or_network_is_fetched(url: str, rule: str) -> None:
    async with fetcher(CertificateAuthority(), EgressPolicy()) as fetch:
        with pytest.raises(InvalidImageError) as caught:
            await load_image(url, LIMITS, fetch=fetch)
        assert caught.value.rule == rule
        assert "127.0.0.1" not in caught.value.message or "127.0.0.1" in url


async def test_a_task_is_submitted_with_an_image_by_url(quiet: Stand) -> None:
    content = picture("PNG")
    async with Receiver() as host, quiet.user("collector") as http:
        host.default = respond(200, content)
        fields = {"prompt": "let it move", "model": "tiny-wan-i2v"}
        by_url = await http.post("/tasks", json={**fields, "image": host.url_of("/cat.png")})
        assert by_url.status_code == 202, by_url.text
        assert by_url.json()["parameters"]["image_sha256"] == hashlib.sha256(content).hexdigest()
        inline = await http.post("/tasks", json={**fields, "image": data_url(content)})
        assert (inline.status_code, inline.json()["task_id"]) == (200, by_url.json()["task_id"])
        host.default = respond(404)
        refused = await http.post("/tasks", json={**fields, "image": host.url_of("/dog.png")})
        assert_problem(refused, 422, "VALIDATION_FAILED", image="image_http_status")


async def test_an_image_is_stored_for_its_user_before_the_job_starts(quiet: Stand) -> None:
    content = picture("JPEG")
    digest = hashlib.sha256(content).hexdigest()
    async with quiet.user("painter") as http:
        task = (await submit(http, content)).json()
        again = await submit(http, content, label="image/jpeg")
        other = (await submit(http, picture("PNG"))).json()
    assert task["parameters"]["image_sha256"] == digest
    assert (again.status_code, again.json()["task_id"]) == (200, task["task_id"])
    assert other["task_id"] != task["task_id"]
    key = naming.input_key(User(tenant="acme", end_user="painter"), digest)
    assert await quiet.store.get(key) == content
    described = await quiet.client.get_workflow_handle(task["task_id"]).describe()
    stored: GenerationInput = await described.memo_value(naming.MEMO_REQUEST, type_hint=GenerationInput)
    assert (stored.parameters.image_key, stored.parameters.image_sha256) == (key, digest)


async def submit(http: httpx.AsyncClient, image: bytes, label: str = "image/png") -> httpx.Response:
    return await http.post(
        "/tasks", json={"prompt": "let it move", "model": "tiny-wan-i2v", "image": data_url(image, label)}
    )
