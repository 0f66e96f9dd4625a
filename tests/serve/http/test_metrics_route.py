# SPDX-License-Identifier: Apache-2.0
"""The path of the metrics."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from terarec.serve import ServedModels
from tests.serve.http.serving import served
from tests.waiting import PATIENCE


def test_prometheus_reads_what_is_served(models: ServedModels) -> None:
    with served(models) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for path in ("/nowhere", "/v2/models/nothing", "/v2/models/nothing"):
            assert client.get(path).status_code == 404
        assert client.get("/v2/models/dlrm/infer").status_code == 405
        answer = client.get("/metrics")
        assert client.post("/metrics").status_code == 405
    assert answer.headers["content-type"].startswith("text/plain")
    found = {family.name: family for family in text_string_to_metric_families(answer.text)}
    errors = {tuple(sample.labels.values()): sample.value for sample in found["terarec_errors"].samples}
    assert {place: count for place, count in errors.items() if count} == {
        ("http", "not_found"): 3,
        ("http", "method_not_allowed"): 1,
    }
    assert {sample.labels["model"] for sample in found["terarec_queue_requests"].samples} == {"dlrm"}
