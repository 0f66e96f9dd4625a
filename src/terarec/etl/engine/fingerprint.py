"""What an interrupted preparation must have in common with the one that goes on with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from terarec.etl.source import Source
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions, to_data

_FREE = ("threads", "memory_bytes", "restart", "spark_master", "spark_conf")
"""Options that change no result."""


def fingerprint(workflow: Workflow, source: Source, options: PrepareOptions) -> dict[str, str]:
    """The parts of a preparation, each as a text that changes when it does."""
    chosen = {name: value for name, value in dataclasses.asdict(options).items() if name not in _FREE}
    return {
        "workflow": _digest([to_data(workflow.spec), workflow.is_fitted]),
        "options": _digest(chosen),
        "sources": source.fingerprint(),
    }


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
