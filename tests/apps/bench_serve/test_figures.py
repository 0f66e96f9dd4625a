# SPDX-License-Identifier: Apache-2.0
"""Figures of a load from known times."""

import csv
import math
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from terarec.apps.bench_serve.figures import LoadFigures, ServerTimes, table_rows, write_plot, write_rows
from terarec.apps.bench_serve.load import Measured
from terarec.errors import ConfigError, FormatError

MS = 1_000_000


def entry(name: str, requests: int, **stages: int) -> dict[str, Any]:
    """An entry of Triton's ``model_stats``, in which integers may be texts."""
    return {
        "name": name,
        "version": "1",
        "inference_count": str(8 * requests),
        "execution_count": str(requests // 2),
        "inference_stats": {
            "success": {"count": str(requests), "ns": "0"},
            **{
                stage: {"count": requests, "ns": stages.get(stage, 0)}
                for stage in ("queue", "compute_input", "compute_infer", "compute_output")
            },
        },
    }


def figures(measured: Measured, server: ServerTimes | None = None, **changes: Any) -> LoadFigures:
    known = {"protocol": "http", "records": 8, "clients": 4, "rate": None, "seconds": 2.0, "processes": 1}
    return LoadFigures.of(measured, server, **known | changes)


def loaded(milliseconds: list[int], ends: list[int] | None = None) -> Measured:
    latencies = array("q", [time * MS for time in milliseconds])
    return Measured(
        latencies=latencies,
        ends=array("q", [end * MS for end in ends or [1] * len(milliseconds)]),
        seconds=2.0,
        cpu_seconds=1.0,
    )


def test_percentiles_and_rates() -> None:
    found = figures(loaded(list(range(1, 1001))))
    assert (found.requests, found.errors) == (1000, 0)
    assert (found.requests_per_second, found.records_per_second) == (500, 4000)
    assert found.mean_ms == pytest.approx(500.5)
    assert (found.p50_ms, found.p95_ms, found.p99_ms, found.p99_9_ms, found.max_ms) == pytest.approx(
        (500.5, 950.05, 990.01, 999.001, 1000)
    )
    assert found.client_busy_share == 0.5
    assert (found.server_requests, found.queue_ms, found.network_ms, found.batch_records) == (None,) * 4


def test_answers_after_the_end_are_latencies_but_no_throughput() -> None:
    found = figures(loaded([1, 1, 1, 1], ends=[10, 1999, 2000, 2001]))
    assert (found.requests, found.requests_per_second) == (4, 1.5)


def test_the_servers_stages_and_the_network_add_up_to_the_latency() -> None:
    before = ServerTimes.of([entry("dlrm", 10, queue=5 * MS)], "dlrm")
    after = ServerTimes.of(
        [entry("dlrm", 14, queue=9 * MS, compute_input=2 * MS, compute_infer=8 * MS, compute_output=MS)], "dlrm"
    )
    found = figures(loaded([4, 5, 6, 5]), after.since(before))
    stages = (found.queue_ms, found.compute_input_ms, found.compute_infer_ms, found.compute_output_ms)
    assert stages == (1, 0.5, 2, 0.25)
    assert found.network_ms == 1.25
    assert sum(stage or 0 for stage in stages) + (found.network_ms or 0) == found.mean_ms == 5
    assert (found.server_requests, found.batch_records) == (4, 16)


def test_the_time_of_an_ensemble_is_that_of_its_stages() -> None:
    entries = [entry("all", 4), entry("first", 4, queue=MS), entry("last", 4, queue=2 * MS, compute_infer=MS)]
    assert ServerTimes.of(entries, "all") == ServerTimes(4, 32, 2, 3 * MS, 0, MS, 0)


def test_statistics_of_another_form_are_reported() -> None:
    with pytest.raises(FormatError, match="statistics"):
        ServerTimes.of([{"name": "dlrm"}], "dlrm")


def test_a_load_that_nobody_answered_has_no_latency() -> None:
    found = figures(Measured(errors=Counter({"lost": 3}), seconds=2.0))
    assert (found.requests, found.errors, found.requests_per_second) == (0, 3, 0)
    assert math.isnan(found.p99_ms)


def test_files_of_figures(tmp_path: Path) -> None:
    found = [figures(loaded([1, 2, 3])), figures(loaded([2, 3, 4]), records=1, protocol="grpc")]
    write_rows(tmp_path / "loads.csv", found)
    with (tmp_path / "loads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["protocol"], row["records"], row["p50_ms"], row["queue_ms"]) for row in rows] == [
        ("http", "8", "2", ""),
        ("grpc", "1", "3", ""),
    ]
    assert [row["p50"] for row in table_rows(found)] == ["2.000", "3.000"]
    with pytest.raises(ConfigError, match="exists"):
        write_rows(tmp_path / "loads.csv", found)
    write_rows(tmp_path / "loads.csv", found, replace=True)


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_a_plot_of_latency_against_throughput(tmp_path: Path, suffix: str, begin: bytes) -> None:
    found = [figures(loaded([1, 2, 30])), figures(loaded([2, 3, 4])), figures(Measured(seconds=1))]
    write_plot(tmp_path / f"loads{suffix}", found, title="dlrm")
    content = (tmp_path / f"loads{suffix}").read_bytes()
    assert content.startswith(begin)
    if suffix == ".svg":
        assert all(words in content.decode() for words in ("dlrm", "http, 8 records: p50", "records per second"))


def test_a_plot_has_a_format_that_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a name that ends in \.svg"):
        write_plot(tmp_path / "loads.gif", [])
