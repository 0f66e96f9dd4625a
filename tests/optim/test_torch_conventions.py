# SPDX-License-Identifier: Apache-2.0
"""Code written for PyTorch's modules and optimizers does the same with tables, or raises; findings by their number."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import terarec
from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, StorageError
from terarec.optim import RowOptimizer
from terarec.optim.row_parameters import RowParameters
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DynamicTableSpec,
    FeatureSpec,
    RowOptions,
    SGDSpec,
    SparseOptimizerSpec,
    TableSpec,
)
from tests.errors import at

ROWS, WIDTH = 9, 4
KINDS = ["static", "dynamic", "drop_in"]


class Model(nn.Module):
    """Two features, of two collections' tables or drop-ins, and a dense layer."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        if kind == "drop_in":
            self.first: nn.Module = terarec.EmbeddingBag(ROWS, WIDTH, mode="sum")
            self.second: nn.Module = terarec.EmbeddingBag(ROWS, WIDTH, mode="sum")
        else:
            self.first, self.second = collection(kind, "a", seed), collection(kind, "b", seed)
        self.dense = nn.Linear(2 * WIDTH, 1)
        self.kind = kind

    def forward(self, keys: Tensor) -> Tensor:
        return self.dense(torch.cat([self.look_up(self.first, keys[0]), self.look_up(self.second, keys[1])], dim=1))

    def look_up(self, module: nn.Module, keys: Tensor) -> Tensor:
        if self.kind == "drop_in":
            return module(keys[:, None])
        (name,) = module.tables
        offsets = torch.arange(keys.numel() + 1)
        return module(Jagged(names=(name,), keys=keys, offsets=offsets)).pooled

    def rows(self) -> list[Tensor]:
        """Copies of the weights of both tables, by key."""
        if self.kind == "drop_in":
            return [self.first.weight.detach().clone(), self.second.weight.detach().clone()]
        return [
            part.export(part.keys()).weights.clone() for m in (self.first, self.second) for part in m.tables.values()
        ]


def collection(kind: str, name: str, seed: int) -> EmbeddingCollection:
    table = (
        TableSpec(name=name, rows=ROWS, width=WIDTH) if kind == "static" else DynamicTableSpec(name=name, width=WIDTH)
    )
    return EmbeddingCollection([table], [FeatureSpec(name=name, table=name)], seed=seed)


def keys(step: int = 0) -> Tensor:
    return torch.randint(ROWS, (2, 6), generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, step: int = 0, scale: float = 1.0) -> None:
    (model(keys(step)).square().sum() * scale).backward()


def train(model: Model, rows: RowOptimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        rows.step()


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


class Twin(nn.Module):
    """The model on `nn.Embedding`, with the weights that a `Model` of static tables has now."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding.from_pretrained(rows, freeze=False) for rows in model.rows()])
        self.dense = copy.deepcopy(model.dense)

    def forward(self, keys: Tensor) -> Tensor:
        return self.dense(torch.cat([table(part) for table, part in zip(self.tables, keys, strict=True)], dim=1))


def assert_close(model: Model, twin: Twin) -> None:
    for mine, theirs in zip(model.rows(), twin.tables, strict=True):
        torch.testing.assert_close(mine, theirs.weight.detach())
    torch.testing.assert_close(model.dense.weight, twin.dense.weight)


@pytest.mark.parametrize("spec", [AdamSpec(lr=0.1), AdaGradSpec(lr=0.1), SGDSpec(lr=0.1)], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("kind", KINDS)
def test_a1_torch_save_of_state_dicts_resumes_bit_for_bit(kind: str, spec: SparseOptimizerSpec) -> None:
    whole, first = Model(kind), Model(kind)
    train(whole, RowOptimizer(whole, spec), range(6))
    rows = RowOptimizer(first, spec)
    train(first, rows, range(3))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "rows": rows.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    second = Model(kind, seed=7)
    resumed = RowOptimizer(second, spec)
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["rows"])
    second.dense.load_state_dict(whole.dense.state_dict())
    train(second, resumed, range(3, 6))
    assert resumed.num_steps == 6
    assert same(second.rows(), whole.rows())


def test_a1_state_of_keys_that_a_dynamic_table_lacks_is_rejected() -> None:
    first, second = Model("dynamic"), Model("dynamic")
    rows = RowOptimizer(first, AdamSpec())
    train(first, rows, range(2))
    other = RowOptimizer(second, AdamSpec())
    with pytest.raises(ConfigError, check=at("row optimizer", "load the model's state_dict")):
        other.load_state_dict(rows.state_dict())
    assert other.num_steps == 0


def test_a1_loading_weights_keeps_the_state_of_the_same_keys() -> None:
    model = Model("dynamic")
    rows = RowOptimizer(model, AdaGradSpec(lr=0.1))
    train(model, rows, range(2))
    before = copy.deepcopy(rows.state_dict())
    model.load_state_dict(model.state_dict())
    after = rows.state_dict()
    for number, held in before["state"].items():
        for name, table in held["tables"].items():
            assert table["sum"].any()
            assert torch.equal(after["state"][number]["tables"][name]["sum"], table["sum"])


@pytest.mark.parametrize("change", [{"row_optimizer": None}, {"state": None}, {"state": {0: {"tables": {}}}}])
def test_a1_a_damaged_state_is_rejected_and_changes_nothing(change: dict) -> None:
    model = Model("static")
    rows = RowOptimizer(model, AdaGradSpec(lr=0.1))
    train(model, rows, range(2))
    state = {**copy.deepcopy(rows.state_dict()), **change}
    state = {name: value for name, value in state.items() if value is not None}
    before = copy.deepcopy(rows.state_dict())
    with pytest.raises(ConfigError, check=at("row optimizer")):
        rows.load_state_dict(state)
    assert str(rows.state_dict()) == str(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a2_c7_a_second_row_optimizer_starts_afresh_and_the_first_one_raises(kind: str) -> None:
    model = Model(kind)
    first = RowOptimizer(model, AdaGradSpec(lr=0.1))
    train(model, first, range(2))
    second = RowOptimizer(model, AdaGradSpec(lr=0.1))
    backward(model)
    before = model.rows()
    with pytest.raises(ConfigError, check=at("row optimizer", "later RowOptimizer")):
        first.step()
    with pytest.raises(ConfigError, check=at("row optimizer", "later RowOptimizer")):
        first.load_state_dict(second.state_dict())
    with pytest.raises(ConfigError, check=at("row optimizer", "later RowOptimizer")):
        first.state_dict()
    assert same(model.rows(), before)
    second.step()
    assert not same(model.rows(), before)


@pytest.mark.parametrize("where", ["collection", "parent", "parameter", "group"])
@pytest.mark.parametrize("kind", KINDS)
def test_a3_requires_grad_freezes_tables(kind: str, where: str) -> None:
    model = Model(kind)
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    train(model, rows, range(3))
    before = model.rows()
    if where == "collection":
        model.first.requires_grad_(False)
    elif where == "parent":
        model.requires_grad_(False)
    elif where == "parameter":
        next(model.first.parameters()).requires_grad_(False)
    else:
        for parameter in rows.param_groups[0]["params"]:
            parameter.requires_grad_(False)
    out = model(keys(5))
    assert out.requires_grad == (where != "parent")
    if out.requires_grad:
        out.sum().backward()
    rows.step()
    after = model.rows()
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1]) == (where in ("parent", "group"))
    model.requires_grad_(True)
    backward(model)
    rows.step()
    assert not torch.equal(model.rows()[0], before[0])


def test_a3_a_frozen_dynamic_table_inserts_no_key() -> None:
    model = Model("dynamic").train()
    model.first.requires_grad_(False)
    model(keys())
    assert [len(table) for m in (model.first, model.second) for table in m.tables.values()] == [
        0,
        keys()[1].unique().numel(),
    ]


def test_a5_an_average_of_models_raises() -> None:
    model = Model("static")
    for averaged in (AveragedModel(model), AveragedModel(model, use_buffers=True)):
        with pytest.raises(ConfigError, check=at("copy_ on the parameter that represents embedding tables")):
            averaged.update_parameters(model)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("joint", ["scaler", "unscaled and clipped", "dense unscaled and clipped"])
def test_a6_grad_scaler_trains_as_without(joint: str, rows_first: bool) -> None:
    model, plain = Model("static"), Model("static")
    both = [(RowOptimizer(m, AdamSpec(lr=0.1)), torch.optim.Adam(m.parameters(), lr=0.1)) for m in (model, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        for m, (rows, dense) in zip((model, plain), both, strict=True):
            rows.zero_grad()
            dense.zero_grad()
            loss = m(keys(step)).square().sum()
            (scaler.scale(loss) if m is model else loss).backward()
            if joint != "scaler":
                if m is model:
                    if joint == "unscaled and clipped":
                        scaler.unscale_(rows)
                    scaler.unscale_(dense)
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            for optimizer in (rows, dense) if rows_first else (dense, rows):
                if m is model:
                    scaler.step(optimizer)
                else:
                    optimizer.step()
        scaler.update()
    for mine, theirs in zip(model.rows(), plain.rows(), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(model.dense.weight, plain.dense.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unscales", [True, False])
def test_a6_grad_scaler_skips_a_step_that_is_not_finite(kind: str, unscales: bool) -> None:
    model = Model(kind)
    rows = RowOptimizer(model, AdamSpec(lr=0.1))
    train(model, rows, range(1))
    before = model.rows()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(keys(0)).sum() * float("inf")).backward()
    if unscales:
        scaler.unscale_(rows)
    scaler.step(rows)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert same(model.rows(), before)
    assert rows.is_skipped
    assert rows.num_skipped == 1
    backward(model)
    rows.step()
    assert not rows.is_skipped
    assert all(held.isfinite().all() for held in model.rows())


@pytest.mark.parametrize("foreach", [None, False])
def test_a7_clip_grad_norm_clips_rows_and_layers_jointly(foreach: bool | None) -> None:
    model = Model("static")
    twin = Twin(model)
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        for m in (model, twin):
            m.zero_grad()
            backward(m, step)
            backward(m, step + 10)
        mine = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        torch.testing.assert_close(mine, nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
        assert mine > 0.5
        rows.step()
        dense.step()
        theirs.step()
    assert_close(model, twin)


def test_a7_gradients_after_a_clip_are_not_clipped() -> None:
    model = Model("static")
    twin = Twin(model)
    rows, theirs = RowOptimizer(model, SGDSpec(lr=0.1)), torch.optim.SGD(twin.tables.parameters(), lr=0.1)
    for m in (model, twin):
        backward(m, 0)
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        backward(m, 1)
    rows.step()
    theirs.step()
    assert_close(model, twin)


@pytest.mark.parametrize(
    ("use", "where"),
    [
        (lambda p: nn.utils.clip_grad_norm_(p, 1.0, norm_type=1.0), "norm of the gradients"),
        (lambda p: nn.utils.clip_grad_value_(p, 1.0), "clamp_ on the .grad"),
        (lambda p: p[0].grad.abs().max(), "abs on the .grad"),
        (lambda p: p[0].grad.add_(1.0), "add_ on the .grad"),
        (lambda p: p[0].grad.copy_(torch.zeros_like(p[0])), "copy_ on the .grad"),
        (lambda p: (p[0].grad * p[0].grad).sum(), "mul on the .grad"),
    ],
)
@pytest.mark.parametrize("kind", ["static", "drop_in"])
def test_a7_what_gradients_of_rows_cannot_do_raises(kind: str, use, where: str) -> None:
    model = Model(kind)
    RowOptimizer(model, SGDSpec())
    backward(model)
    # The weights of the drop-in are a parameter, on which these calls work: the next lookup or step notices.
    places = f"{where} of embedding tables", "row optimizer"
    with pytest.raises(ConfigError, check=lambda error: error.where in places):
        use([p for name, p in model.named_parameters() if not name.startswith("dense")])


@torch.no_grad()
def _averaged(model: Model, way: str) -> None:
    """Average the weights in ways that are written by hand."""
    shadow = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if way == "in place":
            shadow[name].mul_(0.9).add_(p, alpha=0.1)
        elif way == "data":
            shadow[name].mul_(0.9).add_(p.data, alpha=0.1)
        elif way == "lerp":
            shadow[name].lerp_(p, 0.1)
        elif way == "clone":
            shadow[name] = p.data.clone()
            p.data.copy_(shadow[name] * 0.9 + p.data * 0.1)
        else:
            p.data.copy_(shadow[name])


@pytest.mark.parametrize(
    ("way", "call"), [("in place", "add_"), ("data", "add_"), ("lerp", "lerp_"), ("clone", "copy_"), ("back", "copy_")]
)
def test_a5_an_average_by_hand_raises(way: str, call: str) -> None:
    with pytest.raises(ConfigError, check=at(f"{call} on the parameter that represents embedding tables")):
        _averaged(Model("static"), way)


def test_a8_other_tensors_may_follow_type_and_device_of_a_parameter() -> None:
    first = next(Model("static").parameters())
    x = torch.ones(3, dtype=torch.float64)
    for held in (x.to(first), x.type_as(first), first.new_ones(3)):
        assert type(held) is Tensor
        assert held.dtype == torch.float32
        assert (held + 1).sum() == 6


def test_a8_a_penalty_over_parameters_raises() -> None:
    model = Model("static")
    penalties = {
        "pow": lambda p: p.pow(2).sum(),
        "norm": torch.norm,
        "mul": lambda p: (p * p).sum(),
        "abs": lambda p: p.abs().sum(),
    }
    for call, penalty in penalties.items():
        rejected = at(f"{call} on the parameter that represents embedding tables")
        with pytest.raises(ConfigError, check=rejected):
            sum(penalty(parameter) for parameter in model.parameters())
        with pytest.raises(ConfigError, check=rejected), torch.no_grad():
            sum(penalty(parameter) for parameter in model.parameters())


def test_a8_a_penalty_on_a_table_trains_it_as_in_torch() -> None:
    model = Model("static")
    twin = Twin(model)
    rows, theirs = RowOptimizer(model, AdaGradSpec(lr=0.1)), torch.optim.Adagrad(twin.tables.parameters(), lr=0.1)
    for step in range(3):
        for m, table in ((model, model.first.table("a")), (twin, twin.tables[0].weight)):
            (m(keys(step)).square().sum() + 0.05 * table.square().sum()).backward()
        rows.step()
        theirs.step()
        theirs.zero_grad()
    torch.testing.assert_close(model.rows()[0], twin.tables[0].weight.detach())


def test_a8_a_penalty_on_a_table_that_was_updated_since_raises() -> None:
    model = Model("static")
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    penalty = model.first.table("a").square().sum()
    train(model, rows, range(1))
    with pytest.raises(StorageError, check=at("backward")):
        penalty.backward()


@pytest.mark.parametrize("how", ["model", "dense", "rows", "zeros"])
@pytest.mark.parametrize("kind", KINDS)
def test_a12_zero_grad_drops_gradients_of_rows(kind: str, how: str) -> None:
    model = Model(kind)
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    others = [p for name, p in model.named_parameters() if kind != "drop_in" or name.startswith("dense")]
    dense = torch.optim.SGD(others, lr=0.1)
    train(model, rows, range(1))
    before = model.rows()
    (model(keys(0)) * float("nan")).sum().backward()
    if how == "model":
        model.zero_grad()
    elif how == "dense" and kind != "drop_in":
        dense.zero_grad()
    elif how == "zeros":
        model.zero_grad(set_to_none=False)
    else:
        rows.zero_grad()
    assert same(model.rows(), before)
    backward(model, 1)
    rows.step()
    assert not same(model.rows(), before)
    assert all(held.isfinite().all() for held in model.rows())


def test_a12_gradients_dropped_right_before_a_step_are_warned_of() -> None:
    model = Model("static")
    rows, dense = RowOptimizer(model, SGDSpec(lr=0.1)), torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    dense.step()
    dense.zero_grad()
    with pytest.warns(UserWarning, match="dropped by zero_grad"):
        rows.step()
    assert rows.num_steps == 0


def test_a12_a_check_for_nan_over_parameters_sees_rows() -> None:
    model = Model("static")
    backward(model)
    assert all(torch.isfinite(p.grad).all() and not p.grad.isnan().any() for p in model.parameters())
    model.zero_grad()
    vectors = model.look_up(model.first, keys()[0])
    vectors.backward(torch.full_like(vectors, float("nan")))
    grad = model.first.rows.grad
    assert not torch.isfinite(grad).all()
    assert grad.isnan().any()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a14_retain_grad_works_on_the_output(kind: str) -> None:
    model = Model(kind)
    vectors = model.look_up(model.first, keys()[0])
    vectors.retain_grad()
    vectors.square().sum().backward()
    torch.testing.assert_close(vectors.grad, 2 * vectors.detach())


@pytest.mark.parametrize("change", ["mul_", "relu_", "dropout"])
def test_c6_the_output_may_change_in_place(change: str) -> None:
    model = Model("static")
    twin = Twin(model)
    rows, theirs = RowOptimizer(model, SGDSpec(lr=0.1)), torch.optim.SGD(twin.tables.parameters(), lr=0.1)
    for vectors in (model.look_up(model.first, keys()[0]), twin.tables[0](keys()[0])):
        torch.manual_seed(3)
        if change == "mul_":
            vectors.mul_(2.0)
        elif change == "relu_":
            vectors.relu_()
        else:
            vectors = nn.Dropout(0.5, inplace=True)(vectors)
        vectors.square().sum().backward()
    rows.step()
    theirs.step()
    assert_close(model, twin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_c6_to_a_dtype_converts_the_output_and_keeps_the_rows(dtype: torch.dtype) -> None:
    model = Model("static").to(dtype)
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    before = model.rows()
    out = model(keys())
    assert out.dtype == dtype
    out.square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    rows.step()
    assert not same(model.rows(), before)
    assert all(held.dtype == torch.float32 for held in model.rows())


def test_d6_schedulers_drive_the_learning_rate() -> None:
    model = Model("static")
    rows = RowOptimizer(model, SGDSpec(lr=0.8))
    schedule = torch.optim.lr_scheduler.SequentialLR(
        rows,
        [torch.optim.lr_scheduler.StepLR(rows, 1, gamma=0.5), torch.optim.lr_scheduler.ConstantLR(rows, 1.0)],
        milestones=[2],
    )
    rates = []
    for step in range(3):
        before = model.rows()[0]
        vectors = model.look_up(model.first, torch.tensor([step]))
        vectors.sum().backward()
        rows.step()
        rates.append(float((before - model.rows()[0])[step, 0]))
        schedule.step()
    assert rates == pytest.approx([0.8, 0.4, 0.8])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(rows, factor=0.1, patience=0)
    plateau.step(1.0)
    plateau.step(2.0)
    assert rows.lr == pytest.approx(0.08)


def test_d6_groups_have_learning_rates_of_their_own() -> None:
    model = Model("static")
    groups = [{"params": model.first, "lr": 1.0}, {"params": [model.second]}]
    rows = RowOptimizer(groups, SGDSpec(lr=0.25))
    before = model.rows()
    for module in (model.first, model.second):
        model.look_up(module, torch.tensor([2])).sum().backward()
    rows.step()
    moved = [(old - new)[2, 0].item() for old, new in zip(before, model.rows(), strict=True)]
    assert moved == pytest.approx([1.0, 0.25])
    state = rows.state_dict()
    other = RowOptimizer([{"params": model.first}, {"params": model.second}], SGDSpec(lr=0.1))
    other.load_state_dict(state)
    assert [group["lr"] for group in other.param_groups] == [1.0, 0.25]


@pytest.mark.parametrize(
    "groups",
    [
        lambda m: list(m.parameters()),
        lambda m: [{"params": m.first, "weight_decay": 0.1}],
        lambda m: [{"params": m.dense}],
        lambda m: [{"lr": 0.1}],
        lambda m: [{"params": [m.first, m.second.rows]}],
        lambda m: [],
    ],
)
def test_d6_groups_that_are_none_are_rejected(groups) -> None:
    model = Model("static")
    first = RowOptimizer(model, SGDSpec(lr=0.1))
    with pytest.raises(ConfigError, check=at("row optimizer")):
        RowOptimizer(groups(model), SGDSpec())
    with pytest.raises(ConfigError, check=at("rows.frozen")):
        RowOptimizer(model, SGDSpec(rows=RowOptions(frozen=("nowhere",))))
    train(model, first, range(1))  # what was rejected has not taken the tables over


def test_c7_tables_are_in_one_group() -> None:
    model = Model("static")
    with pytest.raises(ConfigError, check=at("row optimizer", "earlier group")):
        RowOptimizer([{"params": model.first, "lr": 1.0}, {"params": model.first}], SGDSpec())
    rows = RowOptimizer(model.first, SGDSpec())
    for group in ({"params": model, "lr": 9.0}, {"params": model.dense}):
        with pytest.raises(ConfigError, check=at("row optimizer")):
            rows.add_param_group(group)
    rows.add_param_group({"params": model.second, "lr": 9.0})
    assert [len(group["params"]) for group in rows.param_groups] == [1, 1]
    train(model, rows, range(2))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a2_a_row_optimizer_is_not_copied(duplicate) -> None:
    model = Model("static")
    rows = RowOptimizer(model, SGDSpec())
    with pytest.raises(ConfigError, check=at("row optimizer", "not copied or pickled")):
        duplicate((model, rows))


def test_a12_zero_grad_drops_a_gradient_from_elsewhere() -> None:
    model = Model("drop_in")
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    model.first.weight.grad = torch.ones(ROWS, WIDTH)
    rows.zero_grad()
    train(model, rows, range(1))


def test_d6_step_takes_a_closure_and_runs_hooks() -> None:
    model = Model("static")
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    seen: list[str] = []
    rows.register_step_pre_hook(lambda *_: seen.append("before"))
    rows.register_step_post_hook(lambda *_: seen.append("after"))
    rows.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})

    def closure() -> Tensor:
        rows.zero_grad()
        loss = model(keys()).square().sum()
        loss.backward()
        return loss

    before = model.rows()
    loss = rows.step(closure)
    assert isinstance(loss, Tensor)
    assert seen == ["before", "after"]
    assert not same(model.rows(), before)
    assert rows.state_dict()["mine"] == 1


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dense", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adadelta"])
def test_a_dense_optimizer_over_all_parameters_trains_the_dense_part_alone(
    dense: str, foreach: bool, maximize: bool
) -> None:
    model = Model("static")
    twin = copy.deepcopy(model)
    made = getattr(torch.optim, dense)
    options = {"lr": 0.1, "foreach": foreach, "weight_decay": 0.1, "maximize": maximize}
    optimizers = [made(m.parameters(), **options) for m in (model, twin.dense)]
    for step in range(3):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            backward(m, step)
            optimizer.step()
    assert same(model.rows(), twin.rows())
    assert torch.equal(model.dense.weight, twin.dense.weight)
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 * WIDTH + 1


def test_fused_adam_over_all_parameters_trains_the_dense_part_alone() -> None:
    model = Model("static")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    rows, before = model.rows(), model.dense.weight.detach().clone()
    backward(model)
    optimizer.step()
    assert same(model.rows(), rows)
    assert not torch.equal(model.dense.weight, before)


def test_a_weight_of_two_optimizers_raises() -> None:
    model = Model("drop_in")
    RowOptimizer(model, SGDSpec())
    dense = torch.optim.Adam(model.parameters())
    backward(model)
    before = model.rows()
    with pytest.raises(ConfigError, check=at("row optimizer", "another optimizer")):
        dense.step()
    assert same(model.rows(), before)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_copies_and_pickles_have_gradients_of_their_own(kind: str) -> None:
    model = Model(kind)
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    train(model, rows, range(1))
    backward(model)
    model.first.requires_grad_(False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.first.rows.grad is None
        assert not twin.first.rows.requires_grad
        mine = RowOptimizer(twin, SGDSpec(lr=0.1))
        before = twin.rows()
        backward(twin)
        mine.step()
        assert torch.equal(twin.rows()[0], before[0])
        assert not torch.equal(twin.rows()[1], before[1])
    assert sum(map(len, model.second.pending.gradients())) == 1


def test_double_backward_through_a_lookup_raises() -> None:
    model = Model("static")
    vectors = model.look_up(model.first, keys()[0])
    (grad,) = torch.autograd.grad(vectors.square().sum(), vectors, create_graph=True)
    grad.square().sum().backward()  # a penalty on the gradient of the vectors is fine
    assert any(model.first.pending.gradients())


def test_non_finite_options_and_scaler_agree() -> None:
    model = Model("static")
    rows = RowOptimizer(model, SGDSpec(rows=RowOptions(non_finite="skip")))
    (model(keys()) * float("inf")).sum().backward()
    rows.step()
    assert rows.is_skipped


@pytest.mark.parametrize("kind", KINDS)
def test_protocols_are_found_without_module_getattr(kind: str) -> None:
    """From Python 3.12 on, `isinstance` with a protocol does not see what `nn.Module.__getattr__` gives."""
    model = Model(kind)
    for name in RowParameters.__annotations__:
        assert inspect.getattr_static(model.first, name, None) is not None
