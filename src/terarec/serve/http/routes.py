# SPDX-License-Identifier: Apache-2.0
"""`Routes`: which handler answers a request, and who may call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import unquote

from terarec.serve.access import Access
from terarec.serve.http.messages import Handler, Request, RouteError
from terarec.spec.checks import shortened


class Route(NamedTuple):
    """A path, a method and what answers.

    Attributes:
        method: Method; one of GET answers HEAD, too.
        path: Path, of which segments such as ``{name}`` are variables.
        handler: Handler of its requests.
        access: Who may call it.
        check: Check of the head of a request before its body is received; it raises what is wrong.
    """

    method: str
    path: str
    handler: Handler
    access: Access = "use"
    check: Callable[[Request], None] | None = None


class _Node:
    """A segment of paths: the constants and the variable that may follow, and the routes that end here."""

    def __init__(self) -> None:
        self.constants: dict[str, _Node] = {}
        self.variable: _Node | None = None
        self.routes: dict[str, Route] = {}
        self.names: tuple[str, ...] = ()


class Routes:
    """A table of routes. Constant segments are preferred to variables."""

    def __init__(self, *routes: Route) -> None:
        self._root = _Node()
        self._all: list[Route] = []
        for route in routes:
            self.add(route)

    def add(self, route: Route) -> None:
        """Add a route."""
        node, names = self._root, []
        for segment in route.path.split("/")[1:]:
            if segment.startswith("{"):
                names.append(segment[1:-1])
                node.variable = node.variable or _Node()
                node = node.variable
            else:
                node = node.constants.setdefault(segment, _Node())
        node.routes[route.method] = route
        node.names = tuple(names)
        self._all.append(route)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._all)

    def find(self, request: Request) -> Route:
        """Return the route of a request, whose variables are set.

        Raises:
            RouteError: No such path, or not with this method.
        """
        match = self._node(self._root, request.path.split("/")[1:], ())
        # The protocol has no paths that end with a slash: they are reported as unknown.
        if match is None or not request.path.startswith("/"):
            raise RouteError(f"{request.method} {shortened(request.path)}", "Not Found", status=404)
        node, values = match
        route = node.routes.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = (*node.routes, *(("HEAD",) if "GET" in node.routes else ()))
            place = f"{request.method} {shortened(request.path)}"
            raise RouteError(place, f"Method Not Allowed, expected {' or '.join(allowed)}", status=405, allowed=allowed)
        if values:
            request.variables = dict(zip(node.names, values, strict=True))
        return route

    def _node(self, node: _Node, segments: list[str], values: tuple[str, ...]) -> tuple[_Node, tuple[str, ...]] | None:
        if not segments:
            return (node, values) if node.routes else None
        segment, rest = segments[0], segments[1:]
        constant = node.constants.get(segment)
        if constant is not None:
            match = self._node(constant, rest, values)
            if match is not None:
                return match
        if node.variable is None or not segment:
            return None
        return self._node(node.variable, rest, (*values, unquote(segment)))
