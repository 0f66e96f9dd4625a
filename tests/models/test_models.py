# SPDX-License-Identifier: Apache-2.0
"""What every registered model does: learn, take data sets of every shape, and depend on its seed alone."""

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.models import DLRM, build_model, contract
from terarec.models.registry import MODELS
from terarec.nn.objectives import BinaryObjective
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    BinarySpec,
    DatasetSpec,
    DeepFMSpec,
    DINSpec,
    DLRMDCNV2Spec,
    DLRMSpec,
    DNNSpec,
    DynamicTablesSpec,
    ESMMSpec,
    FiBiNETSpec,
    FinalMLPSpec,
    GraphModelSpec,
    LabelColumn,
    LRSpec,
    MaskNetSpec,
    PNNSpec,
    PythonModelSpec,
    RegressionSpec,
    RunSpec,
    StaticTablesSpec,
    TargetHistory,
    TwoTowerSpec,
    from_data,
    to_data,
)
from terarec.spec.model import ModelSpec
from terarec.spec.retrieval import MultVAESpec, PairSpec, YouTubeDNNSpec
from terarec.spec.sequences import SequenceSpec
from terarec.train.optimizers import Optimizers
from tests.errors import at
from tests.models import every
from tests.models.every import ALLOWED, COLUMN_MODELS, DIN_MODELS, TWO_TOWER_MODELS, dataset, random_batch
from tests.models.planted import planted_batch, planted_dataset
from tests.params import in_every_run

each_model = pytest.mark.parametrize("name", every.MODELS)
each_kind = pytest.mark.parametrize(
    "name", in_every_run([name for name in every.MODELS if "-" not in name], every.MODELS)
)
"""Without the variants that differ in layers, where these make no difference."""
COLUMNS = dataset()


def build(name: str, columns: DatasetSpec = COLUMNS, *, seed: int = 1) -> nn.Module:
    return build_model(every.MODELS[name], columns, seed=seed, allow_import=ALLOWED)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return contract.training_loss(model, model(batch), batch, BinaryObjective())


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    return contract.logits_of(model, model(batch))


def train(model: nn.Module, batches: Callable[[int], Batch], *, steps: int = 150) -> float:
    """Train, and return the last loss."""
    optimizers = Optimizers.of(model, AdamSpec(lr=0.01), AdaGradSpec(lr=0.1))
    torch.manual_seed(0)
    for step in range(steps):
        loss = loss_of(model, batches(step))
        optimizers.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return loss.item()


def accuracy(model: nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        return ((logits_of(model.eval(), batch) > 0).float() == batch.label).float().mean().item()


def test_every_registered_model_is_tested() -> None:
    assert {type(spec) for spec in every.MODELS.values()} == set(MODELS) == set(typing.get_args(ModelSpec))
    assert len({spec.kind for spec in MODELS}) == len(MODELS)


def test_specs_say_which_models_have_their_own_loss() -> None:
    for name, spec in every.MODELS.items():
        if name == spec.kind and name != "python":  # whose code is anything
            has_own_loss = hasattr(build(name), "training_loss")
            assert getattr(spec, "has_own_loss", False) == has_own_loss, name
            for weights in ({"positive_weight": "auto"}, {"label_weights": (2.0,)}):
                # Runs of an earlier version, which can still be read, have such weights.
                run = RunSpec(data="d", model=spec, objective=BinarySpec(**weights))  # type: ignore[arg-type]
                with pytest.raises(ConfigError, check=at("RunSpec.objective", f"for {name}")):
                    run.check_own_loss()
            # Metrics leave out a label of weight 0.
            replace(run, objective=BinarySpec(label_weights=(1.0, 0.0))).check_own_loss()


@pytest.mark.parametrize("name", ["two_tower", "mf_bpr", "youtube_dnn", "sasrec"])
def test_an_objective_of_several_outputs_is_none_of_one_loss(name: str) -> None:
    """The error said that the data had as many labels."""
    with pytest.raises(ConfigError, check=at(name, "got an objective of 3 outputs")):
        build_model(every.MODELS[name], COLUMNS, num_outputs=3)
    both = replace(COLUMNS, labels=(*COLUMNS.labels, LabelColumn(name="other")))
    with pytest.raises(ConfigError, check=at(name, "got 2 labels")):
        build_model(every.MODELS[name], both, num_outputs=1)


PRODUCTS = [name for name in COLUMN_MODELS if not name.startswith("lr")]


@pytest.mark.parametrize("name", in_every_run(["deepfm", "dcn", "dlrm", "final_mlp"], PRODUCTS))
def test_learns_a_product(name: str) -> None:
    small = COLUMN_MODELS[name]
    wide = {"width": 8, "bottom": (16, 8)} if isinstance(small, DLRMSpec | DLRMDCNV2Spec) else {"width": 8}
    model = build_model(replace(small, **wide), planted_dataset(), seed=1)
    train(model, lambda step: planted_batch(seed=step), steps=120)
    # Without an MLP the product of a column with itself is not to be had, nor an unbounded gate.
    assert accuracy(model, planted_batch(2000, seed=-1)) > 0.9


@pytest.mark.parametrize("name", ["lr", "lr-mean", "graph", "python"])
def test_learns_a_sum(name: str) -> None:
    def batches(seed: int, size: int = 256) -> Batch:
        batch = random_batch(COLUMNS, size, seed=seed)
        keys = batch.sparse.keys[: 2 * size].view(2, size)  # of a and b
        return replace(batch, label=((keys[0] + 1.0).sin() + (keys[1] + 1.0).sin() > 0).float()[:, None])

    model = build(name)
    train(model, batches)
    assert accuracy(model, batches(-1, 2000)) > 0.95


@pytest.mark.parametrize("name", in_every_run(["din"], [*DIN_MODELS, *every.DIEN_MODELS, "hstu_ranker"]))
def test_it_learns_whether_the_target_is_in_the_history(name: str) -> None:
    def batches(seed: int, size: int = 256) -> Batch:
        batch = random_batch(COLUMNS, size, seed=seed)
        keys, past = batch.sparse.keys.tolist(), batch.sparse.offsets[3 * size :].tolist()
        targets, bags = keys[:size], [keys[past[row] : past[row + 1]] for row in range(size)]
        label = [float(target > 0 and target in bag) for target, bag in zip(targets, bags, strict=True)]
        return replace(batch, label=torch.tensor(label)[:, None])

    model = build_model(replace(every.MODELS[name], width=8, hidden=(32,)), COLUMNS, seed=1)
    train(model, batches, steps=100 if name in DIN_MODELS else 300)
    assert accuracy(model, batches(-1, 2000)) > 0.9


@pytest.mark.parametrize("name", in_every_run(["two_tower"], TWO_TOWER_MODELS))
def test_two_towers_learn_who_takes_what(name: str) -> None:
    def batches(seed: int, size: int = 64) -> Batch:
        batch = random_batch(COLUMNS, size, seed=seed)
        keys = batch.sparse.keys.clone()
        keys[size : 2 * size] = keys[:size]  # the user b takes the item a of the same number
        return replace(batch, label=torch.ones(size, 1), sparse=replace(batch.sparse, keys=keys))

    model = build(name)
    train(model, batches, steps=100)
    with torch.no_grad():
        batch = batches(-1)
        scores = model.eval().user_vectors(batch) @ model.item_vectors(batch).t()
    best = batch.sparse.keys[:64][scores.argmax(1)]
    assert (best == batch.sparse.keys[:64]).float().mean() > 0.9


@each_model
def test_a_gradient_reaches_all_weights_and_tables(name: str) -> None:
    model = build(name)
    batch = random_batch(COLUMNS, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1  # the wide parts of several models start at zero
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizers = Optimizers.of(model, AdamSpec(lr=0.01), AdaGradSpec(lr=0.1))
    loss_of(model, replace(batch, label=batch.label.clamp_min(1.0))).backward()
    for optimizer in optimizers:
        optimizer.step()
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    learned = {key: value for key, value in model.state_dict().items() if not key.endswith(statistics)}
    assert not {key for key, value in learned.items() if torch.equal(before[key], value)}


@pytest.mark.parametrize("name", in_every_run([name for name in COLUMN_MODELS if "-" not in name], COLUMN_MODELS))
@pytest.mark.parametrize(
    "columns",
    [dataset(dense=0), dataset(categorical=()), dataset(labels=3), dataset(rows=None)],
    ids=["without dense", "without categorical", "several labels", "any keys"],
)
def test_trains_on_data_sets_of_every_shape(name: str, columns: DatasetSpec) -> None:
    spec = COLUMN_MODELS[name]
    if any(column.rows is None for column in columns.categorical):
        spec = replace(spec, tables=DynamicTablesSpec())
    model = build_model(spec, columns, seed=1)
    batch = random_batch(columns, 32)
    first = loss_of(model, batch).item()
    assert model(batch).shape == (32, len(columns.labels))
    dense = build_dense_optimizer(AdamSpec(lr=0.01), model.parameters())
    rows = RowOptimizer(model, AdaGradSpec(lr=0.1)) if columns.categorical else None
    for _ in range(4):
        loss = loss_of(model, batch)
        dense.zero_grad()
        loss.backward()
        dense.step()
        if rows is not None:
            rows.step()
    assert loss.item() < first


@each_kind
def test_the_number_of_outputs_may_be_chosen(name: str) -> None:
    spec = every.MODELS[name]
    if isinstance(spec, GraphModelSpec | TwoTowerSpec | SequenceSpec | PairSpec | YouTubeDNNSpec | MultVAESpec):
        with pytest.raises(ConfigError, check=at(spec.kind, "4")):
            build_model(spec, COLUMNS, num_outputs=4)
    else:
        model = build_model(spec, COLUMNS, num_outputs=4, allow_import=ALLOWED)
        assert logits_of(model, random_batch(COLUMNS)).shape == (9, 4)


@each_model
def test_a_batch_of_one_trains_and_one_of_none_is_scored(name: str) -> None:
    """The last batch of an epoch may have one sample, whose variance batch norm cannot take."""
    model = build(name)
    assert loss_of(model, random_batch(COLUMNS, 1)).isfinite()
    assert logits_of(model.eval(), random_batch(COLUMNS, 0)).shape == (0, 1)


@each_model
def test_bfloat16_training_stays_near_float32(name: str) -> None:
    losses = []
    for enabled in (False, True):
        model = build(name)
        torch.manual_seed(0)  # of drawn negatives and masks
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = loss_of(model, random_batch(COLUMNS, 64))
        losses.append(output.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.05)


@each_kind
def test_a_state_dict_restores(name: str) -> None:
    batch = random_batch(COLUMNS)
    model, other = (build(name, seed=seed).eval() for seed in (1, 2))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits_of(other, batch), logits_of(model, batch))


@each_kind
def test_the_seed_alone_decides_the_first_weights(name: str) -> None:
    torch.manual_seed(5)
    first = build(name, seed=3).state_dict()
    torch.manual_seed(6)
    second = build(name, seed=3).state_dict()
    other = build(name, seed=4).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    if name != "lr":  # which starts at zero
        assert any(not torch.equal(first[key], other[key]) for key in first)


@each_model
def test_a_spec_survives_a_file(name: str) -> None:
    run = RunSpec(data="/d", model=every.MODELS[name])
    assert from_data(RunSpec, to_data(run)) == run


def test_first_weights_of_the_published_settings() -> None:
    """Rows from N(0, 1e-4), the linear ones too, Xavier-normal layers without bias, as FuxiCTR has them."""
    tables = StaticTablesSpec(initializer="normal", init_scale=1e-4)
    spec = DeepFMSpec(
        width=10, hidden=(400, 400), batch_norm=True, init="xavier_normal", tables=tables, wide_initializer=None
    )
    columns = dataset(dense=0, categorical=("a", "b"), rows=3000)
    model = build_model(spec, columns)
    for collection, name in ((model.vectors.embedding, "a"), (model.wide, "b.wide")):
        rows = collection.table(name).detach()
        assert rows.std().item() == pytest.approx(1e-4, rel=0.05)
        assert abs(rows.mean().item()) < 1e-5
    for index, layer in enumerate(model.deep.layers):
        out, fan_in = layer.weight.shape
        assert not layer.bias.any()
        if index < 2:
            assert layer.weight.std().item() == pytest.approx((2 / (fan_in + out)) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("init", "std", "bias"),
    [("xavier_uniform", (2 / 450) ** 0.5, 0), ("normal", 0.01, 0), ("kaiming_uniform", 1 / (3 * 50) ** 0.5, 1)],
)
def test_first_weights_of_layers(init: typing.Any, std: float, bias: int) -> None:
    columns = dataset(dense=50, categorical=())
    layer = build_model(DNNSpec(hidden=(400,), init=init), columns).deep.layers[0]
    assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
    assert bool(layer.bias.any()) == bool(bias)


def test_dropout_is_in_training_alone_and_behind_hidden_layers() -> None:
    columns = dataset()
    model = build_model(DNNSpec(width=4, hidden=(400,), dropout=0.5), columns, seed=1)
    plain = build_model(DNNSpec(width=4, hidden=(400,)), columns, seed=1)
    batch = random_batch(columns)
    assert torch.equal(model.eval()(batch), plain.eval()(batch))
    assert not torch.equal(model.train()(batch), plain.train()(batch))


ERRORS: dict[str, tuple[ModelSpec, DatasetSpec, str]] = {
    "no such history": (
        DINSpec(sequences=(TargetHistory(target="a", history="pats"),)),
        COLUMNS,
        ("din", "sequences[0].history: data set 'small' has no categorical column 'pats' (did you mean 'past'?)"),
    ),
    "a list as target": (
        DINSpec(sequences=(TargetHistory(target="tags", history="past"),)),
        COLUMNS,
        ("din", "one key a sam"),
    ),
    "other ids": (
        DINSpec(sequences=every.HISTORY),
        replace(COLUMNS, categorical=(replace(COLUMNS.categorical[0], rows=9), *COLUMNS.categorical[1:])),
        ("din", "'past' has 7 ids, 'a' has 9 ids"),
    ),
    "no such user column": (
        TwoTowerSpec(user=("bb",), item=("a",)),
        COLUMNS,
        ("two_tower", "user: data set 'small' has no column 'bb' (did you mean 'b'?)"),
    ),
    "no item key": (TwoTowerSpec(user=("b",), item=("x0",)), COLUMNS, ("two_tower: item_key", "got None")),
    "a list as item key": (TwoTowerSpec(user=("b",), item=("tags",)), COLUMNS, ("two_tower: item_key", "got 'tags'")),
    "no such context": (
        FinalMLPSpec(first_context=("aa",)),
        COLUMNS,
        ("final_mlp", "context: data set 'small' has no categorical column 'aa' (did you mean 'a'?)"),
    ),
    "one column without a pair": (FiBiNETSpec(), dataset(dense=0, categorical=("a",)), ("fibinet", "has one column")),
    "one vector without a dot": (PNNSpec(), dataset(dense=1, categorical=()), ("pnn", "has one column")),
    "two labels": (TwoTowerSpec(user=("b",), item=("a",)), dataset(labels=2), ("two_tower", "got 2 labels")),
    "static tables of any keys": (LRSpec(), dataset(rows=None), ("tables",)),
    "a graph of more dense columns": (
        GraphModelSpec(graph=every.GRAPH),
        dataset(dense=1),
        ("graph", "reads 2 dense columns"),
    ),
    "a graph of another column": (
        GraphModelSpec(graph=every.GRAPH),
        dataset(categorical=("a", "tags")),
        ("graph", "reads 'b', which data set 'small' does not have"),
    ),
    "a graph of fewer rows": (
        GraphModelSpec(graph=every.GRAPH),
        dataset(rows=8),
        ("graph", "has 7 rows, column 'a' 8 ids"),
    ),
    "a package that is not allowed": (
        PythonModelSpec(factory="shop.models:make"),
        COLUMNS,
        ("model: factory 'shop.models:make'",),
    ),
    "no factory": (
        PythonModelSpec(factory="tests.models.factories:none"),
        COLUMNS,
        ("function 'tests.models.factories:none'",),
    ),
    "no module": (PythonModelSpec(factory="tests.models.factories:no_model"), COLUMNS, ("model",)),
    "code from elsewhere": (
        PythonModelSpec(factory="tests.models.factories:DatasetSpec"),
        COLUMNS,
        ("model: factory 'tests.models.factories:DatasetSpec'",),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit_is_rejected(case: str) -> None:
    spec, columns, place = ERRORS[case]
    with pytest.raises(ConfigError, check=at(*place)):
        build_model(spec, columns, allow_import=ALLOWED)


SPEC_ERRORS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "neither": (lambda: GraphModelSpec(), ("GraphModelSpec", "neither file nor graph")),
    "both": (lambda: GraphModelSpec(file="g.json", graph=every.GRAPH), ("GraphModelSpec", "both file and graph")),
    "no colon": (lambda: PythonModelSpec(factory="shop.models"), ("PythonModelSpec.factory",)),
    "taken option": (
        lambda: PythonModelSpec(factory="shop:f", options={"seed": 1}),
        ("PythonModelSpec.options", "'seed'"),
    ),
    "no sequence": (lambda: DINSpec(sequences=()), ("DINSpec.sequences", "at least one pair")),
    "two roles": (
        lambda: DINSpec(sequences=(*every.HISTORY, TargetHistory(target="past", history="tags"))),
        ("DINSpec.sequences", "'past' is a target and a history"),
    ),
    "a column in both towers": (
        lambda: TwoTowerSpec(user=("a",), item=("a",)),
        ("TwoTowerSpec.item", "'a' occurs twice"),
    ),
    "heads": (lambda: dataclasses.replace(COLUMN_MODELS["autoint"], heads=4), ("AutoIntSpec.attention_width",)),
    "experts without rank": (lambda: dataclasses.replace(COLUMN_MODELS["dcn_v2"], experts=2), ("DCNV2Spec.rank",)),
    "heads of two streams": (lambda: FinalMLPSpec(second=(7,), heads=2), ("FinalMLPSpec.second", "multiple of")),
    "a column twice": (lambda: FinalMLPSpec(first_context=("a", "a")), ("FinalMLPSpec.first_context", "twice")),
    "width of the bottom": (lambda: DLRMDCNV2Spec(width=8), ("DLRMDCNV2Spec.bottom",)),
    "no layer of a mask": (lambda: MaskNetSpec(aggregation=0.0), ("MaskNetSpec.aggregation",)),
    "no block": (lambda: MaskNetSpec(blocks=()), ("MaskNetSpec.blocks",)),
    "a funnel of values": (
        lambda: RunSpec(data="d", model=ESMMSpec(), objective=RegressionSpec()),
        ("RunSpec.objective", "'regression' for esmm"),
    ),
    "no hidden layer": (lambda: DNNSpec(hidden=()), ("DNNSpec.hidden",)),
    "activation": (lambda: DNNSpec(activation=typing.cast(typing.Any, "rleu")), ("DNNSpec.activation",)),
}


@pytest.mark.parametrize("case", SPEC_ERRORS)
def test_a_spec_checks_itself(case: str) -> None:
    make, place = SPEC_ERRORS[case]
    with pytest.raises(ConfigError, check=at(*place)):
        make()


def test_one_vector_has_no_pair() -> None:
    dataset = replace(planted_dataset(num_dense=0), categorical=planted_dataset().categorical[:1])
    with pytest.raises(ConfigError, check=at("dlrm")):
        DLRM(DLRMSpec(), dataset)
    DLRM(DLRMSpec(interaction="cat"), dataset)
