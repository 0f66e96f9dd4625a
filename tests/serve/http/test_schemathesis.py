# SPDX-License-Identifier: Apache-2.0
"""Requests that schemathesis makes of the description of the paths: no error of the server, nothing undescribed."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from terarec.serve import ServedModels
from terarec.spec import AccessSpec, ServingSpec
from tests.serve.http.serving import served
from tests.waiting import PATIENCE

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = 100


def check_operation(operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    def check(case: Any) -> None:
        response = case.call(timeout=PATIENCE)
        assert response.status_code != 500, response.text
        assert str(response.status_code) in operation.definition.raw["responses"]
        if response.status_code >= 400:
            assert list(response.json()) == ["error"]
            assert "\n" not in response.json()["error"]

    check()


@pytest.mark.slow
def test_generated_requests_are_answered_as_described(models: ServedModels) -> None:
    with served(models, ServingSpec(access=AccessSpec(shared_memory=False))) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) > 20
        for operation in operations:
            check_operation(operation)
