"""The clause ``solver`` of a training file (2.3 to 3.0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terarec.hugectr.tables.kinds import TEXT, TRUTH, Kind, either, listed, number, one_of, one_or_list, whole
from terarec.hugectr.tables.table import REQUIRED


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the clause whose value is a parameter of `solver_parser_helper`, or of the run, as it stands.

    Attributes:
        name: the key.
        parameter: what it is called there.
        kind: what it takes.
        default: where it is missing.
    """

    name: str
    parameter: str
    kind: Kind
    default: Any = REQUIRED


KEYS = (
    Key("batchsize", "batchsize", whole(1)),
    Key("display", "display", whole(1)),
    Key("snapshot", "snapshot", whole(1)),
    Key("eval_interval", "eval_interval", whole(0), 0),
    Key("snapshot_prefix", "snapshot_prefix", TEXT),
    Key("dense_model_file", "model_file", TEXT, ""),
    Key("dense_opt_states_file", "dense_opt_states_file", TEXT, ""),
    Key("sparse_model_file", "embedding_files", one_or_list(TEXT), []),
    Key("sparse_opt_states_file", "sparse_opt_states_file", one_or_list(TEXT), []),
    Key("algorithm_search", "use_algorithm_search", TRUTH, True),
    Key("cuda_graph", "use_cuda_graph", TRUTH, True),
    Key("enable_tf32_compute", "enable_tf32_compute", TRUTH, False),
    Key("export_predictions_prefix", "export_predictions_prefix", TEXT, ""),
)
"""Keys that need no translation."""

LR_POLICY = one_of("fixed")
GPU = either(listed(whole(0)), listed(listed(whole(0))))
METRICS = listed(TEXT)
KEY_TYPES = one_of("I32", "I64")
MIXED_PRECISION = one_of(128, 256, 512, 1024)
THRESHOLD = number()
"""``auc_threshold``, which HugeCTR's own tests read."""
