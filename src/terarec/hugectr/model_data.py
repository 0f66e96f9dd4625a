"""The part of `Model` that says where data comes from and shows what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.hugectr.enums import Tensor_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.model_base import ModelBase
from terarec.hugectr.readers import DataReader


class ModelData(ModelBase):
    """Sources, readers, and what the last batches gave."""

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
        engine = self._compiled("set_source")
        engine.train_reader.name, engine.eval_reader.name = self.reader_params.source[0], self.reader_params.eval_source

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
        return self._compiled("check_out_tensor").tensor(tensor_name, tensor_type).numpy()

    @as_hugectr_errors("export_predictions")
    def export_predictions(self, output_prediction_file_name: str, output_label_file_name: str) -> None:
        """Append predictions and labels of the last evaluation batch to two files, as numbers with spaces between.

        Raises:
            IllegalCallError: nothing was evaluated yet.
        """
        predictions, labels = self._compiled("export_predictions").last_evaluated()
        for path, values in ((output_prediction_file_name, predictions), (output_label_file_name, labels)):
            with Path(path).open("a", encoding="ascii") as file:
                file.write("".join(f"{value:.6g} " for value in values.flatten().tolist()))


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
