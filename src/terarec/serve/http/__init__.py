# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1: `HttpServer` receives requests within limits, `Routes` choose handlers, `api_routes` has the protocol.

Needs the extra ``serve``: httptools parses requests, uvloop runs the event loop, orjson parses bodies.
"""
