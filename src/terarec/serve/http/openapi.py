# SPDX-License-Identifier: Apache-2.0
"""The description of the paths in OpenAPI 3.1, and a page of it that needs nothing from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import terarec
from terarec.serve.http.messages import Request, Response, json_response
from terarec.serve.http.routes import Route, Routes
from terarec.serve.json_codec import MAX_DIMENSIONS
from terarec.serve.protocol import DATATYPES
from terarec.spec.serving_repository import MOST_VERSIONS

_SUMMARIES: Mapping[str, str] = {
    "GET /v2": "Name and version of the server, and the extensions of the protocol that it has",
    "GET /v2/health/live": "Whether the server answers",
    "GET /v2/health/ready": "Whether the server takes requests",
    "GET /v2/models/stats": "Counters and durations of all models",
    "GET /v2/models/{name}": "Inputs and outputs of a model",
    "GET /v2/models/{name}/ready": "Whether a model takes requests",
    "GET /v2/models/{name}/config": "Configuration of a model, as Triton has it",
    "GET /v2/models/{name}/stats": "Counters and durations of a model",
    "POST /v2/models/{name}/infer": "Score records",
    "POST /v2/repository/index": "All versions of all models",
    "POST /v2/repository/models/{name}/load": "Load a model",
    "POST /v2/repository/models/{name}/unload": "Unload a model",
    "GET /v2/trace/setting": "Settings of traces",
    "POST /v2/trace/setting": "Change settings of traces",
    "GET /v2/models/{name}/trace/setting": "Settings of the traces of a model",
    "POST /v2/models/{name}/trace/setting": "Change settings of the traces of a model",
    "GET /v2/logging": "Which messages are logged",
    "POST /v2/logging": "Choose which messages are logged",
    "GET /v2/{kind}sharedmemory/status": "Registered regions of shared memory",
    "GET /v2/{kind}sharedmemory/region/{region}/status": "A registered region of shared memory",
    "POST /v2/{kind}sharedmemory/region/{region}/register": "Register a region of shared memory",
    "POST /v2/{kind}sharedmemory/region/{region}/unregister": "Forget a region of shared memory",
    "POST /v2/{kind}sharedmemory/unregister": "Forget all regions of shared memory",
    "POST /v1/repository/models/{name}/promote": "Let a version of the repository answer, or a share of the requests",
    "POST /v1/repository/models/{name}/rollback": "Return to an earlier version, or end a share",
    "POST /v1/recommend": "Recommend items to users",
    "POST /v1/shutdown": "Finish the requests in flight, and end",
    "GET /": "A page that shows the metrics and scores a record",
    "GET /metrics": "Counters and durations for Prometheus",
    "GET /drift": "Drift of what models score from their training data",
    "GET /openapi.json": "This description",
    "GET /docs": "A page of this description",
}

_MEDIA_TYPES: Mapping[str, str] = {"/": "text/html", "/docs": "text/html", "/metrics": "text/plain"}
"""Path -> type of its answer, where that is not JSON."""

_BODIES: Mapping[str, str] = {
    "infer": "InferRequest",
    "register": "Region",
    "promote": "Promotion",
    "rollback": "Rollback",
    "recommend": "RecommendRequest",
}
"""Last part of a path -> schema of its body."""

_ANSWERS: Mapping[str, str] = {"infer": "InferResponse", "recommend": "RecommendAnswer"}
"""Last part of a path -> schema of its answer."""

_NEEDS_BODY = ("infer", "promote", "recommend")

_ERRORS: Mapping[str, str] = {
    "400": "Something in the request is invalid",
    "401": "A token is missing or unknown",
    "403": "The call comes from another site, or to another address than it may",
    "404": "No such path, model or region",
    "408": "The body did not arrive in time",
    "413": "More bytes or records than the limits",
    "415": "Another type than JSON",
    "500": "A model or the server failed",
    "501": "A part of the protocol that this server does not have",
    "503": "The server has too many requests, or cannot do this now",
}

_DESCRIPTION = (
    "The Open Inference Protocol v2 with Triton's extensions. Tensors may also follow the JSON as bytes; the header "
    "Inference-Header-Content-Length has the length of the JSON then."
)

_PARAMETERS = {"type": "object", "additionalProperties": True}
_KEYS = {"type": "array", "items": {"type": ["integer", "string"]}}
_SCORING_VERSION = {
    "type": "object",
    "properties": {"model": {"type": "string"}, "version": {"type": "string"}, "step": {"type": "integer"}},
    "required": ["model", "version", "step"],
}
_VERSION = {"type": "integer", "minimum": 1, "maximum": MOST_VERSIONS}

_SCHEMAS: Mapping[str, Any] = {
    "Error": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
    "Tensor": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "datatype": {"enum": list(DATATYPES)},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_DIMENSIONS},
            "data": {"type": "array", "description": "Elements in row-major order, flat or nested; null is missing"},
            "parameters": _PARAMETERS,
        },
        "required": ["name", "datatype", "shape"],
        "additionalProperties": False,
    },
    "InferRequest": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "parameters": _PARAMETERS,
        },
        "required": ["inputs"],
        "additionalProperties": False,
    },
    "InferResponse": {
        "type": "object",
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            "parameters": _PARAMETERS,
        },
        "required": ["model_name", "model_version", "outputs"],
    },
    "Region": {
        "type": "object",
        "properties": {
            "key": {"type": "string"},
            "offset": {"type": "integer", "minimum": 0},
            "byte_size": {"type": "integer", "minimum": 1},
        },
        "required": ["key", "byte_size"],
    },
    "RecommendRequest": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "users": {
                "type": "object",
                "description": "Raw columns of users, one value for each user; null is missing",
                "additionalProperties": {"type": "array"},
            },
            "k": {"type": "integer", "minimum": 1, "default": 10, "description": "Items for a user"},
            "candidates": {
                "type": "integer",
                "minimum": 1,
                "description": "Items that the ranking model puts in order",
            },
            "exclude": {
                "type": "array",
                "items": _KEYS,
                "description": "Items that a user is not to get, for each user",
            },
            "allow": {**_KEYS, "description": "The only items that may be recommended"},
            "parameters": _PARAMETERS,
        },
        "required": ["users"],
        "additionalProperties": False,
    },
    "RecommendAnswer": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "items": {"type": "array", "items": _KEYS, "description": "Items of each user, the best first"},
            "scores": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            "retrieval": _SCORING_VERSION,
            "ranking": {"anyOf": [_SCORING_VERSION, {"type": "null"}]},
        },
        "required": ["items", "scores", "retrieval", "ranking"],
    },
    "Promotion": {
        "type": "object",
        "description": "Without a share and a shadow the version answers all requests.",
        "properties": {
            "version": _VERSION,
            "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "by": {"type": "string", "description": "Parameter or column whose value decides; with a share"},
            "shadow": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        },
        "required": ["version"],
        "additionalProperties": False,
    },
    "Rollback": {
        "type": "object",
        "description": "Without a version a share or a shadow ends, or else the version before answers again.",
        "properties": {"to": _VERSION},
        "additionalProperties": False,
    },
}


def description(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the description of routes as an OpenAPI document."""
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "terarec",
            "version": terarec.__version__,
            "description": _DESCRIPTION,
        },
        "paths": paths,
        "components": {
            "schemas": dict(_SCHEMAS),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def summary(route: Route) -> str:
    """Return what a route does, in a line."""
    path = route.path.replace("/versions/{version}", "")
    for kind in ("system", "cuda"):
        path = path.replace(f"/v2/{kind}sharedmemory", "/v2/{kind}sharedmemory")
    return _SUMMARIES[f"{route.method} {path}"]


def _operation(route: Route) -> dict[str, Any]:
    variables = [segment[1:-1] for segment in route.path.split("/") if segment.startswith("{")]
    body = _body(route)
    answered = _ANSWERS.get(route.path.rpartition("/")[2])
    schema = {} if answered is None else {"schema": {"$ref": f"#/components/schemas/{answered}"}}
    media_type = _MEDIA_TYPES.get(route.path, "application/json")
    operation: dict[str, Any] = {
        "summary": summary(route),
        "responses": {
            "200": {"description": "The answer", "content": {media_type: schema}},
            **{status: _error(text) for status, text in _ERRORS.items()},
        },
    }
    if variables:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in variables
        ]
    if body is not None:
        is_required = route.path.rpartition("/")[2] in _NEEDS_BODY
        operation["requestBody"] = {"required": is_required, "content": {"application/json": body}}
    if route.access != "open":
        operation["security"] = [{}, {"token": []}]
    return operation


def _body(route: Route) -> dict[str, Any] | None:
    if route.method != "POST":
        return None
    name = _BODIES.get(route.path.rpartition("/")[2])
    return {"schema": {"type": "object"} if name is None else {"$ref": f"#/components/schemas/{name}"}}


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


def add_docs(routes: Routes) -> None:
    """Add ``/openapi.json`` and ``/docs``, which describe all routes that are there when they are called."""

    async def document(_: Request) -> Response:
        return json_response(description(list(routes)))

    async def docs(_: Request) -> Response:
        return Response(
            page(description(list(routes))).encode(),
            media_type="text/html; charset=utf-8",
            # Nothing is loaded or run, whatever the description holds.
            headers={
                "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
            },
        )

    routes.add(Route("GET", "/openapi.json", document, "index"))
    routes.add(Route("GET", "/docs", docs, "index"))


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8886; border-radius: 6px; }
summary { cursor: pointer; padding: .4rem 0; overflow-wrap: anywhere; }
details { border-bottom: 1px solid #8884; }
b { display: inline-block; min-width: 3.5rem; }
td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
"""


def page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>terarec: paths</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<style>{_STYLE}</style></head><body><h1>terarec {_text(document['info']['version'])}</h1>",
        f"<p>{_text(document['info']['description'])}</p>",
        "<p>The same for programs: <a href='openapi.json'>openapi.json</a></p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(
                f"<details><summary><b>{method.upper()}</b> <code>{_text(path)}</code> "
                f"{_text(operation['summary'])}</summary>"
            )
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                parts.append(f"<p>Body</p><pre>{_text(json.dumps(_resolved(body, document), indent=2))}</pre>")
            rows = (
                f"<tr><td>{status}</td><td>{_text(response['description'])}</td></tr>"
                for status, response in operation["responses"].items()
            )
            parts.append(f"<table>{''.join(rows)}</table></details>")
    return "".join((*parts, "</body></html>"))


def _resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    resolved: Mapping[str, Any] = document["components"]["schemas"][name] if name else schema
    return resolved


def _text(value: object) -> str:
    return html.escape(str(value))
