# SPDX-License-Identifier: Apache-2.0
"""Metrics in the text format of Prometheus, read by its own parser."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from terarec.errors import ConfigError
from terarec.serve import InferenceSession, ServedModel, ServedModels, ServedTables
from terarec.serve.live import LiveUpdates
from terarec.serve.metrics import Metrics
from terarec.serve.routing import Route, Router
from terarec.serve.statistics import DURATION_BOUNDS_NS, StageTimes, StatisticsCounter
from terarec.spec import CacheSpec, HostMemorySpec, ParameterServerSpec
from terarec.spec.serving_repository import ShadowSpec, SplitSpec
from tests.serve.conftest import TrainedRun
from tests.serve.test_models import request_of
from tests.waiting import PATIENCE, wait_for

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(models: ServedModels) -> Samples:
    text = Metrics(models).text().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(({"model": "dlrm", "version": "1"} | labels).items()))]


def test_durations_are_counted_in_ranges() -> None:
    counter = StatisticsCounter()
    counter.add_batch(3, StageTimes(0, 50_000, 50_001, 20_000_000_000), [0, 100_000])
    found = counter.read()
    assert {len(counts) for counts in found.durations.values()} == {len(DURATION_BOUNDS_NS) + 1}
    assert found.durations["compute_input"][:2] == (2, 0)  # a duration at a bound is within it
    assert found.durations["compute_infer"][:2] == (0, 2)
    assert found.durations["compute_output"][-1] == 2
    assert found.durations["queue"][:3] == (1, 1, 0)
    assert found.durations["request"][-1] == 2
    assert list(DURATION_BOUNDS_NS) == sorted(set(DURATION_BOUNDS_NS))


def test_a_batch_without_records_is_within_the_first_bound(session: InferenceSession) -> None:
    counter = StatisticsCounter()
    for size in (0, 1, 2, 3):
        counter.add_batch(size, StageTimes(), [0])
    with ServedModels() as models:
        models.install(ServedModel(session, name="dlrm", version="1", statistics=counter))
        found = samples(models)
    counts = [value(found, "terarec_batch_records_bucket", le=bound) for bound in ("1", "2", "4", "+Inf")]
    assert counts == [2, 3, 4, 4]


def test_a_scrape_has_what_the_models_count(session: InferenceSession, trained: TrainedRun) -> None:
    with ServedModels() as models:
        model = ServedModel(session, name="dlrm", version="1")
        models.install(model)
        before = samples(models)
        assert value(before, "terarec_requests_total", outcome="success") == 0
        assert value(before, "terarec_rejected_requests_total", reason="queue_full") == 0
        for stop in (1, 3, 40):
            models.submit(request_of(trained, 0, stop), "dlrm").result(timeout=PATIENCE)
        unreadable = request_of(trained, 0, 1)
        tensors = (unreadable.inputs[0]._replace(datatype="BYTES", data=["x"]), *unreadable.inputs[1:])
        with pytest.raises(ConfigError):
            models.submit(replace(unreadable, inputs=tensors), "dlrm")
        models.submit(request_of(trained, 0, 1, timeout=1), "dlrm").exception(timeout=PATIENCE)
        wait_for(lambda: sum(model.statistics().failed.values()) + model.statistics().succeeded == 4)
        counted, found = model.statistics(), samples(models)
    assert value(found, "terarec_requests_total", outcome="success") == counted.succeeded
    assert value(found, "terarec_requests_total", outcome="expired") == counted.failed.get("expired", 0)
    assert value(found, "terarec_records_total") == counted.records
    assert value(found, "terarec_request_duration_seconds_count") == counted.succeeded
    assert value(found, "terarec_request_duration_seconds_sum") == pytest.approx(counted.success_ns / 1e9)
    for stage, spent_ns in counted.times._asdict().items():
        assert value(found, f"terarec_{stage}_duration_seconds_count") == counted.succeeded
        assert value(found, f"terarec_{stage}_duration_seconds_sum") == pytest.approx(spent_ns / 1e9)
    assert value(found, "terarec_batch_records_sum") == counted.records
    within = {
        bound: value(found, "terarec_batch_records_bucket", le=bound) - (1 if counted.batches[1].count == 2 else 0)
        for bound in ("1", "2", "4", "32", "64", "+Inf")
    }
    assert within == {"1": 1, "2": 1, "4": 2, "32": 2, "64": 3, "+Inf": 3}
    assert value(found, "terarec_model_states", state="READY") == 1
    assert value(found, "terarec_weights_step") == session.step
    assert value(found, "terarec_queue_requests") == 0
    assert any(name == "process_resident_memory_bytes" for name, _ in found)


def test_tables_and_updates_have_their_metrics(trained: TrainedRun) -> None:
    tables = ServedTables(server=ParameterServerSpec(tiers=(HostMemorySpec(),)), cache=CacheSpec(share=0.5))
    session = InferenceSession.open(trained.path, tables=tables)
    updates = LiveUpdates(session, trained.path, every_seconds=None)
    with ServedModels() as models:
        models.install(ServedModel(session, name="dlrm", version="1", updates=updates))
        models.submit(request_of(trained, 0, 100), "dlrm").result(timeout=PATIENCE)
        assert session.served is not None
        uses, found = session.served.statistics(), samples(models)
    assert set(uses) == set(session.served.tables)
    for name, use in uses.items():
        assert use.cache is not None
        assert use.cache.keys > 0
        assert value(found, "terarec_cache_keys_total", table=name) == use.cache.keys
        assert value(found, "terarec_cache_hits_total", table=name) == use.cache.hits
        assert value(found, "terarec_cache_hit_rate", table=name) == pytest.approx(use.cache.hit_rate)
        assert value(found, "terarec_table_keys_total", table=name) == use.tiers.keys
        assert value(found, "terarec_tier_available", table=name, level="0", tier="host") == 1
    assert value(found, "terarec_weights_behind_seconds") == 0
    assert value(found, "terarec_deltas_total") == 0


def test_no_series_of_a_model_that_is_gone(session: InferenceSession) -> None:
    models = ServedModels()
    models.install(ServedModel(session, name="dlrm", version="1"))
    models.close()
    found = samples(models)
    assert value(found, "terarec_model_states", state="UNAVAILABLE") == 1
    assert ("terarec_weights_step", (("model", "dlrm"), ("version", "1"))) not in found


def test_the_scores_of_a_second_version_are_compared(
    session: InferenceSession, other_run: Path, trained: TrainedRun
) -> None:
    with ServedModels() as models, closing(Router(models)) as router:
        models.router = router
        models.install(ServedModel(session, name="dlrm", version="1"))
        assert not any("shadow" in name and labels for name, labels in samples(models))
        other = InferenceSession.open(other_run)
        models.install(ServedModel(other, name="dlrm", version="2"), is_default=False)
        router.set_route("dlrm", Route(shadow=ShadowSpec(version=2, share=1.0)))
        for begin in (0, 40):
            models.submit(request_of(trained, begin, begin + 40), "dlrm").result(timeout=PATIENCE)
        wait_for(lambda: router.statistics("dlrm").requests == 2)
        found = samples(models)
        router.set_route("dlrm", Route(split=SplitSpec(version=2, share=0.25, by="user")))
        shared = samples(models)
    shares = {
        of: {
            (dict(labels)["version"], dict(labels)["role"]): share
            for (name, labels), share in each.items()
            if name == "terarec_request_share"
        }
        for of, each in (("shadow", found), ("split", shared))
    }
    assert shares["shadow"] == {("1", "answers"): 1.0, ("2", "shadow"): 1.0}
    assert shares["split"] == {("1", "answers"): 0.75, ("2", "answers"): 0.25}
    records = trained.records(0, 80)
    differences = np.abs(session.predict(records).astype(np.float64) - other.predict(records))
    assert value(found, "terarec_shadow_requests_total", version="2", outcome="success") == 2
    assert value(found, "terarec_shadow_requests_total", version="2", outcome="dropped") == 0
    assert value(found, "terarec_shadow_records_total", version="2") == 80
    assert value(found, "terarec_shadow_largest_difference", version="2") == pytest.approx(differences.max(), abs=1e-6)
    assert value(found, "terarec_shadow_difference_count", version="2") == 80
    assert value(found, "terarec_shadow_difference_sum", version="2") == pytest.approx(differences.sum(), abs=1e-4)
    assert value(found, "terarec_shadow_difference_bucket", version="2", le="0.1") == (differences <= 0.1).sum()
