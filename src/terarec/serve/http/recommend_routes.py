# SPDX-License-Identifier: Apache-2.0
"""The path ``/v1/recommend``: items for users."""

from __future__ import annotations

import asyncio

from terarec.serve.http.api_routes import SMALL_BYTES
from terarec.serve.http.compression import check_encoding, decompress
from terarec.serve.http.messages import Request, Response, check_content_type, json_response
from terarec.serve.http.routes import Route, Routes
from terarec.serve.recommending import RecommendationService, RecommendRequest, decode_recommend_request


def add_recommendations(routes: Routes, service: RecommendationService, max_request_bytes: int) -> None:
    """Add the path.

    Args:
        routes: Table of paths.
        service: Answers requests.
        max_request_bytes: Limit of the bytes of a body, also of one that is decompressed.
    """

    def decoded(request: Request) -> RecommendRequest:
        encoding = request.headers.get("content-encoding", "")
        return decode_recommend_request(decompress(request.body, encoding, max_request_bytes))

    def check(request: Request) -> None:
        check_content_type(request)
        check_encoding(request.headers.get("content-encoding", ""))

    async def recommend(request: Request) -> Response:
        if len(request.body) <= SMALL_BYTES and "content-encoding" not in request.headers:
            question = decoded(request)
        else:
            question = await asyncio.to_thread(decoded, request)
        return json_response(await service.recommend(question))

    routes.add(Route("POST", "/v1/recommend", recommend, "use", check))
