# SPDX-License-Identifier: Apache-2.0
"""The models by their specs, and models of the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import nn

from terarec.embedding import EmbeddingCollection
from terarec.embedding.tables import share_tiers
from terarec.errors import ConfigError
from terarec.models.bert4rec import BERT4Rec
from terarec.models.columns import check_shared
from terarec.models.contract import VectorModel
from terarec.models.dlrm import DLRM, DLRMDCNV2
from terarec.models.graph import graph_model
from terarec.models.histories import BST, DIEN, DIN, HSTURanker
from terarec.models.interactions import DCN, FFM, PNN, AutoInt, FiBiNET, FinalMLP, MaskNet
from terarec.models.multitask import ESMM, PLE, MMoE, SharedBottom
from terarec.models.next_items import MultVAE, YouTubeDNN
from terarec.models.pairs import MFBPR, NCF
from terarec.models.sequences import HSTU, GRU4Rec, SASRec
from terarec.models.two_tower import TwoTower
from terarec.models.wide_deep import DNN, FM, LR, DeepFM, WideDeep, XDeepFM
from terarec.spec import DatasetSpec, GraphModelSpec
from terarec.spec.histories import BSTSpec, DIENSpec, DINSpec, HSTURankerSpec
from terarec.spec.interactions import FFMSpec, FiBiNETSpec, FinalMLPSpec, MaskNetSpec, PNNSpec
from terarec.spec.model import (
    AutoIntSpec,
    DCNSpec,
    DCNV2Spec,
    DeepFMSpec,
    DLRMDCNV2Spec,
    DLRMSpec,
    DNNSpec,
    FMSpec,
    LRSpec,
    ModelSpec,
    PythonModelSpec,
    TwoTowerSpec,
    WideDeepSpec,
    XDeepFMSpec,
)
from terarec.spec.multitask import ESMMSpec, MMoESpec, PLESpec, SharedBottomSpec
from terarec.spec.registry import check_allowed, imported
from terarec.spec.retrieval import MFBPRSpec, MultVAESpec, NCFSpec, YouTubeDNNSpec
from terarec.spec.sequences import BERT4RecSpec, GRU4RecSpec, HSTUSpec, SASRecSpec
from terarec.spec.tables import TablesSpec


def python_model(
    spec: PythonModelSpec,
    dataset: DatasetSpec,
    *,
    num_outputs: int | None = None,
    seed: int = 0,
    allow_import: Sequence[str] = (),
) -> nn.Module:
    """Import the factory of `spec` and call it.

    Args:
        spec: The factory and its options.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
        allow_import: Packages whose code may be imported.

    Raises:
        ConfigError: A package that is not allowed, a factory that is not there, or one that returns no module.
    """
    check_allowed(spec.factory, allow_import, f"model: factory {spec.factory!r}")
    factory = imported(spec.factory)
    outputs = len(dataset.labels) if num_outputs is None else num_outputs
    model = factory(dataset, num_outputs=outputs, seed=seed, **spec.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model", f"factory {spec.factory!r}: returned {type(model).__name__}, expected a torch.nn.Module"
        )
    return model


MODELS: dict[type[ModelSpec], Callable[..., nn.Module]] = {
    LRSpec: LR,
    FMSpec: FM,
    FFMSpec: FFM,
    DNNSpec: DNN,
    WideDeepSpec: WideDeep,
    DeepFMSpec: DeepFM,
    XDeepFMSpec: XDeepFM,
    DCNSpec: DCN,
    DCNV2Spec: DCN,
    AutoIntSpec: AutoInt,
    PNNSpec: PNN,
    FiBiNETSpec: FiBiNET,
    MaskNetSpec: MaskNet,
    FinalMLPSpec: FinalMLP,
    DLRMSpec: DLRM,
    DLRMDCNV2Spec: DLRMDCNV2,
    DINSpec: DIN,
    DIENSpec: DIEN,
    BSTSpec: BST,
    HSTURankerSpec: HSTURanker,
    SharedBottomSpec: SharedBottom,
    MMoESpec: MMoE,
    PLESpec: PLE,
    ESMMSpec: ESMM,
    SASRecSpec: SASRec,
    BERT4RecSpec: BERT4Rec,
    GRU4RecSpec: GRU4Rec,
    HSTUSpec: HSTU,
    TwoTowerSpec: TwoTower,
    MFBPRSpec: MFBPR,
    NCFSpec: NCF,
    YouTubeDNNSpec: YouTubeDNN,
    MultVAESpec: MultVAE,
    GraphModelSpec: graph_model,
    PythonModelSpec: python_model,
}
"""Class or function of each spec; called with (spec, dataset, *, num_outputs, seed), it returns the model."""


def vectors_of(model: nn.Module, kind: str) -> VectorModel:
    """Return `model` as one that retrieves.

    Raises:
        ConfigError: A model, of this `kind`, that has no vectors of users and items, or others than dots for scores.
    """
    # By attribute and not by a base class, so that a model of the user's own code may have them.
    has_vectors = all(hasattr(model, name) for name in ("user_vectors", "item_vectors"))
    if not has_vectors or not getattr(model, "scores_are_dots", True):
        kinds = [spec.kind for spec, each in MODELS.items() if getattr(each, "scores_are_dots", False)]
        reason = ", whose scores are no dots of vectors: it can rank what another one finds" if has_vectors else ""
        raise ConfigError("run", f"holds a model of the kind {kind!r}{reason}, expected one of {', '.join(kinds)}")
    return cast(VectorModel, model)


def build_model(
    spec: ModelSpec,
    dataset: DatasetSpec,
    *,
    num_outputs: int | None = None,
    seed: int = 0,
    allow_import: Sequence[str] = (),
) -> nn.Module:
    """Return the model that `spec` describes, with tables as large as `dataset` needs.

    Args:
        spec: The model.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
        allow_import: Packages whose code a `PythonModelSpec` may name.

    Raises:
        ConfigError: A data set that the model cannot read, or code that is not allowed.
        StorageError: Not enough memory for the tables.
    """
    # The only model of foreign code, so the only one that takes the allowed packages.
    if isinstance(spec, PythonModelSpec):
        model = python_model(spec, dataset, num_outputs=num_outputs, seed=seed, allow_import=allow_import)
    else:
        tables: TablesSpec | None = getattr(spec, "tables", None)
        if tables is not None:
            check_shared(spec.kind, tables, dataset)
        model = MODELS[type(spec)](spec, dataset, num_outputs=num_outputs, seed=seed)
        if tables is not None:
            _check_looked_up(spec.kind, model, tables)
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    # After all are built: the bounds of a fast tier count for the model, not for each of its collections.
    share_tiers([arena for collection in collections for arena in collection.arenas])
    return model


def _check_looked_up(kind: str, model: nn.Module, tables: TablesSpec) -> None:
    """Raise unless the columns that are to share tables do: a model may not read one, or set its table itself."""
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    for name, other in tables.shared.items():
        tables_of = [{f.name: f.table for f in collection.features} for collection in collections]
        of_name = [features for features in tables_of if name in features]
        if not of_name or any(features[name] != features.get(other) for features in of_name):
            reason = "is not looked up by this model" if not of_name else f"looks up {of_name[0][name]!r} in this model"
            raise ConfigError(kind, f"tables.shared: {name!r} {reason}, expected other columns than {other!r} for it")
