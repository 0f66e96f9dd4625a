"""The logger of MLPerf's rules, for scripts that import `mlperf_logging` and `mlperf_common` where these are missing.

Lines have the form that the rules' checker reads: ``:::MLLOG`` and a JSON object with the event.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from terarec.hugectr.mpi import COMM_WORLD


class HCTRCommunicationHandler:
    """Who writes: the one process that there is."""

    def global_rank(self) -> int:
        """Number of this process."""
        return COMM_WORLD.rank

    def global_size(self) -> int:
        """Number of processes."""
        return COMM_WORLD.size


class MLLoggerWrapper:
    """Writes events to standard output.

    Attributes:
        comm_handler: who writes.

    Args:
        comm_handler: who writes.
        value: of events that come without one.
    """

    def __init__(self, comm_handler: Any, value: Any = None, **_: Any) -> None:
        self.comm_handler = comm_handler
        self._value = value

    def start(self, key: str, value: Any = None, metadata: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Begin an interval."""
        self._write("INTERVAL_START", key, value, metadata)

    def end(self, key: str, value: Any = None, metadata: Mapping[str, Any] | None = None, **_: Any) -> None:
        """End an interval."""
        self._write("INTERVAL_END", key, value, metadata)

    def event(self, key: str, value: Any = None, metadata: Mapping[str, Any] | None = None, **_: Any) -> None:
        """A point in time."""
        self._write("POINT_IN_TIME", key, value, metadata)

    def mlperf_submission_log(self, benchmark: str, num_nodes: int | None = None, org: str | None = None) -> None:
        """What is submitted by whom."""
        self.event("submission_benchmark", benchmark)
        self.event("submission_org", org)
        self.event("submission_platform", f"{num_nodes or 1}xSUBMISSION_PLATFORM_PLACEHOLDER")

    def log_init_stop_run_start(self) -> None:
        """The end of what is not timed and the start of what is."""
        self.end("init_stop")
        self.start("run_start")

    def log_run_stop(self, status: str, epoch_num: float) -> None:
        """The end of what is timed."""
        self.end("run_stop", metadata={"status": status, "epoch_num": epoch_num})

    def _write(self, kind: str, key: str, value: Any, metadata: Mapping[str, Any] | None) -> None:
        event = {
            "namespace": "",
            "time_ms": round(1000 * time.time()),
            "event_type": kind,
            "key": key,
            "value": self._value if value is None else value,
            "metadata": dict(metadata or {}),
        }
        print(f":::MLLOG {json.dumps(event)}", flush=True)


class _Constants(ModuleType):
    """Names of events: each is its own value in small letters."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name.lower()


def modules() -> dict[str, ModuleType]:
    """What scripts import, and the module that they get."""
    logging, frameworks = ModuleType("mlperf_common.logging"), ModuleType("mlperf_common.frameworks.hugectr")
    logging.MLLoggerWrapper = MLLoggerWrapper  # type: ignore[attr-defined]
    frameworks.HCTRCommunicationHandler = HCTRCommunicationHandler  # type: ignore[attr-defined]
    constants = _Constants("mlperf_logging.mllog.constants")
    mllog = ModuleType("mlperf_logging.mllog")
    mllog.constants = constants  # type: ignore[attr-defined]
    packages = {
        name: ModuleType(name, "Stands for the logger of MLPerf's rules.")
        for name in ("mlperf_logging", "mlperf_common", "mlperf_common.frameworks")
    }
    return {**packages, mllog.__name__: mllog, **{one.__name__: one for one in (logging, frameworks, constants)}}
