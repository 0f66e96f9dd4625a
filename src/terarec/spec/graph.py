# SPDX-License-Identifier: Apache-2.0
"""Models of named tensors: inputs, embeddings, layers and losses.

`terarec.models.GraphModel` builds it. A tensor may be read by any number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from terarec.spec import checks
from terarec.spec.tables import DynamicTableSpec, TableSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphLabel(checks.Checked):
    """Columns of the batch's labels, as a tensor [B, dim]; labels are cut off in the order of the spec.

    Attributes:
        name: Name of the tensor.
        dim: Number of columns.
        weight: Factor of the losses that read this label in the sum that is minimised.
    """

    name: checks.Name
    dim: checks.Width = 1
    weight: checks.Finite = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFeature:
    """Feature of the batch that looks up a table.

    Attributes:
        name: Name, unique among the features of its embedding; the name of the top where its output is "apart".
        table: Name of the table.
        pooling: "sum" or "mean" of the vectors of a bag, zeros for an empty one; "concat" puts the vectors of its first
            `max_keys` keys side by side, and zeros behind them where there are fewer.
        column: Name of the feature in the batch; None takes `name`.
        max_keys: Number of first keys of each bag to use; None for all.
    """

    name: checks.Name
    table: checks.Name
    pooling: Literal["sum", "mean", "concat"] = "sum"
    column: checks.Name | None = None
    max_keys: checks.Width | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.max_keys is None and self.pooling == "concat":
            checks.fail(self, "max_keys", "an integer >= 1 for pooling 'concat'")

    @property
    def read_column(self) -> str:
        """Name of the feature in the batch."""
        return self.name if self.column is None else self.column

    @property
    def vectors(self) -> int:
        """Number of vectors of a sample: 1, or `max_keys` for "concat"."""
        return self.max_keys if self.pooling == "concat" and self.max_keys else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphEmbedding:
    """Tables and the features that read them, looked up together.

    Attributes:
        name: Name, unique in the graph; the name of the top, but for the output "apart".
        tables: The tables; the names are unique in the graph.
        features: Features in the order of the output.
        output: "stacked" gives [B, S, D], for which all vectors must have one width; "flat" [B, sum of widths];
            "apart" one top [B, 1, width] for each feature, with the feature's name.
        optimizer: Name of the rule that moves those of these tables which name none themselves.
    """

    name: checks.Name
    tables: tuple[TableSpec | DynamicTableSpec, ...]
    features: tuple[GraphFeature, ...]
    output: Literal["stacked", "flat", "apart"] = "stacked"
    optimizer: str = "default"

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for place in ("tables", "features"):
            if not getattr(self, place):
                checks.fail(self, place, "at least one")
            checks.distinct(self, place, [item.name for item in getattr(self, place)])
        known = {table.name for table in self.tables}
        for feature in self.features:
            if feature.table not in known:
                checks.reject(
                    self,
                    "features",
                    f"{feature.name!r} got table {feature.table!r}, expected one of {', '.join(sorted(known))}",
                )
        widths = {self.width_of(feature) for feature in self.features}
        if self.output == "stacked" and len(widths) > 1:
            checks.reject(self, "output", f"got 'stacked' for vectors of widths {sorted(widths)}, expected one width")
        # The name becomes that of a torch module, in which a dot separates parts.
        if "." in self.name:
            checks.fail(self, "name", "a name without dots")

    @property
    def tops(self) -> tuple[str, ...]:
        """Tensors that this embedding returns."""
        return tuple(feature.name for feature in self.features) if self.output == "apart" else (self.name,)

    def width_of(self, feature: GraphFeature) -> int:
        """Return how many numbers a sample gets for `feature`."""
        width = next(table.width for table in self.tables if table.name == feature.table)
        return width * feature.vectors


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphLayer:
    """Layer of `terarec.nn.registry`, or a loss.

    Attributes:
        kind: Name of the layer in HugeCTR.
        bottoms: Tensors that it reads; a loss reads the logits and the label.
        tops: Names of the tensors that it returns.
        options: Options of the layer; lists are kept as tuples.
    """

    kind: checks.Name
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for place in ("bottoms", "tops"):
            if not getattr(self, place):
                checks.fail(self, place, "at least one tensor")
        # JSON has lists where Python code has tuples: with tuples alone both give equal specs. The class is frozen.
        object.__setattr__(self, "options", _without_lists(dict(self.options)))


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSpec:
    """Model as a graph of named tensors.

    Attributes:
        labels: Labels in the order of the label's columns.
        dense_name: Name of the tensor [B, dense_dim].
        dense_dim: Number of dense inputs; 0 for none, and then there is no such tensor.
        embeddings: Embeddings, which are looked up first.
        layers: Layers from the bottom to the top: each reads tensors of earlier ones.
    """

    labels: tuple[GraphLabel, ...]
    dense_name: checks.Name = "dense"
    dense_dim: Annotated[int, checks.whole(0, checks.MOST_WIDTH)] = 0
    embeddings: tuple[GraphEmbedding, ...] = ()
    layers: tuple[GraphLayer, ...] = ()

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not self.labels:
            checks.fail(self, "labels", "at least one")
        tables = [table.name for embedding in self.embeddings for table in embedding.tables]
        checks.distinct(self, "embeddings", [embedding.name for embedding in self.embeddings])
        checks.distinct(self, "embeddings", tables)
        known: dict[str, str] = {}
        for place, name in self._inputs():
            self._add(known, place, name)
        # Layers run in this order, so that a tensor has to be made before it is read; there can be no cycle.
        for layer in self.layers:
            for bottom in layer.bottoms:
                if bottom not in known:
                    checks.reject(
                        self,
                        "layers",
                        f"{layer.kind} {layer.tops[0]!r} reads {bottom!r}, which no input, embedding or earlier layer "
                        f"gives, expected one of {', '.join(known)}",
                    )
            for top in layer.tops:
                self._add(known, "layers", top)

    def _inputs(self) -> Iterator[tuple[str, str]]:
        """Yield the field that describes each input or embedding, and the name of its tensor."""
        for label in self.labels:
            yield "labels", label.name
        # A tensor without columns does not exist: a layer that reads it is an error here and not at the first batch.
        if self.dense_dim:
            yield "dense_name", self.dense_name
        for embedding in self.embeddings:
            for top in embedding.tops:
                yield "embeddings", top

    def _add(self, known: dict[str, str], place: str, name: str) -> None:
        if name in known:
            checks.reject(self, place, f"the tensor {name!r} is there already (in {known[name]}), expected a new name")
        known[name] = place


def _without_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_without_lists(item) for item in value)
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphModelSpec:
    """Model as a graph of named tensors: either of the two fields describes it.

    Attributes:
        file: A JSON file of a `GraphSpec`; a relative path counts from the file that names it.
        graph: The graph itself.
    """

    kind: ClassVar[str] = "graph"
    has_own_loss: ClassVar[bool] = True
    file: str | None = None
    graph: GraphSpec | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (self.graph is None):
            got = "neither file nor graph" if self.file is None else "both file and graph"
            checks.reject(self, "", f"got {got}, expected one of them")
        if self.file is not None and (not isinstance(self.file, str) or not self.file):
            checks.fail(self, "file", "the path of a JSON file")
