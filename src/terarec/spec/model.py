# SPDX-License-Identifier: Apache-2.0
"""Models: their shapes, apart from the data set, which determines columns and numbers of rows.

One frozen class for each kind of model; ``terarec.models`` builds them. docs/models.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from terarec.spec import checks
from terarec.spec.graph import GraphModelSpec
from terarec.spec.histories import BSTSpec, DIENSpec, DINSpec, HSTURankerSpec
from terarec.spec.interactions import FFMSpec, FiBiNETSpec, FinalMLPSpec, MaskNetSpec, PNNSpec
from terarec.spec.multitask import ESMMSpec, MMoESpec, PLESpec, SharedBottomSpec
from terarec.spec.network import (
    ColumnPooling,
    EmbeddedSpec,
    NetworkSpec,
    WideNetworkSpec,
)
from terarec.spec.retrieval import MFBPRSpec, MultVAESpec, NCFSpec, YouTubeDNNSpec
from terarec.spec.sequences import BERT4RecSpec, GRU4RecSpec, HSTUSpec, SASRecSpec
from terarec.spec.tables import Initializer, StaticTablesSpec, TablesSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LRSpec(checks.Checked):
    """Logistic regression: one weight for each key and each dense column.

    Attributes:
        pooling: Reduction of the vectors of a list column to one; an empty list gives zeros.
        tables: Tables of the ids in the data set (static), or of the keys that training meets (dynamic).
        wide_initializer: Initial weights of the keys; None for those of `tables`.
    """

    kind: ClassVar[str] = "lr"
    pooling: ColumnPooling = "sum"
    tables: TablesSpec = field(default_factory=StaticTablesSpec)
    wide_initializer: Initializer | None = "zeros"


@dataclass(frozen=True, kw_only=True, slots=True)
class FMSpec(EmbeddedSpec):
    """Factorization machine (Rendle 2010): linear terms and the dots of all pairs of columns' vectors.

    Attributes:
        wide_initializer: Initial weights of the keys in the linear terms; None for those of `tables`.
    """

    kind: ClassVar[str] = "fm"
    wide_initializer: Initializer | None = "zeros"


@dataclass(frozen=True, kw_only=True, slots=True)
class DNNSpec(NetworkSpec):
    """MLP over the dense columns and all embeddings (Covington et al. 2016).

    Attributes:
        hidden: Widths of the hidden layers.
    """

    kind: ClassVar[str] = "dnn"
    hidden: checks.Widths = (256, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class WideDeepSpec(WideNetworkSpec):
    """Wide & Deep (Cheng et al. 2016): a linear part over all columns and an MLP over their embeddings."""

    kind: ClassVar[str] = "wide_deep"
    width: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepFMSpec(WideNetworkSpec):
    """DeepFM (Guo et al. 2017): a factorization machine and an MLP over the same vectors."""

    kind: ClassVar[str] = "deepfm"


@dataclass(frozen=True, kw_only=True, slots=True)
class XDeepFMSpec(NetworkSpec):
    """xDeepFM (Lian et al. 2018): linear terms, a compressed interaction network, and an MLP.

    Attributes:
        cin: Number of feature maps of each layer of the compressed interaction network.
        hidden: Widths of the MLP's hidden layers; empty for no MLP.
        wide_initializer: Initial weights of the keys in the linear terms; None for those of `tables`.
    """

    kind: ClassVar[str] = "xdeepfm"
    cin: checks.Widths = (64, 64)
    hidden: checks.AnyWidths = (256, 128)
    wide_initializer: Initializer | None = "zeros"


@dataclass(frozen=True, kw_only=True, slots=True)
class DCNSpec(NetworkSpec):
    """Deep & Cross Network (Wang et al. 2017): rank-one cross layers and an MLP side by side.

    Attributes:
        cross_layers: Number of cross layers.
        hidden: Widths of the MLP's hidden layers; empty for no MLP.
    """

    kind: ClassVar[str] = "dcn"
    cross_layers: checks.Layers = 3
    hidden: checks.AnyWidths = (256, 128)


Structure = Literal["parallel", "stacked", "stacked_parallel", "cross_only"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DCNV2Spec(NetworkSpec):
    """DCN V2 (Wang et al. 2021): cross layers with full or low-rank kernels, and an MLP.

    Attributes:
        structure: "parallel": the MLP parallel to the cross layers; "stacked": behind them; "stacked_parallel": one MLP
            on each of the two ways; "cross_only": no MLP.
        cross_layers: Number of cross layers.
        rank: Rank of the kernels; None for full ones.
        experts: Number of low-rank experts that a gate mixes in each layer; 1 for plain low-rank kernels.
        hidden: Widths of the MLP's hidden layers.
    """

    kind: ClassVar[str] = "dcn_v2"
    structure: Structure = "parallel"
    cross_layers: checks.Layers = 3
    rank: checks.Width | None = None
    experts: checks.Width = 1
    hidden: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        if self.rank is None and self.experts > 1:
            # The paper defines its mixture of experts for low-rank kernels alone.
            checks.fail(self, "rank", "an integer >= 1 for several experts")
        checks.widths(self, "hidden", allow_empty=self.structure == "cross_only")


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoIntSpec(NetworkSpec):
    """AutoInt (Song et al. 2019): self-attention among the columns' vectors; with a parallel MLP AutoInt+.

    Attributes:
        layers: Number of attention layers.
        heads: Attention heads of a layer.
        attention_width: Width of a layer's output, all heads together.
        residual: Whether a layer's input is added to its output, projected where the widths differ.
        scale: Whether scores are divided by the root of a head's width.
        layer_norm: Whether a layer's output is normalized before its ReLU.
        hidden: Widths of the MLP's hidden layers; empty for no MLP (AutoInt).
        wide: Whether linear terms are added.
        wide_initializer: Initial weights of the keys in the linear terms; None for those of `tables`.
    """

    kind: ClassVar[str] = "autoint"
    layers: checks.Layers = 3
    heads: checks.Layers = 2
    attention_width: checks.Width = 64
    residual: bool = True
    scale: bool = False
    layer_norm: bool = False
    hidden: checks.AnyWidths = (256, 128)
    wide: bool = False
    wide_initializer: Initializer | None = "zeros"

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        if self.attention_width % self.heads:
            checks.fail(self, "attention_width", f"a multiple of the heads ({self.heads})")


@dataclass(frozen=True, kw_only=True, slots=True)
class DLRMSpec(NetworkSpec):
    """DLRM (Naumov et al. 2019): bottom MLP, interaction, top MLP.

    Attributes:
        bottom: Widths of the bottom MLP's layers; the last must equal `width`. Not used without dense columns.
        top: Widths of the top MLP's hidden layers; the layer to the logit is added.
        interaction: "dot": the dots of all pairs of vectors, behind the bottom MLP's output; "cat": the vectors.
    """

    kind: ClassVar[str] = "dlrm"
    bottom: checks.Widths = (512, 256, 16)
    top: checks.Widths = (512, 256)
    interaction: Literal["dot", "cat"] = "dot"

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        if self.bottom[-1] != self.width:
            # The interaction takes its output as one more vector next to those of the columns.
            checks.fail(self, "bottom", f"a last layer as wide as the embedding ({self.width})")


@dataclass(frozen=True, kw_only=True, slots=True)
class DLRMDCNV2Spec(NetworkSpec):
    """DLRM-DCNv2 (MLPerf): bottom MLP, low-rank cross layers over its output and all vectors, top MLP.

    Attributes:
        bottom: Widths of the bottom MLP's layers; the last must equal `width`. Not used without dense columns.
        cross_layers: Number of cross layers.
        rank: Rank of their kernels.
        top: Widths of the top MLP's hidden layers; the layer to the logit is added.
    """

    kind: ClassVar[str] = "dlrm_dcnv2"
    bottom: checks.Widths = (512, 256, 16)
    cross_layers: checks.Layers = 3
    rank: checks.Width = 512
    top: checks.Widths = (1024, 1024, 512, 256)

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        if self.bottom[-1] != self.width:
            checks.fail(self, "bottom", f"a last layer as wide as the embedding ({self.width})")


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerSpec(NetworkSpec):
    """Two towers for retrieval (Yi et al. 2019): a vector of the user and one of the item, compared by their dot.

    Attributes:
        user: Columns of the user's tower.
        item: Columns of the item's tower.
        item_key: Column of `item` that identifies items; None for the first categorical one.
        hidden: Widths of each tower's hidden layers; empty for one linear layer.
        vector_width: Length of the vectors that the towers give.
        similarity: "dot", or "cosine" of the two vectors.
        temperature: Divisor of the similarity.
        correct_sampling: Whether the loss corrects for the items' frequencies in batches (log-Q).
        frequency_decay: Weight of a new interval in the estimated interval between two batches with an item.
        frequency_buckets: Size of the hash array of the estimates where the number of items is unknown.
    """

    kind: ClassVar[str] = "two_tower"
    has_own_loss: ClassVar[bool] = True
    user: tuple[str, ...]
    item: tuple[str, ...]
    item_key: str | None = None
    hidden: checks.AnyWidths = (128,)
    vector_width: checks.Width = 64
    similarity: Literal["dot", "cosine"] = "dot"
    temperature: checks.Positive = 1.0
    correct_sampling: bool = True
    frequency_decay: checks.PositiveShare = 0.05
    frequency_buckets: checks.Rows = 1_048_576

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        for tower in ("user", "item"):
            if not getattr(self, tower):
                checks.fail(self, tower, "at least one column")
        checks.distinct(self, "item", (*self.user, *self.item))
        if self.item_key is not None:
            checks.one_of(self, "item_key", self.item)


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonModelSpec:
    """Model of the user's own code, which is imported only where the caller allows its package.

    Attributes:
        factory: Class or function, as ``package.module:name``, that makes the model. It is called as
            ``factory(dataset, num_outputs=..., seed=..., **options)`` and returns a `torch.nn.Module`.
        options: Other arguments, as JSON values.
    """

    kind: ClassVar[str] = "python"
    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Only spelled correctly: a description is read and checked where the code is neither installed nor allowed.
        module, colon, name = self.factory.partition(":") if isinstance(self.factory, str) else ("", "", "")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            checks.fail(self, "factory", "package.module:name")
        reserved = {"dataset", "num_outputs", "seed"} & set(self.options)
        if reserved:
            checks.reject(self, "options", f"got {min(reserved)!r}, which every factory is given, expected other names")


ModelSpec = (
    LRSpec
    | FMSpec
    | FFMSpec
    | DNNSpec
    | WideDeepSpec
    | DeepFMSpec
    | XDeepFMSpec
    | DCNSpec
    | DCNV2Spec
    | AutoIntSpec
    | PNNSpec
    | FiBiNETSpec
    | MaskNetSpec
    | FinalMLPSpec
    | DLRMSpec
    | DLRMDCNV2Spec
    | DINSpec
    | DIENSpec
    | BSTSpec
    | HSTURankerSpec
    | SharedBottomSpec
    | MMoESpec
    | PLESpec
    | ESMMSpec
    | SASRecSpec
    | BERT4RecSpec
    | GRU4RecSpec
    | HSTUSpec
    | TwoTowerSpec
    | MFBPRSpec
    | NCFSpec
    | YouTubeDNNSpec
    | MultVAESpec
    | GraphModelSpec
    | PythonModelSpec
)
