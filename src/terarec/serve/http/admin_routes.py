# SPDX-License-Identifier: Apache-2.0
"""The paths by which administrators change what a server serves: promotions, returns to earlier versions, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

from terarec.errors import ConfigError
from terarec.serve.api import InferenceApi
from terarec.serve.http.messages import Request, Response, json_response
from terarec.serve.http.routes import Route, Routes
from terarec.serve.json_codec import decode_object
from terarec.spec import checks, from_data
from terarec.spec.checks import quoted
from terarec.spec.serving_repository import MOST_VERSIONS, PointerSpec, PromotionSpec

_ROLES = ("share", "by", "shadow")
"""Fields of `PromotionSpec` for a version that is in the repository; the others are of a run that becomes one."""


def add_administration(routes: Routes, api: InferenceApi, shut_down: Callable[[], None] | None = None) -> None:
    """Add the paths of administrators.

    Args:
        routes: Table of paths.
        api: The calls.
        shut_down: Function that lets the whole server finish, and does not wait; None for no such path.
    """

    async def promote(request: Request) -> Response:
        fields = _fields(request, ("version", *_ROLES))
        if "version" not in fields:
            raise ConfigError("version", "missing, expected a version of the repository")
        role = from_data(PromotionSpec, {name: value for name, value in fields.items() if name in _ROLES}, "")
        name, version = request.variables["name"], _version(fields, "version")
        # In a thread, since it waits for others that change the pointer.
        return _answer(name, await asyncio.to_thread(api.promote, name, version, role))

    async def roll_back(request: Request) -> Response:
        fields = _fields(request, ("to",))
        name = request.variables["name"]
        to = None if fields.get("to") is None else _version(fields, "to")
        return _answer(name, await asyncio.to_thread(api.roll_back, name, to))

    routes.add(Route("POST", "/v1/repository/models/{name}/promote", promote, "admin"))
    routes.add(Route("POST", "/v1/repository/models/{name}/rollback", roll_back, "admin"))
    if shut_down is None:
        return

    async def end(request: Request) -> Response:
        _fields(request, ())
        shut_down()
        # This request is in flight, so that it is answered before the server ends.
        return json_response({"draining": True})

    routes.add(Route("POST", "/v1/shutdown", end, "admin"))


def _fields(request: Request, known: Collection[str]) -> Mapping[str, Any]:
    fields = decode_object(request.body)
    for name in fields:
        if name not in known:
            expected = ", ".join(known) or "an empty object"
            raise ConfigError("the body", f"unknown field {quoted(name, is_json=True)}, expected {expected}")
    return fields


def _version(fields: Mapping[str, Any], name: str) -> int:
    version: int = fields[name]
    checks.argument(name, version, checks.integer(1, MOST_VERSIONS))
    return version


def _answer(name: str, pointer: PointerSpec) -> Response:
    return json_response({"model": name, **pointer.roles()})
