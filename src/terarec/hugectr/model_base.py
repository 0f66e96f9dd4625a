"""The part of `Model` that the others build on: what was added, what was made of it, and its data."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.hugectr.cadence import release_number
from terarec.hugectr.callbacks import CapacityCheck
from terarec.hugectr.devices import placement
from terarec.hugectr.enums import Tensor_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.evaluation import Evaluation
from terarec.hugectr.log import Log
from terarec.hugectr.network import Network, Plan
from terarec.hugectr.optimizers import optimizer_rule
from terarec.hugectr.readers import DataReader, record_layout, shuffle_seed, source_opener
from terarec.hugectr.summary import summary_lines
from terarec.hugectr.tables.calls import ADD
from terarec.hugectr.tables.data_input import Input
from terarec.hugectr.tables.table import taking
from terarec.kernels.environment import checks_overflow
from terarec.models import GraphModel
from terarec.spec import DenseOptimizerSpec, RecordLayout, TrainingSpec
from terarec.train import Optimizers, Trainer
from terarec.train.allocator import keep_freed_memory
from terarec.train.precision import mixed_precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What `Model.compile` makes.

    Attributes:
        plan: What it was made from.
        model: The graph, an ordinary module.
        trainer: Trains `model`.
        train_reader: Reader of training data.
        eval_reader: Reader of evaluation data.
        evaluation: Metrics since they were last read.
        capacity_check: Called after each iteration.
        dense: Rule of the layers.
        layout: What a sample of the data holds.
        async_layout: What `AsyncParam.layout` gives for the release.
        is_shuffled: Whether the training data is shuffled.
    """

    plan: Plan
    model: GraphModel
    trainer: Trainer
    train_reader: DataReader
    eval_reader: DataReader
    evaluation: Evaluation
    capacity_check: CapacityCheck
    dense: DenseOptimizerSpec
    layout: RecordLayout
    async_layout: tuple[bool, bool]
    is_shuffled: bool


class ModelBase:
    """A model that is built part by part and then compiled.

    Attributes:
        solver: what `CreateSolver` made.
        reader_params: the `DataReaderParams`; of release 3.0 the `Input`, which says the same.
    """

    def __init__(self, solver: Any, reader_params: Any, opt_params: Any, etc_params: Any) -> None:
        self.solver, self.reader_params = solver, reader_params
        self._optimizer, self._etc_params = opt_params, etc_params
        self._network = Network(solver, opt_params)
        self._log = Log(solver.compat_release)
        self._made: Compiled | None = None

    @taking(ADD)
    def add(self, input: Any) -> None:  # noqa: A002 - HugeCTR's name, one of seven
        """Add an `Input`, an embedding or a layer on top of what is there.

        Raises:
            IllegalCallError: after `compile`, before the `Input`, or a second `Input`.
            WrongInputError: a tensor that is not there, or one that is there already; an `Input` that does not tell of
                the data where no `DataReaderParams` does.
        """
        if self._made is not None:
            raise IllegalCallError("add: the model is compiled, expected every add before compile")
        tells_of_data = isinstance(input, Input) and self.reader_params is None
        if tells_of_data and "data_reader_type" not in input.values():
            raise WrongInputError("add: got an Input without data_reader_type, expected DataReaderParams in Model(...)")
        self._network.add(input)
        if tells_of_data:
            self.reader_params = input  # of release 3.0, which tells of the data, too

    def compile(self, loss_names: Sequence[str] = (), loss_weights: Sequence[float] = ()) -> None:
        """Build the model.

        Args:
            loss_names: labels whose losses get weights.
            loss_weights: the weights.

        Raises:
            IllegalCallError: a second time, or without an `Input`.
            WrongInputError: no loss, a label that is not there, shapes or options that do not fit.
        """
        if self._made is not None:
            raise IllegalCallError("compile: the model is compiled, expected one call")
        if len(loss_names) != len(loss_weights):
            raise WrongInputError(f"compile: got {len(loss_names)} loss_names and {len(loss_weights)} loss_weights")
        solver, reader = self.solver, self.reader_params
        plan = self._network.plan(dict(zip(loss_names, map(float, loss_weights), strict=True)))
        with as_hugectr_errors("compile"):
            layout = record_layout(solver, reader, self._network.inputs, adds_offsets=plan.adds_offsets)
        release = release_number(solver.compat_release)
        async_layout = reader.async_param.layout(release, is_one_hot=plan.is_one_hot)
        opener = partial(source_opener, reader, layout, async_layout=async_layout)
        data_reader = partial(DataReader, repeat=solver.repeat_dataset, threads=reader.num_workers)
        seed = shuffle_seed(solver, reader)
        train_reader = data_reader(
            opener(num_samples=reader.num_samples),
            reader.source[0],
            batch_size=solver.batchsize,
            drop_last=solver.drop_incomplete_batch,
            shuffle_seed=seed,
        )
        eval_reader = data_reader(
            opener(num_samples=reader.eval_num_samples),
            reader.eval_source,
            batch_size=solver.batchsize_eval,
            drop_last=False,
        )
        place = placement(solver.vvgpu)
        dense = optimizer_rule(self._optimizer, solver.lr)
        trainer = self._new_trainer(plan, dense, place.device)
        model = trainer.model
        assert isinstance(model, GraphModel)
        self._made = Compiled(
            plan=plan,
            model=model,
            trainer=trainer,
            train_reader=train_reader,
            eval_reader=eval_reader,
            evaluation=Evaluation(solver.metrics_spec, num_labels=sum(label.dim for label in plan.spec.labels)),
            capacity_check=CapacityCheck(model, plan.capacities if checks_overflow() else {}),
            dense=dense,
            layout=layout,
            async_layout=async_layout,
            is_shuffled=seed is not None,
        )
        if place.message:
            self._log(place.message)

    def _new_trainer(self, plan: Plan, dense: DenseOptimizerSpec, device: torch.device) -> Trainer:
        """The model of `plan` with its first weights, its optimizers, and what trains it."""
        keep_freed_memory()
        solver = self.solver
        seed = solver.seed or secrets.randbits(62) + 1
        torch.manual_seed(seed)  # of dropout
        with as_hugectr_errors("compile"):
            model = GraphModel(plan.spec, seed=seed).to(device)
        optimizers = Optimizers.of(model, dense, plan.rules, seed=seed)
        is_mixed = solver.use_mixed_precision
        spec = TrainingSpec(
            batch_size=solver.batchsize,
            seed=seed,
            drop_last=solver.drop_incomplete_batch and not solver.repeat_dataset,
            precision=mixed_precision(device, loss_scale=solver.scaler) if is_mixed else "fp32",
            loss_scale=float(solver.scaler),
        )
        return Trainer(model, spec, optimizers, check_loss=False)  # a display checks it

    @property
    def module(self) -> GraphModel:
        """The model as an ordinary `torch.nn.Module`, to be trained in any loop; its weights are this model's.

        Raises:
            IllegalCallError: before `compile`.
        """
        return self._compiled("module").model

    def summary(self) -> None:
        """Print the inputs, and the layers with their shapes.

        Raises:
            IllegalCallError: before an `Input` was added.
            WrongInputError: shapes or options that do not fit.
        """
        plan = self._network.plan({}) if self._made is None else self._made.plan
        with as_hugectr_errors("summary"):
            lines = summary_lines(plan.spec, self._network.parts)
        for line in lines:
            self._log.bare(line)

    def set_source(self, *args: Any, **kwargs: Any) -> None:
        """``(source, eval_source)``, or ``(source list, keyset list, eval_source)`` with a training cache.

        Raises:
            IllegalCallError: with ``repeat_dataset=True``.
            WrongInputError: other arguments.
        """
        if self.solver.repeat_dataset:
            raise IllegalCallError("set_source: got repeat_dataset=True, expected epochs (repeat_dataset=False)")
        given = _sources(args, kwargs)
        self.reader_params = self.reader_params.with_values(**given)
        made = self._compiled("set_source")
        made.train_reader.name, made.eval_reader.name = self.reader_params.source[0], self.reader_params.eval_source

    def get_data_reader_train(self) -> DataReader:
        """The reader of training data."""
        return self._compiled("get_data_reader_train").train_reader

    def get_data_reader_eval(self) -> DataReader:
        """The reader of evaluation data."""
        return self._compiled("get_data_reader_eval").eval_reader

    def check_out_tensor(self, tensor_name: str, tensor_type: Tensor_t) -> NDArray[np.float32]:
        """A tensor of the last iteration of training or of evaluation, for the whole batch.

        In evaluation, the tensor that a loss reads holds the probabilities.

        Raises:
            WrongInputError: no such tensor.
            IllegalCallError: there was no such iteration yet.
        """
        made = self._compiled("check_out_tensor")
        if not isinstance(tensor_type, Tensor_t):
            raise WrongInputError(f"check_out_tensor: tensor_type: got {tensor_type!r}, expected a member of Tensor_t")
        output = made.trainer.output if tensor_type is Tensor_t.Train else made.evaluation.tensors
        if tensor_name not in made.model.shapes:
            known = ", ".join(made.model.shapes)
            raise WrongInputError(f"check_out_tensor: got {tensor_name!r}, expected one of {known}")
        if not output:
            raise IllegalCallError(f"check_out_tensor: there was no iteration of {tensor_type.name} yet")
        assert isinstance(output, dict)  # of a graph
        tensor: Tensor = output[tensor_name]
        found: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
        return found

    @as_hugectr_errors("export_predictions")
    def export_predictions(self, output_prediction_file_name: str, output_label_file_name: str) -> None:
        """Append predictions and labels of the last evaluation batch to two files, as numbers with spaces between.

        Raises:
            IllegalCallError: nothing was evaluated yet.
        """
        evaluation = self._compiled("export_predictions").evaluation
        if evaluation.batch is None:
            raise IllegalCallError("export_predictions: nothing was evaluated yet, expected a call of eval before")
        predictions = torch.cat(list(evaluation.predictions.values()), dim=1)
        for path, values in (
            (output_prediction_file_name, predictions),
            (output_label_file_name, evaluation.batch.label),
        ):
            with Path(path).open("a", encoding="ascii") as file:
                file.write("".join(f"{value:.6g} " for value in values.flatten().tolist()))

    def _compiled(self, call: str) -> Compiled:
        if self._made is None:
            raise IllegalCallError(f"{call}: the model is not compiled, expected Model.compile() before")
        return self._made


def _sources(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of either form of `Model.set_source` by name, ``source`` and ``keyset`` as lists."""
    names = ("source", "keyset", "eval_source") if len(args) + len(kwargs) == 3 else ("source", "eval_source")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if set(given) != set(names):
        raise WrongInputError(
            f"set_source: got {', '.join(given)}, expected source and eval_source, or source, keyset and eval_source"
        )
    return {
        name: [value] if name != "eval_source" and isinstance(value, str) else value for name, value in given.items()
    }
