"""The engine of serving: a trained model and its workflow, from raw values to probabilities. Knows no transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from terarec.batch import Batch, Jagged, to_device
from terarec.etl.workflow import EncodedRecords, RawValues, Workflow, workflow_of
from terarec.models.artifact import DATASET_DIRECTORY, load_model
from terarec.models.contract import device_of, logits_of, score_names
from terarec.nn.objectives import build_objective
from terarec.serve.inputs import input_columns
from terarec.spec import DatasetSpec, RunSpec


class InferenceSession:
    """Scores raw records with a trained model. Thread-safe; holds no optimizer and no optimizer state.

    Attributes:
        run: how the model was trained.
        step: training steps behind its weights.
        workflow: encodes raw values as they were for training.
        inputs: the raw columns that a record has, all of which `predict` needs.
        labels: Names of the L labels.
        device: Where the model is.

    Example:
        >>> session = InferenceSession.open(Path("RUN"))
        >>> session.predict({"I1": [3, None], ..., "C26": ["a9d771cd", ""]})  # float32[2, 1]
    """

    def __init__(self, model: nn.Module, workflow: Workflow, run: RunSpec, dataset: DatasetSpec, *, step: int) -> None:
        self._model = model.eval()
        self.device = device_of(model)
        self._objective = build_objective(run.objective)
        self.workflow = workflow
        self._features = tuple(column.name for column in dataset.categorical)
        made = [column.name for column in workflow.dataset_spec().categorical]
        self._places = [made.index(name) for name in self._features]  # a workflow gives keys after ids
        self.run = run
        self.step = step
        self.inputs = input_columns(workflow)
        self.labels = tuple(column.name for column in dataset.labels)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the C scores: ``score`` for one, else ``score_<label>`` or ``score_<class>``."""
        return score_names(self.labels, self._objective.num_outputs(len(self.labels)))

    @classmethod
    def open(
        cls,
        run_dir: Path,
        checkpoint: int | str | None = None,
        *,
        device: torch.device | None = None,
        allow_import: Sequence[str] = (),
    ) -> InferenceSession:
        """Load a checkpoint of a run, and its workflow.

        Args:
            run_dir: what training wrote.
            checkpoint: "last", "best" or a step; None for the last one, or the best one of a run with patience.
            device: Where the model is to be; the CPU by default.
            allow_import: Packages whose functions the workflow, and whose code the model may name.

        Raises:
            ConfigError: the workflow names a function that is not allowed, or the run holds no such checkpoint.
            DataNotFoundError: `run_dir` is no run, or holds no whole checkpoint.
            FormatError: a file of it is damaged.
            StorageError: not enough memory for the tables.
        """
        model, run, dataset, step = load_model(run_dir, checkpoint, device=device, allow_import=allow_import)
        workflow = workflow_of(run_dir / DATASET_DIRECTORY, allow_import=allow_import)
        return cls(model, workflow, run, dataset, step=step)

    def predict(self, columns: Mapping[str, RawValues]) -> npt.NDArray[np.float32]:
        """Score B records.

        Args:
            columns: each of `inputs` by name -> its B raw values, or lists of them where hotness is not 1, encoded here
                as they were for training; None, null or "" is missing.

        Returns:
            float32[B, C]: the scores of the run's objective, such as the probability of each label.

        Raises:
            ConfigError: a column that is missing, unknown or of another length than the first, or a value that
                the workflow cannot read, with its column and row.
        """
        return self.score(self.workflow.encode(columns))

    def score(self, records: EncodedRecords) -> npt.NDArray[np.float32]:
        """Score B records that `workflow` has encoded; as `predict`."""
        batch = to_device(self._batch(records), self.device)
        precision = self.run.training.precision
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        with torch.inference_mode(), torch.autocast(self.device.type, dtype=dtype, enabled=precision != "fp32"):
            output = self._model(batch)
        scores: npt.NDArray[np.float32] = self._objective.scores(logits_of(self._model, output)).cpu().numpy()
        return scores

    def _batch(self, records: EncodedRecords) -> Batch:
        """`records` as the model reads a batch; labels, which no model looks at, are zeros."""
        num_records = len(records.dense)
        keys, lengths = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
        for column in (records.keys[place] for place in self._places):
            keys.append(column[0] if isinstance(column, tuple) else column)
            lengths.append(np.diff(column[1]) if isinstance(column, tuple) else np.ones(num_records, dtype=np.int64))
        return Batch(
            dense=torch.from_numpy(records.dense),
            label=torch.zeros(num_records, len(self.labels)),
            sparse=Jagged(
                names=self._features,
                keys=torch.from_numpy(np.concatenate(keys)),
                offsets=torch.from_numpy(np.concatenate(lengths).cumsum()),
            ),
        )
