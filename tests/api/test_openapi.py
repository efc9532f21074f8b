"""The OpenAPI schema and what really answers agree."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import pytest

from api import problems
from api.problems import GatewayError, ProblemCode
from tests.api.stand import Stand, http_client
from tests.scale import scaled

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_generated_requests_find_no_answer_that_the_schema_does_not_have(stand: Stand, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "schemathesis"),
        *("run", f"{stand.url}/openapi.json"),
        # An operator's, for to any other key the operators' routes answer 403 and nothing else.
        *("--header", f"Authorization: Bearer {stand.keys['operator']}", "--header", "X-User-Id: schemathesis"),
        *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--max-examples", str(scaled(50))),
        *("--exclude-path-regex", "/events$", "--seed", "1", "--no-color"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def test_every_problem_is_declared_with_its_shape(quiet: Stand) -> None:
    async with http_client(quiet.url) as nobody:
        schema = (await nobody.get("/openapi.json")).json()
    problem = schema["components"]["schemas"]["Problem"]
    assert {"type", "title", "status", "detail", "code"} <= set(problem["required"])
    assert set(schema["components"]["schemas"]["ProblemCode"]["enum"]) == set(ProblemCode)
    assert schema["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    for path, item in schema["paths"].items():
        if path.startswith("/api/"):
            for operation in item.values():
                assert {"401", "422", "500"} <= operation["responses"].keys(), path
                assert operation["responses"]["422"]["content"].keys() == {"application/problem+json"}, path
                links: list[object] = [{}] if path.endswith(("/video", "/poster")) else []
                assert operation["security"] == [{"HTTPBearer": []}, {"RequestSignature": []}, *links], path


def test_each_code_is_one_kind_of_problem() -> None:
    kinds = [kind for kind in vars(problems).values() if isinstance(kind, type) and issubclass(kind, GatewayError)]
    codes = [kind.code for kind in kinds if kind is not GatewayError]
    assert sorted(codes) == sorted(ProblemCode)
    assert all(httpx.codes(kind.status).is_error for kind in kinds if kind is not GatewayError)
