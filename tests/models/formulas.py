# SPDX-License-Identifier: Apache-2.0
"""The formula of every model over columns, in NumPy and float64, sample by sample and pair by pair.

Written from the papers. Only the names of the weights are taken from the models.
"""

import math
from itertools import combinations
from typing import Any

import numpy as np

from terarec.spec import DatasetSpec
from terarec.spec.model import ModelSpec

Array = np.ndarray[Any, np.dtype[np.float64]]


class Weights:
    """Weights of a model by name."""

    def __init__(self, dense: dict[str, Array], tables: dict[str, Array]) -> None:
        self.dense = dense
        self.tables = tables

    def __getitem__(self, name: str) -> Array:
        return self.dense[name]

    def linear(self, prefix: str, x: Array) -> Array:
        bias = self.dense.get(f"{prefix}.bias")
        product = self.dense[f"{prefix}.weight"] @ x
        return product if bias is None else product + bias


class Sample:
    """One sample: dense values, and the keys of each column."""

    def __init__(self, dense: Array, keys: dict[str, list[int]]) -> None:
        self.dense = dense
        self.keys = keys


def pooled(table: Array, keys: list[int], pooling: str) -> Array:
    total = sum((table[key] for key in keys), np.zeros(table.shape[1]))
    return total / len(keys) if pooling == "mean" and keys else total


def activate(name: str, x: Array, weights: Weights, prefix: str) -> Array:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return silu(x)
    if name == "tanh":
        return np.tanh(x)
    if name == "gelu":
        return np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    if name == "prelu":
        return np.where(x > 0, x, weights[f"{prefix}.weight"] * x)
    assert name == "dice"  # in evaluation: running statistics
    mean, var = weights[f"{prefix}.norm.running_mean"], weights[f"{prefix}.norm.running_var"]
    gate = 1 / (1 + np.exp(-(x - mean) / np.sqrt(var + 1e-8)))
    return gate * x + (1 - gate) * weights[f"{prefix}.alpha"] * x


def mlp(w: Weights, prefix: str, x: Array, hidden: int, spec: Any, *, activation: str | None = None) -> Array:
    """`hidden` layers with what follows them, and the linear layer behind them if there is one."""
    for index in range(hidden):
        x = w.linear(f"{prefix}.layers.{index}", x)
        norm = f"{prefix}.norms.{index}"
        if f"{norm}.weight" in w.dense:
            mean, var = w[f"{norm}.running_mean"], w[f"{norm}.running_var"]
            x = w[f"{norm}.weight"] * (x - mean) / np.sqrt(var + 1e-5) + w[f"{norm}.bias"]
        x = activate(activation or spec.activation, x, w, f"{prefix}.activations.{index}")
    return w.linear(f"{prefix}.layers.{hidden}", x) if f"{prefix}.layers.{hidden}.weight" in w.dense else x


def embedded(w: Weights, sample: Sample, spec: Any) -> list[Array]:
    return [pooled(w.tables[name], keys, spec.pooling) for name, keys in sample.keys.items()]


def flat(w: Weights, sample: Sample, spec: Any) -> Array:
    return np.concatenate([sample.dense, *embedded(w, sample, spec)])


def fields(w: Weights, sample: Sample, spec: Any) -> list[Array]:
    dense = [value * vector for value, vector in zip(sample.dense, w["vectors.dense_vectors"], strict=True)]
    return [*embedded(w, sample, spec), *dense]


def linear_terms(w: Weights, sample: Sample, spec: Any, prefix: str = "") -> Array:
    out = w[f"{prefix}linear_weight"] @ sample.dense + w[f"{prefix}linear_bias"]
    return out + sum((pooled(w.tables[f"{n}.wide"], k, spec.pooling) for n, k in sample.keys.items()), 0 * out)


def pair_products(w: Weights, vectors: list[Array]) -> Array:
    products = sum((one * other for one, other in combinations(vectors, 2)), np.zeros(len(vectors[0])))
    factors = w.dense.get("products.factors")
    return np.array([products.sum()]) if factors is None else factors @ products


def lr(w: Weights, sample: Sample, spec: Any) -> Array:
    return linear_terms(w, sample, spec)


def fm(w: Weights, sample: Sample, spec: Any) -> Array:
    return linear_terms(w, sample, spec) + pair_products(w, fields(w, sample, spec))


def dnn(w: Weights, sample: Sample, spec: Any) -> Array:
    return mlp(w, "deep", flat(w, sample, spec), len(spec.hidden), spec)


def wide_deep(w: Weights, sample: Sample, spec: Any) -> Array:
    return linear_terms(w, sample, spec) + dnn(w, sample, spec)


def deepfm(w: Weights, sample: Sample, spec: Any) -> Array:
    return fm(w, sample, spec) + dnn(w, sample, spec)


def xdeepfm(w: Weights, sample: Sample, spec: Any) -> Array:
    first = fields(w, sample, spec)
    maps, sums = first, []
    for index, count in enumerate(spec.cin):
        kernel = w[f"cin.layers.{index}.weight"].reshape(count, len(maps), len(first))
        maps = [
            sum(kernel[h, i, j] * x * y for i, x in enumerate(maps) for j, y in enumerate(first))
            + w[f"cin.layers.{index}.bias"][h]
            for h in range(count)
        ]
        sums += [one.sum() for one in maps]
    out = linear_terms(w, sample, spec) + w.linear("cin_output", np.array(sums))
    return out + dnn(w, sample, spec) if spec.hidden else out


def dcn(w: Weights, sample: Sample, spec: Any) -> Array:
    x0 = flat(w, sample, spec)
    x = x0
    for weight, bias in zip(w["cross.weight"], w["cross.bias"], strict=True):
        x = x0 * (x @ weight) + bias + x
    parts = [x, mlp(w, "parallel", x0, len(spec.hidden), spec)] if spec.hidden else [x]
    return w.linear("output", np.concatenate(parts))


def dcn_v2(w: Weights, sample: Sample, spec: Any) -> Array:
    x0 = flat(w, sample, spec)
    x = x0
    for layer in range(spec.cross_layers):
        if spec.rank is None:
            crossed = w.linear(f"cross.layers.{layer}", x)
        elif spec.experts == 1:
            crossed = w["cross.expand"][layer] @ (w["cross.project"][layer] @ x) + w["cross.bias"][layer]
        else:
            scores = np.exp(w["cross.gate"] @ x)
            crossed = np.zeros_like(x)
            for expert, score in enumerate(scores / scores.sum()):
                inner = np.tanh(w["cross.inner"][layer, expert] @ np.tanh(w["cross.down"][layer, expert] @ x))
                crossed += score * (w["cross.up"][layer, expert] @ inner + w["cross.bias"][layer])
        x = x0 * crossed + x
    stacked = mlp(w, "stacked", x, len(spec.hidden), spec) if spec.structure.startswith("stacked") else x
    if spec.structure.endswith("parallel"):
        stacked = np.concatenate([stacked, mlp(w, "parallel", x0, len(spec.hidden), spec)])
    return w.linear("output", stacked)


def autoint(w: Weights, sample: Sample, spec: Any) -> Array:
    x = np.stack(fields(w, sample, spec))
    for layer in range(spec.layers):
        prefix = f"attention.{layer}"
        query, key, value = (x @ w[f"{prefix}.{name}.weight"].T for name in ("query", "key", "value"))
        width = spec.attention_width // spec.heads
        heads = []
        for head in range(spec.heads):
            part = slice(head * width, (head + 1) * width)
            scores = query[:, part] @ key[:, part].T / (math.sqrt(width) if spec.scale else 1)
            scores = np.exp(scores)
            heads.append(scores / scores.sum(1, keepdims=True) @ value[:, part])
        out = np.concatenate(heads, axis=1)
        if spec.residual:
            out = out + (x @ w[f"{prefix}.projection.weight"].T if out.shape != x.shape else x)
        if spec.layer_norm:
            centred = out - out.mean(1, keepdims=True)
            out = centred / np.sqrt(out.var(1, keepdims=True) + 1e-5)
            out = out * w[f"{prefix}.norm.weight"] + w[f"{prefix}.norm.bias"]
        x = np.maximum(out, 0)
    logits = w.linear("output", x.reshape(-1))
    if spec.hidden:
        logits = logits + dnn(w, sample, spec)
    return logits + linear_terms(w, sample, spec, "linear.") if spec.wide else logits


def dlrm(w: Weights, sample: Sample, spec: Any) -> Array:
    vectors = embedded(w, sample, spec)
    first = [mlp(w, "bottom", sample.dense, len(spec.bottom), spec)] if sample.dense.size else []
    vectors = [*first, *vectors]
    if not sample.keys or spec.interaction == "cat":
        x = np.concatenate(vectors)
    else:
        dots = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        x = np.concatenate([*first, np.array(dots)])
    width = w["top.layers.0.weight"].shape[1]  # zeros behind the dots make it a multiple of 16
    return mlp(w, "top", np.pad(x, (0, width - len(x))), len(spec.top), spec)


def din(w: Weights, sample: Sample, spec: Any) -> Array:
    histories = {pair.history for pair in spec.sequences}
    plain = [pooled(w.tables[n], k, spec.pooling) for n, k in sample.keys.items() if n not in histories]
    for index, pair in enumerate(spec.sequences):
        table = w.tables[pair.target]
        target = table[sample.keys[pair.target][0]]
        vectors = [table[key] for key in sample.keys[pair.history] if key != 0 or not spec.mask_missing]
        inputs = [np.concatenate([target, v, target - v, target * v]) for v in vectors]
        scores = [
            mlp(w, f"attention.{index}.mlp", x, len(spec.attention), spec, activation=spec.attention_activation)[0]
            for x in inputs
        ]
        if spec.softmax:
            scores = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
        plain.append(sum((s * v for s, v in zip(scores, vectors, strict=True)), np.zeros(spec.width)))
    return mlp(w, "deep", np.concatenate([sample.dense, *plain]), len(spec.hidden), spec)


def dlrm_dcnv2(w: Weights, sample: Sample, spec: Any) -> Array:
    first = [mlp(w, "bottom", sample.dense, len(spec.bottom), spec)] if sample.dense.size else []
    x0 = np.concatenate([*first, *embedded(w, sample, spec)])
    x = x0
    for expand, project, bias in zip(w["cross.expand"], w["cross.project"], w["cross.bias"], strict=True):
        x = x0 * (expand @ (project @ x) + bias) + x
    return mlp(w, "top", x, len(spec.top), spec)


def ffm(w: Weights, sample: Sample, spec: Any) -> Array:
    by_column = [vector.reshape(-1, spec.width) for vector in fields(w, sample, spec)]
    products = np.zeros(spec.width)
    for i, j in combinations(range(len(by_column)), 2):
        products += by_column[i][j] * by_column[j][i]
    factors = w.dense.get("products.factors")
    return linear_terms(w, sample, spec) + (np.array([products.sum()]) if factors is None else factors @ products)


def pnn(w: Weights, sample: Sample, spec: Any) -> Array:
    vectors = fields(w, sample, spec)
    parts = [flat(w, sample, spec)]
    if spec.products != "outer":
        dots = np.array([vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)])
        parts.append(np.pad(dots, (0, -(spec.width + len(dots)) % 16)))  # zeros make a multiple of 16
    if spec.products != "inner":
        parts.append(sum(np.outer(one, other) for one in vectors for other in vectors).reshape(-1))
    return mlp(w, "deep", np.concatenate(parts), len(spec.hidden), spec)


def fibinet(w: Weights, sample: Sample, spec: Any) -> Array:
    vectors = fields(w, sample, spec)
    means = np.array([vector.mean() for vector in vectors])
    factors = np.maximum(w["senet.excite.weight"] @ np.maximum(w["senet.squeeze.weight"] @ means, 0), 0)
    gated = [factor * vector for factor, vector in zip(factors, vectors, strict=True)]
    parts = []
    for kind in (vectors, gated):
        for place, (i, j) in enumerate(combinations(range(len(vectors)), 2)):
            kernel = w["bilinear.kernels"][{"all": 0, "each": i, "interaction": place}[spec.bilinear]]
            parts.append((kind[i] @ kernel) * kind[j])
    return linear_terms(w, sample, spec) + mlp(w, "deep", np.concatenate([*parts, sample.dense]), 1, spec)


def normalized(x: Array, weight: Array, bias: Array) -> Array:
    return weight * (x - x.mean()) / np.sqrt(x.var() + 1e-5) + bias


def masknet(w: Weights, sample: Sample, spec: Any) -> Array:
    vectors = fields(w, sample, spec)
    guide = np.concatenate(vectors)
    norms = zip(vectors, w["norm.weight"], w["norm.bias"], strict=True)
    first = np.concatenate([normalized(vector, weight, bias) for vector, weight, bias in norms])
    x, outputs = first, []
    for index in range(len(spec.blocks)):
        prefix = f"blocks.{index}"
        mask = w.linear(f"{prefix}.mask.layers.1", np.maximum(w.linear(f"{prefix}.mask.layers.0", guide), 0))
        hidden = w.linear(f"{prefix}.layer", (x if spec.structure == "serial" else first) * mask)
        hidden = normalized(hidden, w[f"{prefix}.norm.weight"], w[f"{prefix}.norm.bias"])
        x = activate(spec.activation, hidden, w, f"{prefix}.activation")
        outputs.append(x)
    if spec.structure == "serial":
        return w.linear("deep.layers.0", x)
    return mlp(w, "deep", np.concatenate(outputs), len(spec.hidden), spec)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def final_mlp(w: Weights, sample: Sample, spec: Any) -> Array:
    x, names = flat(w, sample, spec), list(sample.keys)
    streams = []
    for index, (context, hidden) in enumerate(((spec.first_context, spec.hidden), (spec.second_context, spec.second))):
        vectors = embedded(w, sample, spec)
        if context:
            read = np.concatenate([vectors[names.index(name)] for name in context])
            gate = mlp(w, f"gates.{index}.mlp", read, len(spec.gate), spec)
        else:
            gate = w[f"gates.{index}.weights"]
        streams.append(mlp(w, f"streams.{index}", 2 * sigmoid(gate) * x, len(hidden), spec))
    first, second = (stream.reshape(spec.heads, -1) for stream in streams)
    out = w.linear("fusion.linear", np.concatenate(streams))
    for head, kernels in enumerate(w["fusion.kernels"]):
        out = out + np.array([first[head] @ kernel @ second[head] for kernel in kernels])
    return out


def softmax(x: Array) -> Array:
    return np.exp(x) / np.exp(x).sum()


def towers(w: Weights, inputs: list[Array], spec: Any) -> Array:
    outputs = [mlp(w, f"towers.mlps.{index}", x, len(spec.tower), spec) for index, x in enumerate(inputs)]
    return np.concatenate(outputs)


def num_towers(w: Weights) -> int:
    return 1 + max(int(name.split(".")[2]) for name in w.dense if name.startswith("towers.mlps."))


def shared_bottom(w: Weights, sample: Sample, spec: Any) -> Array:
    shared = mlp(w, "bottom", flat(w, sample, spec), len(spec.hidden), spec)
    return towers(w, [shared] * num_towers(w), spec)


def mmoe(w: Weights, sample: Sample, spec: Any) -> Array:
    x = flat(w, sample, spec)
    experts = np.stack([mlp(w, f"experts.{index}", x, len(spec.hidden), spec) for index in range(spec.experts)])
    gates = [softmax(mlp(w, f"gates.{index}", x, len(spec.gate), spec)) for index in range(num_towers(w))]
    return towers(w, [gate @ experts for gate in gates], spec)


def ple(w: Weights, sample: Sample, spec: Any) -> Array:
    count = num_towers(w)
    inputs = [flat(w, sample, spec)] * (count + 1)  # of each label, and the shared one at the end
    for layer in range(spec.layers):
        prefix = f"layers.{layer}"

        def experts(name: str, x: Array, number: int, prefix: str = prefix) -> list[Array]:
            return [mlp(w, f"{prefix}.{name}.{index}", x, len(spec.hidden), spec) for index in range(number)]

        shared = experts("shared_experts", inputs[-1], spec.shared_experts)
        own = [experts(f"label_experts.{label}", inputs[label], spec.label_experts) for label in range(count)]
        mixed = []
        for label in range(count):
            gate = softmax(mlp(w, f"{prefix}.gates.{label}", inputs[label], len(spec.gate), spec))
            mixed.append(gate @ np.stack([*own[label], *shared]))
        if layer < spec.layers - 1:
            gate = softmax(mlp(w, f"{prefix}.shared_gate", inputs[-1], len(spec.gate), spec))
            mixed.append(gate @ np.stack([*(expert for experts_of in own for expert in experts_of), *shared]))
        inputs = mixed
    return towers(w, inputs, spec)


def esmm(w: Weights, sample: Sample, spec: Any) -> Array:
    steps = sigmoid(towers(w, [flat(w, sample, spec)] * num_towers(w), spec))
    taken = np.cumprod(steps)
    return np.log(taken / (1 - taken))


def normalized_rows(w: Weights, prefix: str, x: Array) -> Array:
    weight, bias = w[f"{prefix}.weight"], w[f"{prefix}.bias"]
    return np.stack([normalized(row, weight, bias) for row in x])


def bst(w: Weights, sample: Sample, spec: Any) -> Array:
    histories = {pair.history for pair in spec.sequences}
    plain = [pooled(w.tables[n], k, spec.pooling) for n, k in sample.keys.items() if n not in histories]
    for index, pair in enumerate(spec.sequences):
        prefix, table = f"attention.{index}", w.tables[pair.target]
        keys = [key for key in sample.keys[pair.history] if key != 0 or not spec.mask_missing]
        keys = [*keys[-spec.max_length :], sample.keys[pair.target][0]]
        x = table[keys] + w[f"{prefix}.positions.weight"][: len(keys)][::-1]
        for layer in range(spec.layers):
            block = f"{prefix}.blocks.{layer}"
            query, key, value = np.split(np.stack([w.linear(f"{block}.projection", row) for row in x]), 3, axis=1)
            heads = []
            for q, k, v in zip(*(np.split(part, spec.heads, axis=1) for part in (query, key, value)), strict=True):
                scores = q @ k.T / math.sqrt(q.shape[1])
                heads.append(np.stack([softmax(row) for row in scores]) @ v)
            mixed = np.concatenate(heads, axis=1)
            x = normalized_rows(w, f"{block}.norms.0", x + np.stack([w.linear(f"{block}.output", r) for r in mixed]))
            inner = np.stack([w.linear(f"{block}.first", row) for row in x])
            inner = np.where(inner > 0, inner, 0.01 * inner)
            x = normalized_rows(w, f"{block}.norms.1", x + np.stack([w.linear(f"{block}.second", r) for r in inner]))
        if spec.output == "concat":
            filled = np.zeros((spec.max_length + 1, spec.width))
            filled[: len(x)] = x[::-1]
            plain.append(filled.reshape(-1))
        else:
            plain.append(x.mean(0) if spec.output == "mean" else x[-1])
    return mlp(w, "deep", np.concatenate([sample.dense, *plain]), len(spec.hidden), spec)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def hstu_ranker(w: Weights, sample: Sample, spec: Any) -> Array:
    ((target, history),) = ((pair.target, pair.history) for pair in spec.sequences)
    apart = {history, spec.actions, spec.times, spec.time}
    plain = [pooled(w.tables[n], k, spec.pooling) for n, k in sample.keys.items() if n not in apart]
    places = [place for place, key in enumerate(sample.keys[history]) if key != 0 or not spec.mask_missing]
    places = places[-spec.max_length :]
    x = [w.tables[target][sample.keys[history][place]] for place in places] + [w.tables[target][sample.keys[target][0]]]
    if spec.actions:
        done = [w.tables[spec.actions][sample.keys[spec.actions][place]] for place in places]
        x = [item + action for item, action in zip(x, [*done, w["attention.0.unknown"]], strict=True)]
    times = [*(sample.keys[spec.times][place] for place in places), sample.keys[spec.time][0]] if spec.times else None
    inputs = np.concatenate([sample.dense, *plain, hstu_at_end(w, np.stack(x), times, spec)])
    return mlp(w, "deep", inputs, len(spec.hidden), spec)


def hstu_at_end(w: Weights, x: Array, times: list[int] | None, spec: Any) -> Array:
    """The output for the last of the positions [n, D], normalized."""
    prefix, count = "attention.0.encoder", len(x)
    x = x * math.sqrt(spec.width) + w[f"{prefix}.positions.weight"][:count][::-1]
    for layer in range(spec.layers):
        block = f"{prefix}.blocks.{layer}"
        rows = normalized_rows(w, f"{block}.norms.0", x)
        projected = np.stack([silu(w.linear(f"{block}.projection", row)) for row in rows])
        gate, value, query, key = np.split(projected, 4, axis=1)
        heads = []
        for head, (q, k, v) in enumerate(
            zip(*(np.split(part, spec.heads, axis=1) for part in (query, key, value)), strict=True)
        ):
            mixed = np.zeros_like(v)
            for i in range(count):
                for j in range(i + 1):
                    score = q[i] @ k[j] + w[f"{block}.distances"][head, spec.max_length + i - j]
                    if times is not None:
                        bucket = int(math.log(max(1, abs(times[i] - times[j]))) / 0.301)
                        score += w[f"{block}.gaps"][head, min(bucket, spec.time_buckets - 1)]
                    mixed[i] += silu(score) / (spec.max_length + 1) * v[j]
            heads.append(mixed)
        gated = normalized_rows(w, f"{block}.norms.1", np.concatenate(heads, axis=1)) * gate
        x = x + np.stack([w.linear(f"{block}.output", row) for row in gated])
    return normalized_rows(w, "attention.0.norm", x[-1:])[0]


def recurrent(of_input: Array, of_state: Array, state: Array, weight: float = 1.0) -> Array:
    """A gated recurrent unit, whose update gate is multiplied by a weight."""
    input_parts, state_parts = np.split(of_input, 3), np.split(of_state, 3)
    reset, update = (sigmoid(one + other) for one, other in list(zip(input_parts, state_parts, strict=True))[:2])
    new = np.tanh(input_parts[2] + reset * state_parts[2])
    return (1 - weight * update) * state + weight * update * new


def dien_states(w: Weights, prefix: str, vectors: list[Array], width: int) -> list[Array]:
    """The states of the first layer; torch's update gate is one minus the paper's."""
    names = [f"{prefix}.extractor.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    of_input, of_state, input_bias, state_bias = (w[name] for name in names)
    state, states = np.zeros(width), []
    for vector in vectors:
        one, other = of_input @ vector + input_bias, of_state @ state + state_bias
        one[width : 2 * width] *= -1
        other[width : 2 * width] *= -1
        state = recurrent(one, other, state)
        states.append(state)
    return states


def dien(w: Weights, sample: Sample, spec: Any) -> Array:
    histories = {pair.history for pair in spec.sequences}
    plain = [pooled(w.tables[n], k, spec.pooling) for n, k in sample.keys.items() if n not in histories]
    for index, pair in enumerate(spec.sequences):
        prefix, table = f"attention.{index}", w.tables[pair.target]
        target = table[sample.keys[pair.target][0]]
        vectors = [table[key] for key in sample.keys[pair.history] if key != 0 or not spec.mask_missing]
        states, state = dien_states(w, prefix, vectors[-spec.max_length :], spec.width), np.zeros(spec.width)
        scores = np.array([one @ w[f"{prefix}.attention.weight"].T @ target for one in states])
        for one, weight in zip(states, softmax(scores), strict=True):
            state = recurrent(w.linear(f"{prefix}.of_input", one), w.linear(f"{prefix}.of_state", state), state, weight)
        plain.append(state)
    return mlp(w, "deep", np.concatenate([sample.dense, *plain]), len(spec.hidden), spec)


def two_tower(w: Weights, sample: Sample, spec: Any, dataset: DatasetSpec) -> Array:
    vectors = []
    for tower, names in (("user", spec.user), ("item", spec.item)):
        dense = [value for column, value in zip(dataset.dense, sample.dense, strict=True) if column.name in names]
        tables = {name: w.tables[spec.tables.shared.get(name, name)] for name in sample.keys if name in names}
        keys = [pooled(table, sample.keys[name], spec.pooling) for name, table in tables.items()]
        vector = mlp(w, f"{tower}.mlp", np.concatenate([dense, *keys]), len(spec.hidden), spec)
        vectors.append(vector / np.linalg.norm(vector) if spec.similarity == "cosine" else vector)
    return np.array([vectors[0] @ vectors[1] / spec.temperature])


def mf_bpr(w: Weights, sample: Sample, spec: Any) -> Array:
    return np.array([w.tables[spec.user][sample.keys[spec.user][0]] @ w.tables[spec.item][sample.keys[spec.item][0]]])


def ncf(w: Weights, sample: Sample, spec: Any) -> Array:
    user, item = (w.tables[name][sample.keys[name][0]] for name in (spec.user, spec.item))
    parts = []
    if spec.form != "mlp":
        parts.append(user[: spec.width] * item[: spec.width])
    if spec.form != "gmf":
        width = spec.mlp_width or spec.width
        both = np.concatenate([user[-width:], item[-width:]])
        parts.append(mlp(w, "mlp", both, len(spec.hidden), spec))
    return w.linear("output", np.concatenate(parts))


def youtube_dnn(w: Weights, sample: Sample, spec: Any, dataset: DatasetSpec) -> Array:
    table = w.tables[spec.item]
    dense = [value for column, value in zip(dataset.dense, sample.dense, strict=True) if column.name in spec.user]
    history = pooled(table, [key for key in sample.keys[spec.history] if key], "mean")
    others = [pooled(w.tables[name], keys, spec.pooling) for name, keys in sample.keys.items() if name in spec.user]
    user = mlp(w, "mlp", np.concatenate([dense, history, *others]), len(spec.hidden), spec)
    item = table[sample.keys[spec.item][0]]
    if spec.similarity == "cosine":
        user, item = user / np.linalg.norm(user), item / np.linalg.norm(item)
    return np.array([user @ item / spec.temperature])


def tanh_layers(w: Weights, prefix: str, x: Array, layers: int) -> Array:
    for index in range(layers):
        x = np.tanh(w.linear(f"{prefix}.layers.{index}", x))
    return x


def encoded(w: Weights, keys: list[int], spec: Any) -> list[Array]:
    """The mean and the logarithm of the variance of the latent vector of some items."""
    read = pooled(w.tables[f"{spec.item}.encoder"], keys, "sum") / math.sqrt(max(1, len(keys)))
    count = len(spec.hidden)
    hidden = tanh_layers(w, "encoder", np.tanh(read + w["first_bias"]), count - 1)
    return np.split(w.linear(f"encoder.layers.{count - 1}", hidden), 2)


def mult_vae_scores(w: Weights, sample: Sample, spec: Any, noise: float | Array = 0.0) -> Array:
    """The scores of all items, for the mean of the latent vector and so many of its standard deviations."""
    mean, log_variance = encoded(w, [key for key in sample.keys[spec.history] if key], spec)
    decoded = tanh_layers(w, "decoder", mean + noise * np.exp(log_variance / 2), len(spec.hidden))
    return w.tables[spec.item] @ decoded + w.tables[f"{spec.item}.bias"][:, 0]


def mult_vae(w: Weights, sample: Sample, spec: Any) -> Array:
    return mult_vae_scores(w, sample, spec)[sample.keys[spec.item]]


def logits(spec: ModelSpec, w: Weights, sample: Sample, dataset: DatasetSpec) -> Array:
    """The logits [C] of one sample."""
    if spec.kind == "two_tower":
        return two_tower(w, sample, spec, dataset)
    if spec.kind == "youtube_dnn":
        return youtube_dnn(w, sample, spec, dataset)
    formulas: tuple[Any, ...] = (lr, fm, dnn, wide_deep, deepfm, xdeepfm, dcn, dcn_v2, autoint, dlrm, din)
    formulas += (
        dlrm_dcnv2,
        ffm,
        pnn,
        fibinet,
        masknet,
        final_mlp,
        shared_bottom,
        mmoe,
        ple,
        esmm,
        bst,
        hstu_ranker,
        dien,
        mf_bpr,
        ncf,
        mult_vae,
    )
    return {formula.__name__: formula for formula in formulas}[spec.kind](w, sample, spec)
