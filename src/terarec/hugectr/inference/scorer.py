# SPDX-License-Identifier: Apache-2.0
"""`Scorer`: a model without tables, scoring batches of requests and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.batch import Batch, Jagged, to_device
from terarec.embedding.lookups import LookupCollection, RowLookup
from terarec.embedding.tables import record_tables
from terarec.export.dense_part import DensePart
from terarec.hugectr.dense_weights import load_dense
from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.inference.arguments import int64_array
from terarec.hugectr.inference.graph import InferenceGraph
from terarec.models import GraphModel
from terarec.models.artifact import without_tables
from terarec.nn.precision import Precision, autocast, mixed_precision
from terarec.serve.executor_file import graph_executors_file, wants_programs

if TYPE_CHECKING:
    from terarec.serve.executors import Programs


class Scorer:
    """A model without tables that scores batches.

    Attributes:
        graph: Description of the model.
        model: The layers.
        programs: Compiled layers; None for eager torch.

    Args:
        graph: Description of the model.
        graph_file: File of the description, next to which the choice of executors is kept.
        dense_model_file: File of the dense weights.
        lookups: Rows of each embedding, in their order.
        device: Device of the layers.
        is_mixed: Whether products are in 16 bits where the device has them.
        statistics: File of BatchNorm statistics; None for the one next to the dense weights.
        executor: "auto", "measure" or a name, as for `terarec.serve.InferenceSession.open`.

    Raises:
        WrongInputError: An executor that is named and cannot compute the model.
        FileCannotOpenError: A file does not exist.
        BrokenFileError: A file of another model.
    """

    def __init__(
        self,
        graph: InferenceGraph,
        graph_file: Path,
        dense_model_file: str,
        lookups: Sequence[RowLookup],
        device: torch.device,
        *,
        is_mixed: bool = False,
        statistics: str = "",
        executor: str = "auto",
    ) -> None:
        self.graph = graph
        self._inputs: dict[str, Tensor] | None = None
        with as_hugectr_errors("CreateInferenceSession"):
            # Tables that are not allocated: rows come from the parameter server.
            with record_tables():
                model = GraphModel(graph.plan.spec)
            assert isinstance(without_tables(model), GraphModel)
            load_dense(model, Path(dense_model_file), statistics=Path(statistics) if statistics else None)
        self.model = model.to(device).eval()
        self._precision: Precision = mixed_precision(device) if is_mixed else "fp32"
        # The tables of a served model are in the order of the graph's embeddings.
        by_name = dict(zip((one.sparse_embedding_name for one in graph.embeddings), lookups, strict=True))
        for module in self.model.modules():
            if isinstance(module, LookupCollection):
                module.connect({table.name: by_name[table.name] for table in module.specs})
        self.programs = self._open_programs(graph_executors_file(graph_file), executor, is_fp32=not is_mixed)

    def _open_programs(self, file: Path, executor: str, *, is_fp32: bool) -> Programs | None:
        with as_hugectr_errors("CreateInferenceSession"):
            # By what was asked: a choice that one processor rejects is an error on all.
            if not wants_programs(executor, file, device=self.model.device, is_fp32=is_fp32):
                return None
            from terarec.serve.executors import open_programs  # which loads torch's exporters

            return open_programs(self._dense_part, file, executor)

    def _dense_part(self) -> DensePart:
        part = DensePart.of_graph(self.model)

        def look_up(batch: Batch) -> list[Tensor]:
            self._inputs = self.model.inputs(batch)
            return [self._inputs[each.name] for each in part.inputs]

        return DensePart(part.module, look_up)

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Return the probabilities float32[B, n] of all labels side by side, in the order of the labels' columns."""
        batch = to_device(batch, self.model.device)
        with as_hugectr_errors("predict"), torch.inference_mode():
            scores = None if self.programs is None else self.programs.scores(batch)
            if scores is None:
                self._inputs = self.model.inputs(batch)
                with autocast(self._precision, self.model.device):
                    predictions = self.model.predictions(self.model.compute(self._inputs))
                scores = torch.cat(list(predictions.values()), dim=1).float().cpu()
        values: NDArray[np.float32] = scores.numpy()
        return values

    def of_labels(self, scores: NDArray[np.float32], label: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the result of `score` and the labels [B, L] of a batch of files, each by label."""
        model = self.model
        truth = torch.split(label, [one.dim for one in model.spec.labels], dim=1)
        labels = dict(zip((one.name for one in model.spec.labels), truth, strict=True))
        logits = model.logits()
        parts = torch.split(torch.from_numpy(scores), [model.shapes[name].dims[-1] for name in logits.values()], dim=1)
        return dict(zip(logits, parts, strict=True)), labels

    def tensors(self) -> Mapping[str, Tensor] | None:
        """Return the tensors of the last batch by name, or None before the first one.

        Those that losses read hold the probabilities in place of the logits.
        """
        if self._inputs is None:
            return None
        # From the vectors of that batch: its keys may have other rows now. The layers are computed again, since
        # executors give the scores alone.
        with torch.inference_mode(), autocast(self._precision, self.model.device):
            tensors = self.model.compute(self._inputs)
            return {**tensors, **self.model.probabilities(tensors)}

    def batch(self, dense_feature: Sequence[float], embeddingcolumns: Sequence[int], row_ptrs: Sequence[int]) -> Batch:
        """Return the batch of a request.

        Args:
            dense_feature: The dense numbers, sample by sample.
            embeddingcolumns: Keys, table by table.
            row_ptrs: For each table the first key of each bag and the end, from 0 on; bags sample by sample.
        """
        inputs = self.graph.inputs
        dense = _floats("dense_feature", dense_feature)
        keys = int64_array("predict", "embeddingcolumns", embeddingcolumns).reshape(-1)
        ends = int64_array("predict", "row_ptrs", row_ptrs).reshape(-1)
        slots = {one.top_name: int(one.slot_num) for one in inputs.data_reader_sparse_param_array}
        tables = [(one.bottom_name, slots[one.bottom_name]) for one in self.graph.embeddings]
        # Each table has B * slots + 1 row_ptrs, so that B follows from their number alone.
        bags, rest = divmod(len(ends) - len(tables), sum(count for _, count in tables) or 1)
        if rest or bags < 0 or len(dense) != bags * inputs.dense_dim:
            expected = " + ".join(f"B * {count} + 1" for _, count in tables)
            raise WrongInputError(
                "predict",
                f"got {len(dense)} dense numbers and {len(ends)} row_ptrs, "
                f"expected B * {inputs.dense_dim} and {expected} of B samples",
            )
        names, parts, lengths = list[str](), list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        first_key = first_end = 0
        for bottom, count in tables:
            mine = ends[first_end : first_end + bags * count + 1]
            first_end += len(mine)
            is_rising = len(mine) > 0 and mine[0] == 0 and bool((np.diff(mine) >= 0).all())
            if not is_rising or first_key + mine[-1] > len(keys):
                raise WrongInputError(
                    "predict",
                    "row_ptrs",
                    f"got {mine.tolist()[:4]}... of input {bottom!r}, expected numbers that rise "
                    f"from 0 to its keys, {len(keys) - first_key} at most",
                    field="row_ptrs",
                )
            of_table = keys[first_key : first_key + mine[-1]]
            first_key += int(mine[-1])
            if f"{bottom}.0" in names:  # another embedding of the same input, which reads the same keys
                continue
            for slot in range(count):
                # Bags are sample by sample in a request, slot by slot in a batch: every `count`-th is of this slot.
                starts, sizes = mine[slot:-1:count], np.diff(mine)[slot::count]
                places = np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
                names.append(f"{bottom}.{slot}")
                parts.append(of_table[places])
                lengths.append(sizes)
        if first_key != len(keys):
            got = f"got {len(keys)} keys, expected {first_key} as row_ptrs say"
            raise WrongInputError("predict", "embeddingcolumns", got, field="embeddingcolumns")
        return Batch(
            dense=torch.from_numpy(dense.reshape(bags, inputs.dense_dim)),
            # A batch has labels; scoring does not read them.
            label=torch.zeros(bags, sum(inputs.label_dims)),
            sparse=Jagged(
                names=tuple(names),
                keys=torch.from_numpy(np.concatenate([*parts, np.zeros(0, np.int64)])),
                offsets=torch.from_numpy(np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()),
            ),
        )

    def with_bases(self, batch: Batch) -> Batch:
        """Return a batch of files with the offsets of slots added to keys, if these start at 0 in each slot."""
        bases = self.graph.key_bases
        sparse, size = batch.sparse, batch.batch_size
        if not bases or not size:
            return batch
        # Keys of a slot are contiguous: every B-th offset is where a slot begins.
        counts = sparse.offsets[::size].diff()
        shifts = torch.tensor([bases.get(name, 0) for name in sparse.names]).repeat_interleave(counts)
        return replace(batch, sparse=replace(sparse, keys=sparse.keys + shifts))


def _floats(name: str, values: Any) -> NDArray[np.float32]:
    try:
        array = np.asarray(values, np.float32).reshape(-1)
    except (ValueError, TypeError, OverflowError):
        raise WrongInputError("predict", name, "expected a list of float32", field=name) from None
    if not np.isfinite(array).all():
        raise WrongInputError("predict", name, "got NaN or infinity, expected finite numbers", field=name)
    return array
