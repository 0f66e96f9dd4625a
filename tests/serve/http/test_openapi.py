# SPDX-License-Identifier: Apache-2.0
"""The description of the paths: every path is on it, and its page needs nothing from elsewhere."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from terarec.serve import InferenceSession, ServedModels
from terarec.serve.http.openapi import page
from terarec.serve.protocol import DATATYPES
from tests.serve.conftest import TrainedRun
from tests.serve.http.serving import served
from tests.serve.http.test_api_routes import INFER, tensors
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def client(models: ServedModels) -> Iterator[httpx.Client]:
    with served(models) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as found:
        yield found


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def test_every_path_is_described(client: httpx.Client, document: dict[str, Any], session: InferenceSession) -> None:
    values = {"{name}": "dlrm", "{version}": str(session.step), "{region}": "none"}
    assert len(document["paths"]) > 20
    for path, operations in document["paths"].items():
        called = re.sub(r"{\w+}", lambda found: values[found.group()], path)
        for method, operation in operations.items():
            answer = client.request(method, called)
            assert answer.status_code not in (405, 500), f"{method} {called}"
            assert str(answer.status_code) in operation["responses"]
            assert operation["summary"]
            assert len(operation.get("parameters", [])) == path.count("{")


def test_the_description_has_the_datatypes(document: dict[str, Any]) -> None:
    assert tuple(document["components"]["schemas"]["Tensor"]["properties"]["datatype"]["enum"]) == DATATYPES


def test_the_schema_takes_what_the_server_takes(
    client: httpx.Client, document: dict[str, Any], trained: TrainedRun
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    request = {"id": "7", "inputs": tensors(trained.records(0, 2)), "outputs": [{"name": "score"}]}
    answer = client.post(INFER, json=request)
    assert answer.status_code == 200
    for name, message in (("InferRequest", request), ("InferResponse", answer.json())):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(message)


def test_the_page_loads_nothing(client: httpx.Client, document: dict[str, Any]) -> None:
    answer = client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<script|<link|<img|src=|url\(|https?:", answer.text)
    for path in document["paths"]:
        assert path in answer.text


def test_texts_are_escaped_on_the_page() -> None:
    info = {"version": "1", "description": "<script>"}
    assert "<script>" not in page({"info": info, "paths": {"/<b>": {"get": {"summary": "<i>", "responses": {}}}}})
