# SPDX-License-Identifier: Apache-2.0
"""Pieces that the scripts of these tests share: a solver, a reader, and layers in a line each."""

from __future__ import annotations

import terarec.hugectr as hugectr

Layer = hugectr.Layer_t
ADAM = {"optimizer_type": hugectr.Optimizer_t.Adam, "update_type": hugectr.Update_t.Global}


def solver(**changes):
    """A solver of small batches, one thread of whose every run gives the same bits."""
    settings = {"max_eval_batches": 10, "batchsize_eval": 500, "batchsize": 500, "lr": 0.01, "seed": 5, **changes}
    return hugectr.CreateSolver(vvgpu=[[0]], **{"repeat_dataset": True, "i64_input_key": True, **settings})


def norm_reader(source, eval_source, **changes):
    return hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source=source,
        eval_source=eval_source,
        check_type=hugectr.Check_t.Sum,
        **changes,
    )


def model(source, eval_source, *, optimizer=None, reader=None, slots=4, dense=3, **settings):
    """A model with its input, of one sparse input "data"."""
    reader = reader or norm_reader(source, eval_source)
    made = hugectr.Model(solver(**settings), reader, hugectr.CreateOptimizer(**(optimizer or ADAM)))
    made.add(
        hugectr.Input(
            label_dim=1,
            label_name="label",
            dense_dim=dense,
            dense_name="dense",
            data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data", 1, True, slots)],
        )
    )
    return made


def embed(made, top, width, bottom="data", kind=None, **changes):
    made.add(
        hugectr.SparseEmbedding(
            embedding_type=kind or hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=changes.pop("workspace", 1),
            embedding_vec_size=width,
            combiner=changes.pop("combiner", "sum"),
            sparse_embedding_name=top,
            bottom_name=bottom,
            **changes,
        )
    )


def layer(made, kind, bottoms, tops, **options):
    made.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms.split(), top_names=tops.split(), **options))


def dense_stack(made, bottom, *widths, prefix="fc"):
    """Fully connected layers with ReLU; returns the name of the last tensor."""
    for number, width in enumerate(widths):
        layer(made, Layer.InnerProduct, bottom, f"{prefix}{number}", num_output=width)
        layer(made, Layer.ReLU, f"{prefix}{number}", f"{prefix}{number}_relu")
        bottom = f"{prefix}{number}_relu"
    return bottom


def to_loss(made, bottom):
    """A logit over `bottom` and its loss."""
    layer(made, Layer.InnerProduct, bottom, "logit", num_output=1)
    layer(made, Layer.BinaryCrossEntropyLoss, "logit label", "loss")
    made.compile()
    return made


def build_dcn(made, *, dropout_rate=0.1):
    """Deep & Cross, with its input."""
    made.add(hugectr.Input(1, "label", 3, "dense", [hugectr.DataReaderSparseParam("data", 1, True, 4)]))
    embed(made, "embedding", 8)
    layer(made, Layer.Reshape, "embedding", "flat", leading_dim=32)
    layer(made, Layer.Concat, "flat dense", "all")
    layer(made, Layer.MultiCross, "all", "cross", num_layers=2)
    deep = dense_stack(made, "all", 32)
    layer(made, Layer.Dropout, deep, "dropped", dropout_rate=dropout_rate)
    layer(made, Layer.Concat, "cross dropped", "both")
    return to_loss(made, "both")


def dcn(source, eval_source, *, optimizer=None, **settings):
    """Deep & Cross over Norm files."""
    made_of = hugectr.CreateOptimizer(**(optimizer or ADAM))
    return build_dcn(hugectr.Model(solver(**settings), norm_reader(source, eval_source), made_of))


def auc_of(made, batches=10):
    """The AUC over evaluation batches, as a script that calls `eval` itself finds it."""
    for _ in range(batches):
        made.eval()
    return dict(made.get_eval_metrics())["AUC"]
