# SPDX-License-Identifier: Apache-2.0
"""Models of targets and the histories that share their tables: their common part, DIN, BST, HSTURanker and DIEN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from typing_extensions import override

from terarec.batch import Batch, Jagged, select
from terarec.embedding import EmbeddingCollection, PaddedSequences
from terarec.embedding.output import PaddedKeys
from terarec.errors import ConfigError
from terarec.models.columns import (
    at_places,
    categorical_column,
    check_history,
    check_times,
    join,
    mlp,
    one_key_bags,
    own_tables,
    owner,
    padded_keys_of,
    samples_of_keys,
    without_keys,
)
from terarec.nn import MLP
from terarec.nn.attention import HistoryPooling, TargetAttention
from terarec.nn.history_pooling import HistoryTransducer, HistoryTransformer, InterestEvolution
from terarec.nn.initializers import dense_distributions
from terarec.nn.negatives import Candidates, Owned, Sampler
from terarec.nn.sequences import last_positions
from terarec.ragged import Ragged
from terarec.spec import BSTSpec, DatasetSpec, DIENSpec, DINSpec, FeatureSpec, HSTURankerSpec
from terarec.spec.histories import HistoriesSpec


class TargetVectors(NamedTuple):
    """Vectors of a target and its history.

    Attributes:
        target: float[B, D].
        history: The vectors of the histories, padded in an exported program.
    """

    target: Tensor
    history: Ragged[Tensor, Tensor] | PaddedSequences


class HistoryModel(nn.Module):
    """Histories, each reduced to a vector by a module of its own that sees its target, and an MLP over all columns.

    A history shares its target's table, and so its ids. The columns that are no history are pooled as in the other
    models.

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        new_pooling: Function that makes the module of a history, with initial weights from a generator.
        kind: Kind of the model.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
        lists: Columns with tables of their own that are not pooled.
        unread: Columns that are not looked up.

    Raises:
        ConfigError: A column that is not there, a target of several keys a sample, or a history of other ids.
    """

    def __init__(
        self,
        spec: HistoriesSpec,
        dataset: DatasetSpec,
        new_pooling: Callable[[torch.Generator], HistoryPooling],
        *,
        kind: str,
        num_outputs: int | None = None,
        seed: int = 0,
        lists: Sequence[str] = (),
        unread: Sequence[str] = (),
    ) -> None:
        super().__init__()
        for index, pair in enumerate(spec.sequences):
            check_history(kind, f"sequences[{index}]", pair.target, pair.history, dataset)
        columns = {column.name: column for column in dataset.categorical}
        target_of = {pair.history: pair.target for pair in spec.sequences}
        others = {*target_of, *lists, *unread}
        plain = [column for column in dataset.categorical if column.name not in others]
        self.embedding = EmbeddingCollection(
            own_tables([*plain, *(columns[name] for name in lists)], spec.tables, width=spec.width),
            [
                *(FeatureSpec(name=c.name, table=owner(c.name, spec.tables), pooling=spec.pooling) for c in plain),
                *(
                    FeatureSpec(name=name, table=owner(target, spec.tables), pooling="none")
                    for name, target in (*target_of.items(), *zip(lists, lists, strict=True))
                ),
            ],
            seed=seed,
        )
        names = [column.name for column in plain]
        self._places = [(pair.history, names.index(pair.target)) for pair in spec.sequences]
        # A missing value has an id of its own, to which attention should give no weight.
        self._missing = {name: dataset.missing_key(name) for name in target_of} if spec.mask_missing else {}
        self.width = spec.width
        generator = torch.Generator().manual_seed(seed)
        poolings = [new_pooling(generator) for _ in spec.sequences]
        self.attention = nn.ModuleList(poolings)
        in_width = len(dataset.dense) + spec.width * len(plain) + sum(pooling.out_width for pooling in poolings)
        outputs = num_outputs or len(dataset.labels)
        self.deep = mlp(spec, in_width, spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        pooled, histories = self.look_up(batch)
        parts = []
        for pooling, (target, vectors) in zip(self.attention, histories, strict=True):
            assert isinstance(pooling, HistoryPooling)
            if isinstance(vectors, PaddedSequences):  # in an exported program
                parts.append(pooling.padded(target, vectors.values, vectors.mask))
            else:
                parts.append(pooling(target, vectors.values, vectors.offsets))
        return self.logits(batch, pooled, parts)

    def look_up(self, batch: Batch) -> tuple[Tensor, list[TargetVectors]]:
        """Return the pooled vectors float[B, S * D] of the plain columns, and those of targets and histories."""
        pooled, sequences = self.embedding(self.without_missing(batch))
        # Views: pooled vectors lie side by side in the order of the plain columns.
        targets = [pooled[:, place * self.width : (place + 1) * self.width] for _, place in self._places]
        names = [history for history, _ in self._places]
        return pooled, [TargetVectors(target, sequences[name]) for target, name in zip(targets, names, strict=True)]

    def without_missing(self, batch: Batch) -> Jagged:
        """Return the keys of a batch without those that count as padding."""
        return cast(Jagged, without_keys(batch.sparse, self._missing))

    def logits(self, batch: Batch, pooled: Tensor, histories: Sequence[Tensor]) -> Tensor:
        """Return the logits float[B, C] for the plain columns and the reduced histories float[B, out_width]."""
        logits: Tensor = self.deep(join(batch.dense, torch.cat([pooled, *histories], dim=1)))
        return logits


class DIN(HistoryModel):
    """Histories pooled by attention to a target, and an MLP over them and all other columns.

    Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978).

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `HistoryModel`.
    """

    def __init__(self, spec: DINSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        def new_attention(generator: torch.Generator) -> TargetAttention:
            mlp = MLP(
                4 * spec.width,
                (*spec.attention, 1),
                generator=generator,
                initial=dense_distributions(spec.init),
                activation=spec.attention_activation,
            )
            return TargetAttention(mlp, spec.width, softmax=spec.softmax)

        super().__init__(spec, dataset, new_attention, kind=spec.kind, num_outputs=num_outputs, seed=seed)


class BST(HistoryModel):
    """A transformer over each history with its target behind it, and an MLP over its output and all other columns.

    Behavior Sequence Transformer (Chen et al. 2019, arXiv 1905.06874).

    Arguments and errors are those of `HistoryModel`.
    """

    def __init__(self, spec: BSTSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        def new_transformer(generator: torch.Generator) -> HistoryTransformer:
            return HistoryTransformer(
                spec.max_length,
                spec.width,
                layers=spec.layers,
                heads=spec.heads,
                inner=spec.inner,
                output=spec.output,
                rate=spec.dropout,
                generator=generator,
            )

        super().__init__(spec, dataset, new_transformer, kind=spec.kind, num_outputs=num_outputs, seed=seed)


class HSTURanker(HistoryModel):
    """HSTU over a history, what the user did with its items, and the target; and an MLP over its output and all others.

    Zhai et al. 2024, arXiv 2402.17152, section 2.2.

    Attributes:
        beside: Column of actions or times -> that of the history, whose lists have a value for each item.
        key_columns: Columns of times, whose keys are in no table.

    Arguments and errors are those of `HistoryModel`, and for columns of actions and times that are not there.
    """

    def __init__(
        self, spec: HSTURankerSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        if spec.actions is not None:
            categorical_column(spec.kind, "actions", spec.actions, dataset, one_key=False)
        for role, name in (("times", spec.times), ("time", spec.time)):
            if name is not None:
                check_times(spec.kind, role, name, dataset, one_key=role == "time")

        def new_transducer(generator: torch.Generator) -> HistoryTransducer:
            return HistoryTransducer(
                spec.max_length,
                spec.width,
                layers=spec.layers,
                heads=spec.heads,
                rate=spec.dropout,
                time_buckets=0 if spec.times is None else spec.time_buckets,
                has_actions=spec.actions is not None,
                generator=generator,
            )

        super().__init__(
            spec,
            dataset,
            new_transducer,
            kind=spec.kind,
            num_outputs=num_outputs,
            seed=seed,
            lists=[spec.actions] if spec.actions else [],
            unread=[name for name in (spec.times, spec.time) if name],
        )
        self.actions, self.times, self.time = spec.actions, spec.times, spec.time
        self.key_columns = tuple(name for name in (spec.times, spec.time) if name)
        self.beside = {name: spec.sequences[0].history for name in (spec.actions, spec.times) if name}

    @override
    def without_missing(self, batch: Batch) -> Jagged:
        beside = {self._places[0][0]: list(self.beside)} if self.beside else None
        return cast(Jagged, without_keys(batch.sparse, self._missing, beside))

    @override
    def forward(self, batch: Batch) -> Tensor:
        jagged, (name, place) = self.without_missing(batch), self._places[0]
        pooled, sequences = self.embedding(jagged)
        target, history = pooled[:, place * self.width : (place + 1) * self.width], sequences[name]
        pooling = self.attention[0]
        assert isinstance(pooling, HistoryTransducer)
        if isinstance(history, PaddedSequences):  # in an exported program
            mask = history.mask
            of_items = at_places(sequences[self.actions].values, mask) if self.actions else None
            times = None
            if self.times is not None and self.time is not None:
                padded = cast(PaddedKeys, jagged)
                of_lists, of_target = (padded_keys_of("hstu_ranker", one, padded) for one in (self.times, self.time))
                times = at_places(of_lists, mask), of_target[:, 0]
            reduced = pooling.padded(target, history.values, mask, of_items, times)
            return self.logits(batch, pooled, [reduced])
        actions = None if self.actions is None else sequences[self.actions].values
        reduced = pooling(target, history.values, history.offsets, actions, self._times_of(jagged))
        return self.logits(batch, pooled, [reduced])

    def _times_of(self, jagged: Jagged) -> tuple[Tensor, Tensor] | None:
        """Return the times of the items int64[n] and of the targets int64[B]; None without."""
        if self.times is None or self.time is None:
            return None
        of_items, of_target = (select(jagged, (name,)) for name in (self.times, self.time))
        wrong = of_target.offsets.diff() != 1
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            got = int(of_target.offsets.diff()[row])
            raise ConfigError(f"column {self.time!r}, row {row}", f"got {got} keys, expected one")
        return of_items.keys, of_target.keys


class Interests(NamedTuple):
    """Output of `DIEN` in training.

    Attributes:
        logits: float[B, C].
        auxiliary: float32[B], the auxiliary loss of each sample.
    """

    logits: Tensor
    auxiliary: Tensor


class DIEN(HistoryModel):
    """Two recurrent layers over each history, the second gated by the target, and an MLP over all columns.

    Deep Interest Evolution Network (Zhou et al. 2019, arXiv 1809.03672). In training each state of the first layer
    predicts the next item of its history by its dot with the item's vector (eq. 3 and 4 of the paper).

    Arguments and errors are those of `HistoryModel`, and for negatives that the columns cannot give.
    """

    def __init__(self, spec: DIENSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__(
            spec,
            dataset,
            lambda generator: InterestEvolution(spec.max_length, spec.width, generator=generator),
            kind=spec.kind,
            num_outputs=num_outputs,
            seed=seed,
        )
        self.spec = spec
        self.histories = [pair.history for pair in spec.sequences]
        columns = {column.name: column for column in dataset.categorical}
        self._columns = [(pair.target, columns[pair.history]) for pair in spec.sequences]
        self.samplers = nn.ModuleList()
        if spec.auxiliary:
            self.samplers.extend(
                Sampler(spec.negatives, dataset.first_id(column.name), column.rows, where=f"{spec.kind}: negatives")
                for _, column in self._columns
            )

    def forward(self, batch: Batch) -> Tensor | Interests:  # type: ignore[override]
        """Return the logits float[B, C], in training with the auxiliary loss."""
        if not self.training or not self.samplers or torch.compiler.is_exporting():
            return super().forward(batch)
        spec, jagged = self.spec, self.without_missing(batch)
        pooled, histories = self.look_up(batch)
        reduced, losses = [], batch.label.new_zeros(batch.batch_size)
        for place, (target, vectors) in enumerate(histories):
            assert not isinstance(vectors, PaddedSequences)
            pooling = self.attention[place]
            assert isinstance(pooling, InterestEvolution)
            recent = Ragged(*last_positions(vectors.values, vectors.offsets, spec.max_length))
            states = pooling.states(*recent)
            reduced.append(pooling.evolved(target, states, recent.offsets))
            losses = losses + self._next_items(place, jagged, recent, states)
        return Interests(self.logits(batch, pooled, reduced), losses)

    def output_logits(self, output: Tensor | Interests) -> Tensor:
        """Return the logits float[B, C]."""
        return output.logits if isinstance(output, Interests) else output

    def auxiliary_loss(self, output: Tensor | Interests, batch: Batch) -> Tensor:
        """Return `auxiliary` times the mean over the samples, a scalar; 0 in evaluation."""
        if not isinstance(output, Interests):
            return torch.zeros((), device=output.device)
        losses = output.auxiliary if batch.weight is None else output.auxiliary * batch.weight
        return losses.mean() * self.spec.auxiliary

    def _next_items(self, place: int, jagged: Jagged, vectors: Ragged[Tensor, Tensor], states: Tensor) -> Tensor:
        """Return for each sample the mean over the positions of its history that have a next one: float32[B]."""
        values, offsets = vectors.values, vectors.offsets
        size, total = jagged.batch_size, values.shape[0]
        samples = torch.repeat_interleave(offsets.diff(), output_size=total)
        is_last = torch.zeros(total + 1, dtype=torch.bool, device=values.device)
        is_last[offsets[1:] - 1] = True  # of an empty history that of the one before, or no position
        before = (~is_last[:total]).nonzero().flatten()
        of_next, owners = states[before].float(), samples[before]
        negatives, is_valid = self._drawn(place, jagged, owners, of_next)
        own = (of_next * values[before + 1].float()).sum(1)
        others = (of_next.unsqueeze(1) * negatives.float()).sum(2)
        losses = softplus(-own) + (softplus(others) * is_valid).sum(1) / is_valid.sum(1).clamp_min(1)
        counts = torch.zeros(size, device=losses.device).index_add(0, owners, torch.ones_like(losses))
        return torch.zeros_like(counts).index_add(0, owners, losses) / counts.clamp_min(1)

    def _drawn(self, place: int, jagged: Jagged, owners: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors float[n, count, D] of items that the samples `owners` do not have, and which of them count."""
        sampler, (target, column) = self.samplers[place], self._columns[place]
        assert isinstance(sampler, Sampler)
        pair = select(jagged, (column.name, target))
        keys = pair.keys
        items = keys[: len(keys) - jagged.batch_size]
        sampler.observe(items)
        items = sampler.items_of_batch(items)
        distinct, stride = None, column.rows
        if stride is None:
            # Any keys are numbered, as samplers draw among numbers.
            distinct, numbers = torch.unique(torch.cat([keys, items]), return_inverse=True)
            keys, items, stride = numbers[: len(keys)], numbers[len(keys) :], len(distinct)
        count = self.spec.negatives.count
        many = owners.repeat_interleave(count)

        def score(keys: Tensor) -> Tensor:
            vectors = self._vectors_of(column.name, jagged, keys.flatten()).view(*keys.shape, self.width)
            return (states.repeat_interleave(count, dim=0).unsqueeze(1) * vectors).sum(2)

        drawn, is_valid = sampler.draw(
            many,
            [Owned(samples_of_keys(pair), keys, stride)],
            Candidates(batch=items, score=score),
        )
        if distinct is not None:
            drawn = distinct[drawn]
        values = self._vectors_of(column.name, jagged, drawn).view(len(owners), count, self.width)
        return values, is_valid.view(len(owners), count)

    def _vectors_of(self, history: str, jagged: Jagged, keys: Tensor) -> Tensor:
        """Look keys up in the table of a history: int64[n] -> float[n, D]."""
        values: Tensor = self.embedding(one_key_bags(jagged.names, history, keys)).sequences[history].values
        return values
