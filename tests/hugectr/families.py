# SPDX-License-Identifier: Apache-2.0
"""Builders of the families of models that HugeCTR's scripts train, small, in the style of their releases."""

from __future__ import annotations

import terarec.hugectr as hugectr
from tests.hugectr.planted import ROWS
from tests.hugectr.scripts import Layer, dense_stack, embed, layer, model, norm_reader, solver, to_loss

LOCALIZED = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash


def inputs(made, *sparse, labels=("label",), dense=3):
    """An input of several labels or several sparse inputs (name, slots)."""
    arrays = [hugectr.DataReaderSparseParam(name, 1, True, slots) for name, slots in sparse]
    if len(labels) == 1:
        made.add(hugectr.Input(1, labels[0], dense, "dense", arrays))
    else:
        dims = [1] * len(labels)
        made.add(hugectr.Input(dims, list(labels), dense, "dense", arrays))


def bare(source, eval_source, optimizer=None, **settings):
    made_of = hugectr.CreateOptimizer(**(optimizer or {}))
    return hugectr.Model(solver(**settings), norm_reader(source, eval_source), made_of)


def dnn(*sources, **settings):
    made = model(*sources, **settings)
    embed(made, "embedding", 8)
    layer(made, Layer.Reshape, "embedding", "flat", leading_dim=32)
    layer(made, Layer.Concat, "flat dense", "all")
    return to_loss(made, dense_stack(made, "all", 32, 16))


def dcn_v2(*sources, **settings):
    made = model(*sources, **settings)
    embed(made, "embedding", 8, combiner="mean")
    layer(made, Layer.Reshape, "embedding", "flat", leading_dim=32)
    layer(made, Layer.Concat, "flat dense", "all")
    layer(made, Layer.MultiCross, "all", "cross", num_layers=2, projection_dim=4)
    layer(made, Layer.MLP, "cross", "deep", num_outputs=[32, 16], act_type=hugectr.Activation_t.Relu)
    return to_loss(made, "deep")


def wide_deep(*sources, **settings):
    made = bare(*sources, **settings)
    inputs(made, ("wide_data", 1), ("deep_data", 3))
    embed(made, "wide", 1, bottom="wide_data")
    embed(made, "deep", 8, bottom="deep_data")
    layer(made, Layer.Reshape, "deep", "flat", leading_dim=24)
    layer(made, Layer.Reshape, "wide", "wide_flat", leading_dim=1)
    layer(made, Layer.ReduceSum, "wide_flat", "wide_sum", axis=1)
    layer(made, Layer.Concat, "flat dense", "all")
    top = dense_stack(made, "all", 32)
    layer(made, Layer.Dropout, top, "dropped", dropout_rate=0.1)
    layer(made, Layer.InnerProduct, "dropped", "deep_logit", num_output=1)
    layer(made, Layer.Add, "deep_logit wide_sum", "sum")
    layer(made, Layer.BinaryCrossEntropyLoss, "sum label", "loss")
    made.compile()
    return made


def deepfm(*sources, **settings):
    made = model(*sources, **settings)
    embed(made, "embedding", 5, kind=LOCALIZED, slot_size_array=[ROWS] * 4, workspace=0)
    layer(made, Layer.Reshape, "embedding", "rows", leading_dim=5)
    layer(made, Layer.Slice, "rows", "vectors weights", ranges=[(0, 4), (4, 5)])
    layer(made, Layer.Reshape, "vectors", "vectors_flat", leading_dim=16)
    layer(made, Layer.Reshape, "weights", "weights_flat", leading_dim=4)
    layer(made, Layer.WeightMultiply, "dense", "dense_vectors", weight_dims=[3, 4])
    layer(made, Layer.WeightMultiply, "dense", "dense_weights", weight_dims=[3, 1])
    layer(made, Layer.Concat, "vectors_flat dense_vectors", "fields")
    layer(made, Layer.InnerProduct, dense_stack(made, "fields", 16), "deep_logit", num_output=1)
    layer(made, Layer.FmOrder2, "fields", "pairs", out_dim=4)
    layer(made, Layer.ReduceSum, "pairs", "pairs_sum", axis=1)
    layer(made, Layer.Concat, "weights_flat dense_weights", "firsts")
    layer(made, Layer.ReduceSum, "firsts", "firsts_sum", axis=1)
    layer(made, Layer.Add, "deep_logit pairs_sum firsts_sum", "sum")
    layer(made, Layer.BinaryCrossEntropyLoss, "sum label", "loss")
    made.compile()
    return made


def dlrm(made, embedding="embedding", width=8):
    """The layers of DLRM above an embedding [B, slots, width]."""
    bottom = dense_stack(made, "dense", 16, width, prefix="bottom")
    layer(made, Layer.Interaction, f"{bottom} {embedding}", "interaction")
    return to_loss(made, dense_stack(made, "interaction", 32, prefix="top"))


def fused_dlrm(*sources, **settings):
    """DLRM as releases 3.1 to 23.06 write it: fused layers that hand scratch tensors on, and a group of layers."""
    made = model(*sources, **settings)
    embed(made, "embedding", 8)
    head, tail = hugectr.FcPosition_t.Head, hugectr.FcPosition_t.Tail
    fused = Layer.FusedInnerProduct
    layer(made, fused, "dense", "b1 b1_mask b1_dx b1_db", num_output=16, pos_type=head)
    layer(made, fused, "b1 b1_mask b1_dx b1_db", "b2", num_output=8, pos_type=tail)
    layer(made, Layer.Interaction, "b2 embedding", "pairs pairs_grad")
    made.add(
        hugectr.GroupDenseLayer(
            group_layer_type=hugectr.GroupLayer_t.GroupFusedInnerProduct,
            bottom_name_list=["pairs", "pairs_grad"],
            top_name_list=["t1", "t2"],
            num_outputs=[32, 1],
            last_act_type=hugectr.Activation_t.Non,
        )
    )
    layer(made, Layer.BinaryCrossEntropyLoss, "t2 label", "loss")
    made.compile()
    return made


def raw_async_reader(source, eval_source, samples, eval_samples):
    return hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.RawAsync,
        source=[source],
        eval_source=eval_source,
        check_type=hugectr.Check_t.Non,
        num_samples=samples,
        eval_num_samples=eval_samples,
        slot_size_array=[ROWS] * 4,
        async_param=hugectr.AsyncParam(
            num_threads=1, num_batches_per_thread=2, shuffle=False, multi_hot_reader=True, is_dense_float=True
        ),
    )


def hybrid_dlrm(reader, **settings):
    made = model("", "", reader=reader, optimizer={"optimizer_type": hugectr.Optimizer_t.SGD}, **settings)
    embed(made, "embedding", 8, kind=hugectr.Embedding_t.HybridSparseEmbedding, slot_size_array=[ROWS] * 4)
    return dlrm(made)


def collection_dlrm(reader, *, rows=ROWS, optimizer=None, **settings):
    """Lookups of a collection joined into [B, 4, width]."""
    made = collection_model(reader, optimizer, **settings)
    config = hugectr.EmbeddingCollectionConfig()
    for slot in range(4):
        table = hugectr.EmbeddingTableConfig(name=str(slot), max_vocabulary_size=rows, ev_size=8)
        config.embedding_lookup(table, f"data{slot}", f"vector{slot}", "sum")
    config.shard(shard_matrix=[list("0123")], shard_strategy=[("mp", list("0123"))])
    made.add(config)
    layer(made, Layer.Concat, "vector0 vector1 vector2 vector3", "embedding")
    return dlrm(made)


def planned_dlrm(reader, plan, **settings):
    """A collection as release 3.7 spells it, whose outputs [B, width] are joined in two steps."""
    made = collection_model(reader, None, **settings)
    planner = hugectr.EmbeddingPlanner()
    for slot in range(4):
        table = hugectr.EmbeddingTablePlaceHolder(slot, ROWS, 8, 0, ROWS)
        planner.embedding_lookup(emb_table=table, bottom_name=f"data{slot}", top_name=f"vector{slot}", combiner="sum")
    made.add(planner.create_embedding_collection(plan))
    layer(made, Layer.Concat, "vector0 vector1 vector2 vector3", "embedding")
    layer(made, Layer.Concat, f"{dense_stack(made, 'dense', 16, 8, prefix='bottom')} embedding", "all")
    return to_loss(made, dense_stack(made, "all", 32, prefix="top"))


def collection_model(reader, optimizer, **settings):
    made = hugectr.Model(
        solver(use_embedding_collection=True, **settings),
        reader,
        hugectr.CreateOptimizer(**(optimizer or {"optimizer_type": hugectr.Optimizer_t.AdaGrad})),
    )
    inputs(made, *((f"data{slot}", 1) for slot in range(4)))
    return made


def collection_flat(reader, **settings):
    """Lookups given as lists, joined by the collection, with an optimizer of its own for one table."""
    made = collection_model(reader, None, **settings)
    own = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD)
    tables = [
        hugectr.EmbeddingTableConfig("a", ROWS, 4),
        hugectr.EmbeddingTableConfig("b", -1, 8),
        hugectr.EmbeddingTableConfig("c", ROWS, 4, opt_params=own),
        hugectr.EmbeddingTableConfig("d", ROWS, 4),
    ]
    config = hugectr.EmbeddingCollectionConfig()
    config.embedding_lookup(
        table_config=tables,
        bottom_name=[f"data{slot}" for slot in range(4)],
        top_name="embedding",
        combiner=["sum", "average", "sum", "concat"],
    )
    made.add(config)
    layer(made, Layer.Concat, "embedding dense", "all")
    return to_loss(made, dense_stack(made, "all", 32))


def din(*sources, **settings):
    """Attention of the shown item over the history (batch rows are reshaped to rows of items)."""
    made = bare(*sources, **settings)
    inputs(made, ("user", 1), ("good", 5), ("cate", 5), dense=1)
    embed(made, "user_emb", 4, bottom="user")
    embed(made, "good_emb", 4, bottom="good")
    embed(made, "cate_emb", 4, bottom="cate")
    layer(made, Layer.FusedReshapeConcat, "good_emb cate_emb", "past shown")
    layer(made, Layer.Scale, "shown", "shown_rows", axis=1, factor=4)
    layer(made, Layer.Sub, "shown_rows past", "difference")
    layer(made, Layer.ElementwiseMultiply, "shown_rows past", "product")
    layer(made, Layer.Concat, "shown_rows past difference product", "pairs")
    layer(made, Layer.InnerProduct, "pairs", "score_hidden", num_output=8)
    layer(made, Layer.InnerProduct, "score_hidden", "score", num_output=1)
    layer(made, Layer.Reshape, "score", "scores", leading_dim=4)
    layer(made, Layer.Softmax, "scores", "attention")
    layer(made, Layer.Scale, "attention", "attention_wide", axis=0, factor=8)
    layer(made, Layer.Reshape, "past", "past_flat", leading_dim=32)
    layer(made, Layer.ElementwiseMultiply, "attention_wide past_flat", "weighted")
    layer(made, Layer.ReduceSum, "weighted", "weight_sum", axis=1)
    layer(made, Layer.Reshape, "past", "past_steps", leading_dim=8, time_step=4)
    layer(made, Layer.ReduceMean, "past_steps", "past_mean", axis=1)
    layer(made, Layer.Reshape, "past_mean", "past_mean_flat", leading_dim=8)
    layer(made, Layer.Reshape, "user_emb", "user_flat", leading_dim=4)
    layer(made, Layer.Concat, "user_flat past_mean_flat weight_sum shown", "all")
    layer(made, Layer.InnerProduct, "all", "hidden", num_output=24)
    layer(made, Layer.PReLU_Dice, "hidden", "dice", elu_alpha=0.2, eps=1e-8)
    return to_loss(made, "dice")


def bst(*sources, **settings):
    """A transformer block over the history."""
    made = bare(*sources, **settings)
    inputs(made, ("user", 1), ("good", 4), ("shown_good", 1), ("cate", 4), ("shown_cate", 1), dense=1)
    for name in ("user", "good", "shown_good", "cate", "shown_cate"):
        embed(made, f"{name}_emb", 4, bottom=name)
    layer(made, Layer.SequenceMask, "dense dense", "mask", max_sequence_len_from=4, max_sequence_len_to=4)
    layer(made, Layer.Concat, "cate_emb good_emb", "past", axis=2)
    for part in ("query", "key", "value"):
        layer(made, Layer.InnerProduct, "past", part, num_output=8)
    layer(made, Layer.MultiHeadAttention, "query key value mask", "attended", num_attention_heads=2)
    layer(made, Layer.Add, "attended query", "added")
    layer(made, Layer.LayerNorm, "added", "normed")
    layer(made, Layer.InnerProduct, "normed", "ffn1", num_output=16)
    layer(made, Layer.InnerProduct, "ffn1", "ffn2", num_output=8)
    layer(made, Layer.Add, "ffn2 normed", "block")
    layer(made, Layer.LayerNorm, "block", "block_normed")
    layer(made, Layer.ReduceMean, "block_normed", "pooled", axis=1)
    layer(made, Layer.Reshape, "pooled", "pooled_flat", leading_dim=8)
    for name in ("user", "shown_good", "shown_cate"):
        layer(made, Layer.Reshape, f"{name}_emb", f"{name}_flat", leading_dim=4)
    layer(made, Layer.Concat, "pooled_flat user_flat shown_good_flat shown_cate_flat", "all")
    layer(made, Layer.InnerProduct, "all", "hidden", num_output=24)
    layer(made, Layer.PReLU_Dice, "hidden", "dice", elu_alpha=0.2, eps=1e-8)
    return to_loss(made, "dice")


def mmoe(*sources, **settings):
    """Two experts, two gates, two towers."""
    made = bare(*sources, **settings)
    inputs(made, ("data", 4), labels=("first_label", "second_label"))
    embed(made, "embedding", 8, kind=LOCALIZED)
    layer(made, Layer.Reshape, "embedding", "flat", leading_dim=32)
    layer(made, Layer.Concat, "flat dense", "all")
    experts = [dense_stack(made, "all", 16, prefix=f"expert{expert}_") for expert in range(2)]
    for task in ("first", "second"):
        layer(made, Layer.InnerProduct, "all", f"{task}_gate", num_output=2)
        layer(made, Layer.Softmax, f"{task}_gate", f"{task}_shares")
        layer(made, Layer.Slice, f"{task}_shares", f"{task}_share0 {task}_share1", ranges=[(0, 1), (1, 2)])
        for number, expert in enumerate(experts):
            layer(made, Layer.Scale, f"{task}_share{number}", f"{task}_wide{number}", axis=0, factor=16)
            layer(made, Layer.ElementwiseMultiply, f"{expert} {task}_wide{number}", f"{task}_part{number}")
        layer(made, Layer.Add, f"{task}_part0 {task}_part1", f"{task}_mix")
        layer(made, Layer.InnerProduct, f"{task}_mix", f"{task}_logit", num_output=1)
    for task in ("first", "second"):
        layer(made, Layer.BinaryCrossEntropyLoss, f"{task}_logit {task}_label", f"{task}_loss")
    made.compile(loss_names=["first_label", "second_label"], loss_weights=[0.5, 0.5])
    return made


def neumf(*sources, **settings):
    """Matrix factorisation next to an MLP over users and items, in epochs."""
    metrics = {hugectr.MetricsType.HitRate: 0.8, hugectr.MetricsType.AverageLoss: 0.0, hugectr.MetricsType.AUC: 1.0}
    made = bare(*sources, repeat_dataset=False, metrics_spec=metrics, **settings)
    inputs(made, ("data", 2), dense=1)
    embed(made, "embedding", 12)
    layer(made, Layer.Reshape, "embedding", "flat", leading_dim=24)
    layer(made, Layer.Slice, "flat", "user user_mlp item item_mlp", ranges=[(0, 8), (8, 12), (12, 20), (20, 24)])
    layer(made, Layer.ElementwiseMultiply, "user item", "product")
    layer(made, Layer.Concat, "user_mlp item_mlp", "mlp_input")
    layer(made, Layer.Concat, f"product {dense_stack(made, 'mlp_input', 16)}", "all")
    return to_loss(made, "all")


def gmf(*sources, **settings):
    """Generalised matrix factorisation alone: a weighted product of user and item, in epochs."""
    made = bare(*sources, repeat_dataset=False, **settings)
    inputs(made, ("data", 2), dense=1)
    embed(made, "embedding", 8)
    layer(made, Layer.Reshape, "embedding", "flat", leading_dim=16)
    layer(made, Layer.Slice, "flat", "user item", ranges=[(0, 8), (8, 16)])
    layer(made, Layer.ElementwiseMultiply, "user item", "product")
    return to_loss(made, "product")
