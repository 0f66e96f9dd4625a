"""The part of `Model` that the others build on: what was added, and what was made of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from terarec.hugectr.cadence import release_number
from terarec.hugectr.devices import placement
from terarec.hugectr.engine import Engine
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.log import Log
from terarec.hugectr.network import Network
from terarec.hugectr.readers import DataReader, record_layout, shuffle_seed, source_opener
from terarec.hugectr.summary import summary_lines
from terarec.hugectr.tables.calls import ADD
from terarec.hugectr.tables.data_input import Input
from terarec.hugectr.tables.table import taking
from terarec.models import GraphModel


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
        self._engine: Engine | None = None

    @taking(ADD)
    def add(self, input: Any) -> None:  # noqa: A002 - HugeCTR's name, one of seven
        """Add an `Input`, an embedding or a layer on top of what is there.

        Raises:
            IllegalCallError: after `compile`, before the `Input`, or a second `Input`.
            WrongInputError: a tensor that is not there, or one that is there already; an `Input` that does not tell of
                the data where no `DataReaderParams` does.
        """
        if self._engine is not None:
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
        if self._engine is not None:
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
        train_reader = data_reader(
            opener(num_samples=reader.num_samples),
            reader.source[0],
            batch_size=solver.batchsize,
            drop_last=solver.drop_incomplete_batch,
            shuffle_seed=shuffle_seed(solver, reader),
        )
        eval_reader = data_reader(
            opener(num_samples=reader.eval_num_samples),
            reader.eval_source,
            batch_size=solver.batchsize_eval,
            drop_last=False,
        )
        place = placement(solver.vvgpu)
        self._engine = Engine(
            plan,
            solver,
            self._optimizer,
            device=place.device,
            train_reader=train_reader,
            eval_reader=eval_reader,
        )
        if place.message:
            self._log(place.message)

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
        plan = self._network.plan({}) if self._engine is None else self._engine.plan
        with as_hugectr_errors("summary"):
            lines = summary_lines(plan.spec, self._network.parts)
        for line in lines:
            self._log.bare(line)

    def _compiled(self, call: str) -> Engine:
        if self._engine is None:
            raise IllegalCallError(f"{call}: the model is not compiled, expected Model.compile() before")
        return self._engine
