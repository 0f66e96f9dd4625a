# SPDX-License-Identifier: Apache-2.0
"""A small spec of every registered model, and data sets and batches of every shape for them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from terarec.batch import Batch, Jagged
from terarec.spec import (
    AutoIntSpec,
    BERT4RecSpec,
    BSTSpec,
    CategoricalColumn,
    DatasetSpec,
    DCNSpec,
    DCNV2Spec,
    DeepFMSpec,
    DenseColumn,
    DIENSpec,
    DINSpec,
    DLRMDCNV2Spec,
    DLRMSpec,
    DNNSpec,
    ESMMSpec,
    FFMSpec,
    FiBiNETSpec,
    FinalMLPSpec,
    FMSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphModelSpec,
    GraphSpec,
    GRU4RecSpec,
    HSTURankerSpec,
    HSTUSpec,
    LabelColumn,
    LRSpec,
    MaskNetSpec,
    MFBPRSpec,
    MMoESpec,
    MultVAESpec,
    NCFSpec,
    NegativesSpec,
    PLESpec,
    PNNSpec,
    PythonModelSpec,
    SASRecSpec,
    SharedBottomSpec,
    StaticTablesSpec,
    TableSpec,
    TargetHistory,
    TwoTowerSpec,
    WideDeepSpec,
    XDeepFMSpec,
    YouTubeDNNSpec,
)
from terarec.spec.model import ModelSpec

ROWS = 7
HISTORY = (TargetHistory(target="a", history="past"),)

COLUMN_MODELS: dict[str, ModelSpec] = {
    "lr": LRSpec(),
    "lr-mean": LRSpec(pooling="mean", wide_initializer="normal"),
    "fm": FMSpec(width=4),
    "fm-mean": FMSpec(width=4, pooling="mean"),
    "dnn": DNNSpec(width=4, hidden=(6, 5)),
    "dnn-kaiming": DNNSpec(width=4, hidden=(6,), init="kaiming_uniform", activation="gelu"),
    "wide_deep": WideDeepSpec(width=4, hidden=(6, 5), init="xavier_normal"),
    "deepfm": DeepFMSpec(width=4, hidden=(6, 5), activation="prelu", init="xavier_uniform"),
    "deepfm-batch_norm": DeepFMSpec(width=4, hidden=(6, 5), batch_norm=True),
    "xdeepfm": XDeepFMSpec(width=4, cin=(3, 2), hidden=(6,)),
    "xdeepfm-cin": XDeepFMSpec(width=4, cin=(3,), hidden=(), pooling="mean"),
    "dcn": DCNSpec(width=4, cross_layers=2, hidden=(6, 5)),
    "dcn-cross": DCNSpec(width=4, cross_layers=3, hidden=(), init="xavier_normal"),
    "dcn_v2": DCNV2Spec(width=4, cross_layers=2, hidden=(6,)),
    "dcn_v2-stacked": DCNV2Spec(width=4, cross_layers=2, hidden=(6, 5), structure="stacked", rank=3),
    "dcn_v2-both": DCNV2Spec(width=4, cross_layers=2, hidden=(6,), structure="stacked_parallel", rank=3, experts=2),
    "dcn_v2-cross": DCNV2Spec(width=4, cross_layers=2, hidden=(), structure="cross_only"),
    "autoint": AutoIntSpec(width=4, layers=2, heads=2, attention_width=6, hidden=()),
    "autoint-plus": AutoIntSpec(
        width=4, layers=2, heads=2, attention_width=4, hidden=(6,), layer_norm=True, scale=True, wide=True
    ),
    "autoint-plain": AutoIntSpec(width=4, layers=1, heads=1, attention_width=3, hidden=(), residual=False),
    "dlrm": DLRMSpec(width=4, bottom=(5, 4), top=(6,)),
    "dlrm-cat": DLRMSpec(width=4, bottom=(5, 4), top=(6,), interaction="cat", activation="tanh"),
    "dlrm_dcnv2": DLRMDCNV2Spec(width=4, bottom=(5, 4), cross_layers=2, rank=3, top=(6,)),
    "ffm": FFMSpec(width=2),
    "pnn": PNNSpec(width=4, hidden=(6,)),
    "pnn-outer": PNNSpec(width=4, hidden=(6,), products="outer", activation="tanh"),
    "pnn-both": PNNSpec(width=4, hidden=(6,), products="both", pooling="mean"),
    "fibinet": FiBiNETSpec(width=4, hidden=(6,), reduction=2),
    "fibinet-each": FiBiNETSpec(width=4, hidden=(6,), reduction=1, bilinear="each"),
    "fibinet-all": FiBiNETSpec(width=4, hidden=(6,), reduction=1, bilinear="all", init="xavier_normal"),
    "masknet": MaskNetSpec(width=4, blocks=(5, 3), hidden=(6,)),
    "masknet-serial": MaskNetSpec(width=4, blocks=(6, 5), structure="serial", aggregation=0.5, activation="gelu"),
    "final_mlp": FinalMLPSpec(width=4, hidden=(6, 4), second=(5, 2), heads=2),
    "shared_bottom": SharedBottomSpec(width=4, hidden=(6, 5), tower=(4,)),
    "mmoe": MMoESpec(width=4, experts=3, hidden=(6,), tower=(4,)),
    "mmoe-gate": MMoESpec(width=4, experts=2, hidden=(6,), tower=(), gate=(5,), activation="tanh"),
    "ple": PLESpec(width=4, layers=2, shared_experts=2, label_experts=1, hidden=(6,), tower=(4,)),
    "ple-cgc": PLESpec(width=4, layers=1, shared_experts=1, label_experts=2, hidden=(6, 5), tower=(), gate=(4,)),
    "esmm": ESMMSpec(width=4, tower=(6, 5)),
}
"""Models of any columns."""

DIN_MODELS: dict[str, ModelSpec] = {
    "din": DINSpec(width=4, sequences=HISTORY, attention=(5,), hidden=(6,)),
    "din-softmax": DINSpec(
        width=4, sequences=HISTORY, attention=(5,), hidden=(6,), softmax=True, attention_activation="prelu"
    ),
}
BST_MODELS: dict[str, ModelSpec] = {
    "bst": BSTSpec(width=4, sequences=HISTORY, max_length=3, inner=5, hidden=(6,)),
    "bst-mean": BSTSpec(width=4, sequences=HISTORY, max_length=6, layers=2, inner=5, output="mean", hidden=(6,)),
    "bst-target": BSTSpec(width=4, sequences=HISTORY, max_length=2, inner=5, output="target", hidden=(6,)),
}
DIEN_MODELS: dict[str, ModelSpec] = {
    "dien": DIENSpec(width=4, sequences=HISTORY, hidden=(6,), max_length=4),
    "dien-plain": DIENSpec(width=4, sequences=HISTORY, hidden=(6,), auxiliary=0.0, max_length=3),
}
RANKER_MODELS: dict[str, ModelSpec] = {
    "hstu_ranker": HSTURankerSpec(width=4, sequences=HISTORY, max_length=3, hidden=(6,)),
    "hstu_ranker-whole": HSTURankerSpec(
        width=4, sequences=HISTORY, mask_missing=False, max_length=6, layers=1, heads=1, hidden=(5,)
    ),
}
CONTEXT_MODELS: dict[str, ModelSpec] = {
    "final_mlp-context": FinalMLPSpec(
        width=4, hidden=(6,), second=(4,), gate=(3,), first_context=("b", "tags"), second_context=("a",)
    ),
}
TWO_TOWER_MODELS: dict[str, ModelSpec] = {
    "two_tower": TwoTowerSpec(width=4, user=("x0", "b"), item=("a", "tags"), hidden=(6,), vector_width=5),
    "two_tower-cosine": TwoTowerSpec(
        width=4, user=("x0", "b"), item=("a", "x1"), hidden=(), vector_width=5, similarity="cosine", temperature=0.1
    ),
    "two_tower-shared": TwoTowerSpec(
        width=4,
        user=("x0", "b"),
        item=("a", "tags"),
        hidden=(6,),
        vector_width=5,
        tables=StaticTablesSpec(shared={"b": "a"}),
    ),
}
SEQUENCE_MODELS: dict[str, ModelSpec] = {
    "sasrec": SASRecSpec(item="a", history="past", width=4, max_length=3, inner=6),
    "sasrec-softmax": SASRecSpec(item="a", history="past", width=4, layers=1, inner=6, loss="softmax"),
    "bert4rec": BERT4RecSpec(item="a", history="past", width=4, max_length=3, inner=6),
    "gru4rec": GRU4RecSpec(item="a", history="past", width=4, max_length=3, state=5),
    "hstu": HSTUSpec(item="a", history="past", width=4, max_length=3, negatives=NegativesSpec(count=5)),
}
PAIR_MODELS: dict[str, ModelSpec] = {
    "mf_bpr": MFBPRSpec(user="b", item="a", width=4),
    "ncf": NCFSpec(user="b", item="a", width=4, hidden=(6, 5)),
    "ncf-widths": NCFSpec(user="b", item="a", width=4, mlp_width=3, hidden=(5,)),
    "ncf-gmf": NCFSpec(user="b", item="a", width=4, form="gmf", loss="sampled_softmax"),
    "ncf-mlp": NCFSpec(user="b", item="a", width=4, form="mlp", hidden=(6,), loss="bpr", activation="tanh"),
}
NEXT_ITEM_MODELS: dict[str, ModelSpec] = {
    "youtube_dnn": YouTubeDNNSpec(item="a", history="past", user=("x1", "b", "tags"), width=4, hidden=(6,)),
    "youtube_dnn-cosine": YouTubeDNNSpec(
        item="a", history="past", width=4, hidden=(), similarity="cosine", temperature=0.1, loss="softmax"
    ),
    "mult_vae": MultVAESpec(item="a", history="past", hidden=(6, 5), latent=3, anneal_steps=10),
}
GRAPH = GraphSpec(
    labels=(GraphLabel(name="label"),),
    dense_dim=2,
    embeddings=(
        GraphEmbedding(
            name="sparse",
            output="flat",
            tables=(TableSpec(name="a", rows=ROWS, width=4), TableSpec(name="b", rows=ROWS, width=4)),
            features=(GraphFeature(name="a", table="a"), GraphFeature(name="b", table="b")),
        ),
    ),
    layers=(
        GraphLayer(kind="concat", bottoms=("dense", "sparse"), tops=("all",)),
        GraphLayer(kind="inner_product", bottoms=("all",), tops=("hidden",), options={"num_output": 6}),
        GraphLayer(kind="relu", bottoms=("hidden",), tops=("active",)),
        GraphLayer(kind="inner_product", bottoms=("active",), tops=("logit",), options={"num_output": 1}),
        GraphLayer(kind="binary_cross_entropy", bottoms=("logit", "label"), tops=("loss",)),
    ),
)
MODELS: dict[str, ModelSpec] = {
    **COLUMN_MODELS,
    **CONTEXT_MODELS,
    **DIN_MODELS,
    **BST_MODELS,
    **DIEN_MODELS,
    **RANKER_MODELS,
    **TWO_TOWER_MODELS,
    **SEQUENCE_MODELS,
    **PAIR_MODELS,
    **NEXT_ITEM_MODELS,
    "graph": GraphModelSpec(graph=GRAPH),
    "python": PythonModelSpec(factory="tests.models.factories:small_model", options={"width": 3}),
}
ALLOWED = ("tests",)


def dataset(
    *,
    dense: int = 2,
    categorical: Sequence[str] = ("a", "b", "tags", "past"),
    labels: int = 1,
    rows: int | None = ROWS,
) -> DatasetSpec:
    """Columns of which `tags` and `past` are lists; `past` has the keys of `a`, and 0 is a missing value."""
    hotness = {"tags": 3, "past": 4}
    return DatasetSpec(
        name="small",
        storage="parquet",
        labels=tuple(LabelColumn(name=f"y{index}") for index in range(labels)),
        dense=tuple(DenseColumn(name=f"x{index}") for index in range(dense)),
        categorical=tuple(
            CategoricalColumn(name=name, rows=rows, hotness=hotness.get(name, 1), given=False) for name in categorical
        ),
    )


def random_batch(columns: DatasetSpec, batch_size: int = 9, *, seed: int = 0) -> Batch:
    """Random keys, lists of any length from 0 on, random labels of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [
        torch.randint(0, column.hotness + 1, (batch_size,), generator=generator)
        if column.hotness > 1
        else torch.ones(batch_size, dtype=torch.int64)
        for column in columns.categorical
    ]
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths])
    num_keys = int(counts.sum())
    return Batch(
        dense=torch.randn(batch_size, len(columns.dense), generator=generator),
        label=torch.randint(0, 2, (batch_size, len(columns.labels)), generator=generator).float(),
        sparse=Jagged(
            names=tuple(column.name for column in columns.categorical),
            keys=torch.randint(0, ROWS, (num_keys,), generator=generator),
            offsets=counts.cumsum(0),
        ),
    )


def without_lists(columns: DatasetSpec) -> DatasetSpec:
    """The same columns, all of one key a sample."""
    return replace(columns, categorical=tuple(replace(column, hotness=1) for column in columns.categorical))
