"""A compiled model with its readers: single iterations of training and of evaluation."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from terarec.batch import Batch
from terarec.hugectr.enums import Tensor_t
from terarec.hugectr.errors import (
    IllegalCallError,
    LossCannotConvergeError,
    OutOfBoundError,
    WrongInputError,
    as_hugectr_errors,
)
from terarec.hugectr.evaluation import Evaluation
from terarec.hugectr.network import Plan
from terarec.hugectr.optimizers import optimizer_rule
from terarec.hugectr.readers import DataReader
from terarec.kernels.environment import checks_overflow
from terarec.models import GraphModel
from terarec.train import GraphTrainer
from terarec.train.allocator import keep_freed_memory
from terarec.train.precision import mixed_precision


class Engine:
    """What `Model.compile` makes.

    Attributes:
        plan: what it was made from.
        model: the graph, an ordinary module.
        trainer: its optimizers.
        train_reader, eval_reader: where the batches come from.
        evaluation: the metrics since they were last asked for.
        loss: of the last iteration.

    Args:
        plan: what to make.
        solver: what `CreateSolver` made.
        optimizer: of the dense layers.
        device: where everything of the model is.
        train_reader, eval_reader: where the batches come from.

    Raises:
        WrongInputError: shapes or options of layers that do not fit.
    """

    def __init__(
        self,
        plan: Plan,
        solver: Any,
        optimizer: Any,
        *,
        device: torch.device,
        train_reader: DataReader,
        eval_reader: DataReader,
    ) -> None:
        self.plan = plan
        keep_freed_memory()
        seed = solver.seed or secrets.randbits(62) + 1
        torch.manual_seed(seed)  # of dropout
        with as_hugectr_errors("compile"):
            self.model = GraphModel(plan.spec, seed=seed).to(device)
        self.trainer = GraphTrainer(
            self.model,
            optimizer_rule(optimizer, solver.lr),
            plan.rules,
            precision=mixed_precision(device, loss_scale=solver.scaler) if solver.use_mixed_precision else "fp32",
            loss_scale=solver.scaler,
        )
        self.train_reader, self.eval_reader = train_reader, eval_reader
        dims = sum(label.dim for label in plan.spec.labels)
        self.evaluation = Evaluation(solver.metrics_spec, num_labels=dims)
        self.loss = torch.zeros(())
        self._evaluated: dict[str, Tensor] = {}
        self._last: tuple[Batch, dict[str, Tensor]] | None = None
        self._checks_overflow = checks_overflow()

    def train(self) -> bool:
        """One iteration; False at the end of the data.

        Raises:
            IllegalCallError: a reader that was not started.
            OutOfBoundError: more keys than a workspace has room for, or a key outside its static table.
            BrokenFileError: a file is damaged.
        """
        batch = self._next(self.train_reader, "train")
        if batch is None:
            return False
        with as_hugectr_errors("train"):
            self.loss = self.trainer.step(batch)
        if self._checks_overflow:
            self._check_capacities()
        return True

    def evaluate(self) -> bool:
        """One batch for the metrics; False at the end of the data.

        Raises:
            IllegalCallError: a reader that was not started.
            LossCannotConvergeError: predictions are NaN.
        """
        batch = self._next(self.eval_reader, "eval")
        if batch is None:
            return False
        self._evaluated = {}  # frees the last batch's tensors before this one's are made
        with as_hugectr_errors("eval"):
            loss, tensors = self.trainer.evaluate(batch)
            predictions = self.model.predictions(tensors)
            _check_numbers(predictions)
            self.evaluation.update(loss, predictions, tensors)
        # HugeCTR's losses leave the probabilities where the logits were.
        logits = {name: predictions[label] for name, label in self.model.logits().items()}
        self._evaluated = {**tensors, **logits}
        self._last = batch, predictions
        return True

    def tensor(self, name: str, which: Tensor_t) -> Tensor:
        """The tensor `name` of the last iteration of training, or of evaluation.

        Raises:
            WrongInputError: no such tensor, or no member of `Tensor_t`.
            IllegalCallError: there was no such iteration yet.
        """
        if not isinstance(which, Tensor_t):
            raise WrongInputError(f"check_out_tensor: tensor_type: got {which!r}, expected a member of Tensor_t")
        tensors: Mapping[str, Tensor] = self.trainer.tensors if which is Tensor_t.Train else self._evaluated
        if name not in self.model.shapes:
            raise WrongInputError(f"check_out_tensor: got {name!r}, expected one of {', '.join(self.model.shapes)}")
        if not tensors:
            raise IllegalCallError(f"check_out_tensor: there was no iteration of {which.name} yet")
        return tensors[name].detach().float().cpu()

    def last_evaluated(self) -> tuple[Tensor, Tensor]:
        """Predictions and labels [B, n] of the last evaluation batch.

        Raises:
            IllegalCallError: nothing was evaluated yet.
        """
        if self._last is None:
            raise IllegalCallError("export_predictions: nothing was evaluated yet, expected a call of eval before")
        batch, predictions = self._last
        return torch.cat(list(predictions.values()), dim=1).cpu(), batch.label

    def _next(self, reader: DataReader, call: str) -> Batch | None:
        if not reader.is_started():
            raise IllegalCallError(f"{call}: the data reader was not started, expected start_data_reading() before")
        return reader.next_batch()

    def _check_capacities(self) -> None:
        for name, most in self.plan.capacities.items():
            count = sum(len(table) for table in self.model.collection(name).tables.values())
            if count > most:
                raise OutOfBoundError(
                    f"SparseEmbedding {name!r}: holds {count:,} keys, expected at most {most:,}, for which its "
                    "workspace or sizes give room; give it more (HUGECTR_DISABLE_OVERFLOW_CHECK=1 turns this check off)"
                )


def _check_numbers(predictions: Mapping[str, Tensor]) -> None:
    for label, scores in predictions.items():
        missing = int(scores.isnan().any(1).sum())
        if missing:
            raise LossCannotConvergeError(
                f"eval: the predictions of {label!r} are NaN for {missing} of {len(scores)} samples, expected numbers: "
                "the training diverged, or the data holds NaN; a lower learning rate may help"
            )
