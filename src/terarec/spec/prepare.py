"""How a workflow is fitted and its data set written, whatever the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from terarec.spec import checks

BadInputPolicy = Literal["raise", "skip", "missing"]
"""What happens to bad input: "raise" ends with it, "skip" leaves its row out, "missing" makes its field missing."""

BAD_INPUT_POLICIES: tuple[BadInputPolicy, ...] = ("raise", "skip", "missing")

ENGINES = ("local", "spark")
STORAGES = ("parquet", "raw", "norm", "hugectr_parquet", "hugectr_raw", "hugectr_raw_async")
"""A data set's shards, or HugeCTR's files."""

Storage = Literal["parquet", "raw", "norm", "hugectr_parquet", "hugectr_raw", "hugectr_raw_async"]

_LEAST_MEMORY = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """How logs are prepared.

    Attributes:
        engine: "local", or "spark" for a cluster.
        bad_input: what follows a field or a line that cannot be read: "raise" an error, "skip" the line, or take the
            field as "missing".
        storage: "parquet" or "raw" shards of a data set; or HugeCTR's "norm", "hugectr_parquet", "hugectr_raw",
            "hugectr_raw_async".
        rows_per_shard: most rows of a file.
        shuffle: whether the rows of the train split change places, across all of its files; other splits keep theirs.
        seed: of the shuffle.
        threads: that parse, encode and count; None takes as many as there are cores.
        memory_bytes: bound of what counting and sorting hold in memory before they spill to the disk; None takes half
            of the memory that is free.
        restart: whether what an interrupted run left is thrown away.
        tables: side table of the workflow -> its files.
        spark_master: Spark's master URL, such as ``local[2]`` or ``spark://host:7077``.
        spark_conf: further settings of the Spark session.
    """

    engine: Literal["local", "spark"] = "local"
    bad_input: BadInputPolicy = "raise"
    storage: Storage = "parquet"
    rows_per_shard: int = 1 << 21
    shuffle: bool = False
    seed: int = 0
    threads: int | None = None
    memory_bytes: int | None = None
    restart: bool = False
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spark_master: str | None = None
    spark_conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of(self, "engine", ENGINES)
        checks.one_of(self, "bad_input", BAD_INPUT_POLICIES)
        checks.one_of(self, "storage", STORAGES)
        checks.positive_int(self, "rows_per_shard")
        checks.int64(self, "seed", minimum=0)
        if self.threads is not None:
            checks.positive_int(self, "threads")
        if self.memory_bytes is not None:
            checks.positive_int(self, "memory_bytes", minimum=_LEAST_MEMORY)
        if self.engine == "local" and (self.spark_master or self.spark_conf):
            checks.refuse(self, "spark_master", "got a setting of Spark for engine 'local', expected engine 'spark'")
