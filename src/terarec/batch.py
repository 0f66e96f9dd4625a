# SPDX-License-Identifier: Apache-2.0
"""`Batch` and `Jagged`, the frozen inputs of a training step, and functions that move and slice them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terarec.errors import ConfigError
from terarec.spec.checks import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Batch", "Jagged", "one_hot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Jagged:
    """Keys of S features for B samples, feature-major.

    The bag of feature s and sample b is ``keys[offsets[s * B + b] : offsets[s * B + b + 1]]``.

    Attributes:
        names: The S features.
        keys: int64[N].
        offsets: int64[S * B + 1], rising from 0 to N. Batches of readers may share them: do not write to them.
        weights: float32[N], factors of the keys' vectors where they are pooled; None for ones.
        ends: Number of the first key of each feature, and N behind them, in host memory; None where only `offsets` have
            them. With them, lookups on a device need not wait for it to read them.
        ready: Event of a device after which all of this is there; None for work of the current stream.
    """

    names: tuple[str, ...]
    keys: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    ends: tuple[int, ...] | None = None
    ready: torch.Event | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        bags = self.offsets.numel() - 1
        if self.keys.dtype != torch.int64 or self.offsets.dtype != torch.int64:
            raise ConfigError("Jagged", f"got keys {self.keys.dtype}, offsets {self.offsets.dtype}, expected int64")
        if self.keys.dim() != 1 or self.offsets.dim() != 1:
            got = f"keys {list(self.keys.shape)}, offsets {list(self.offsets.shape)}"
            raise ConfigError("Jagged", f"got {got}, expected [N] and [S * B + 1]")
        if bags < 0 or (self.names and bags % len(self.names)) or (not self.names and bags):
            raise ConfigError("Jagged", f"got {bags + 1} offsets for {len(self.names)} features, expected S * B + 1")
        weights = self.weights
        if self.offsets.device != self.keys.device or (weights is not None and weights.device != self.keys.device):
            of_weights = "" if weights is None else f" and weights on {weights.device}"
            got = f"keys on {self.keys.device}, offsets on {self.offsets.device}{of_weights}"
            raise ConfigError("Jagged", f"got {got}, expected all of them on one device")
        if weights is not None and (weights.dtype != torch.float32 or weights.shape != self.keys.shape):
            raise ConfigError(
                "Jagged", f"got weights {weights.dtype}{list(weights.shape)}, expected float32{list(self.keys.shape)}"
            )
        ends = self.ends
        if ends is not None and (
            len(ends) != len(self.names) + 1 or ends[0] or ends[-1] != self.keys.numel() or list(ends) != sorted(ends)
        ):
            raise ConfigError(
                "Jagged",
                f"got ends {ends}, expected {len(self.names) + 1} numbers rising from 0 to {self.keys.numel()}",
            )

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return (self.offsets.numel() - 1) // len(self.names) if self.names else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Batch of B samples.

    Attributes:
        dense: float32[B, F].
        label: float32[B, L].
        sparse: The keys of the S features.
        weight: float32[B], how much each sample counts in the loss and in metrics, >= 0; None for ones.
        metadata: Name -> an Arrow array of B values, for columns that no model reads, such as the ids of users. They
            stay in host memory.
    """

    dense: Tensor
    label: Tensor
    sparse: Jagged
    weight: Tensor | None = None
    metadata: Mapping[str, pa.Array] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        weight, size = self.weight, self.label.shape[0]
        if weight is not None:
            if weight.dtype != torch.float32 or weight.shape != (size,):
                raise ConfigError("Batch", f"got weight {weight.dtype}{list(weight.shape)}, expected float32[{size}]")
            if weight.device != self.label.device:
                raise ConfigError(
                    "Batch", f"got weight on {weight.device}, label on {self.label.device}, expected them on one device"
                )
        for name, values in self.metadata.items():
            if len(values) != size:
                raise ConfigError("Batch", f"got {len(values)} values of metadata {name!r}, expected {size}")

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return self.label.shape[0]  # without int(), which would fix the size of an exported program

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on `device`, as `to_device`."""
        return to_device(self, device)


# As pytrees, batches are inputs of `torch.export` and of `torch.func`. These put placeholders in place of tensors,
# so the checks of `Jagged` and `Batch` do not apply.
def _unchecked(kind: type[Any], values: Mapping[str, object]) -> Any:
    instance = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def _jagged_children(jagged: Jagged) -> dict[str, Any]:
    return {"keys": jagged.keys, "offsets": jagged.offsets, "weights": jagged.weights}


def _jagged_of(children: Iterable[Any], names: list[list[str]]) -> Any:
    keys, offsets, weights = children
    there = {"names": tuple(names[0]), "keys": keys, "offsets": offsets, "weights": weights}
    return _unchecked(Jagged, {**there, "ends": None, "ready": None})


# A batch without weights has the same three children as before weights existed, so that programs that were exported
# then still take it. Metadata is left out: it is not a tensor, and as a constant of the structure it would have to
# equal the metadata of the example inputs, which no other batch has.
def _batch_children(batch: Batch) -> dict[str, Any]:
    children = {"dense": batch.dense, "label": batch.label, "sparse": batch.sparse}
    return children if batch.weight is None else {**children, "weight": batch.weight}


def _batch_of(children: Iterable[Any], _: list[Any]) -> Any:
    dense, label, sparse, *weight = children
    return _unchecked(
        Batch,
        {"dense": dense, "label": label, "sparse": sparse, "weight": weight[0] if weight else None, "metadata": {}},
    )


def _register(
    kind: type[Any],
    children: Callable[[Any], dict[str, Any]],
    context: Callable[[Any], list[Any]],
    rebuilt: Callable[[Iterable[Any], list[Any]], Any],
) -> None:
    pytree.register_pytree_node(
        kind,
        lambda jagged: (list(children(jagged).values()), context(jagged)),
        rebuilt,
        flatten_with_keys_fn=lambda jagged: (
            [(pytree.GetAttrKey(name), value) for name, value in children(jagged).items()],
            context(jagged),
        ),
        serialized_type_name=f"terarec.{kind.__name__}",
    )


_register(Jagged, _jagged_children, lambda jagged: [list(jagged.names)], _jagged_of)
_register(Batch, _batch_children, lambda _: [], _batch_of)
# `torch.load` takes no other classes from a file, and an exported program holds its example inputs.
torch.serialization.add_safe_globals([Batch, Jagged])


def one_hot(names: Sequence[str], keys: Tensor) -> Jagged:
    """Return a `Jagged` of one key per feature and sample, from ``keys int64[S, B]``.

    Raises:
        ConfigError: Keys of another shape or type.
    """
    if keys.dim() != 2 or keys.shape[0] != len(names):
        raise ConfigError(
            "one_hot", f"got keys {list(keys.shape)} for {len(names)} features, expected [{len(names)}, B]"
        )
    offsets = torch.arange(keys.numel() + 1, device=keys.device)
    return Jagged(names=tuple(names), keys=keys.reshape(-1), offsets=offsets)


def select(jagged: Jagged, names: Sequence[str]) -> Jagged:
    """Return the features `names` of `jagged`, in that order.

    Raises:
        ConfigError: A name that `jagged` does not hold, or offsets that do not cover the keys.
    """
    # The usual case, in which nothing is copied or checked: lookups check their offsets themselves.
    if tuple(names) == jagged.names:
        return jagged
    batch_size, ends = jagged.batch_size, known_ends(jagged)
    if ends is None:
        _check_covered(jagged)
    position = {name: index for index, name in enumerate(jagged.names)}
    parts: list[slice] = []
    lengths: list[Tensor] = []
    for name in names:
        if name not in position:
            raise ConfigError(f"feature {name!r}", f"not in the batch, which holds {', '.join(jagged.names)}")
        first = position[name] * batch_size
        offsets = jagged.offsets[first : first + batch_size + 1]
        span = slice(int(offsets[0]), int(offsets[-1])) if ends is None else slice(*ends[position[name] :][:2])
        parts.append(span)
        lengths.append(offsets.diff())
    zero = torch.zeros(1, dtype=torch.int64, device=jagged.keys.device)
    offsets = torch.cat([zero, torch.cat(lengths).cumsum(0)]) if lengths else zero
    return _with_parts(jagged, tuple(names), parts, offsets)


def known_ends(jagged: Jagged) -> tuple[int, ...] | None:
    """Return `Jagged.ends`; None while a compiler sees the call, whose graph would hold for these numbers alone."""
    return None if torch.compiler.is_compiling() else jagged.ends


def feature_ends(jagged: Jagged) -> tuple[int, ...]:
    """Return the number of the first key of each feature, and that of all keys behind them.

    Where they are not known they are read from the offsets, for which a device is waited for.
    """
    ends = known_ends(jagged)
    if ends is not None:
        return ends
    size = jagged.batch_size
    # Bags are feature-major: every B-th offset is where the keys of a feature begin.
    return tuple(jagged.offsets[::size].tolist()) if size else (0,) * (len(jagged.names) + 1)


def first_keys(jagged: Jagged, limits: Sequence[int | None]) -> Jagged:
    """Return `jagged` with at most the first ``limits[s]`` keys in each bag of feature s; None keeps all.

    Raises:
        ConfigError: Limits that are not one a feature, or offsets that fall or do not cover the keys.
    """
    if len(limits) != len(jagged.names):
        raise ConfigError("limits", f"got {len(limits)}, expected one for each of {len(jagged.names)} features")
    check_offsets(jagged)
    lengths = jagged.offsets.diff()
    most = max(1, jagged.keys.numel())
    limit = torch.tensor([most if limit is None else limit for limit in limits], device=lengths.device)
    kept = lengths.minimum(limit.repeat_interleave(jagged.batch_size))
    # No bag is too long: nothing has to be copied.
    if torch.equal(kept, lengths):
        return jagged
    in_bag = torch.arange(jagged.keys.numel(), device=lengths.device)
    in_bag -= jagged.offsets[:-1].repeat_interleave(lengths)
    chosen = (in_bag < kept.repeat_interleave(lengths)).nonzero()[:, 0]
    offsets = torch.cat([jagged.offsets[:1], kept.cumsum(0)])
    weights = None if jagged.weights is None else jagged.weights[chosen]
    return Jagged(names=jagged.names, keys=jagged.keys[chosen], offsets=offsets, weights=weights)


def check_offsets(jagged: Jagged) -> None:
    """Raise `ConfigError` unless the offsets of `jagged` rise from 0 to the number of its keys."""
    _check_covered(jagged)
    falls = jagged.offsets[1:] < jagged.offsets[:-1]  # a difference could wrap
    if bool(falls.any()):
        index = int(falls.nonzero()[0]) + 1
        got, num_keys = int(jagged.offsets[index]), jagged.keys.numel()
        raise ConfigError(f"offsets[{index}]", f"got {got}, expected offsets rising from 0 to the {num_keys} keys")


def share_of(count: int, rank: int, size: int) -> slice:
    """Return the part of `count` samples that a rank of `size` ranks takes: equal parts except for one sample."""
    return slice(rank * count // size, (rank + 1) * count // size)


def slice_samples(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples ``start <= b < stop`` of `batch`."""
    sparse = batch.sparse
    size = sparse.batch_size
    num_features = len(sparse.names)
    starts = sparse.offsets[:-1].reshape(num_features, size)[:, start:stop] if num_features else None
    if starts is None:
        sliced = sparse
    else:
        ends = sparse.offsets[1:].reshape(num_features, size)[:, start:stop]
        lengths = (ends - starts).reshape(-1)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        parts = [slice(int(starts[s, 0]), int(ends[s, -1])) for s in range(num_features)] if stop > start else []
        sliced = _with_parts(sparse, sparse.names, parts, offsets)
    return Batch(
        dense=batch.dense[start:stop],
        label=batch.label[start:stop],
        sparse=sliced,
        weight=None if batch.weight is None else batch.weight[start:stop],
        metadata={name: values[start:stop] for name, values in batch.metadata.items()},
    )


def to_device(batch: Batch, device: torch.device | str, *, pin: bool = False, offsets: Tensor | None = None) -> Batch:
    """Return `batch` with its tensors on `device`; metadata stays in host memory.

    Args:
        batch: The batch.
        device: The device.
        pin: Whether to copy from host memory through pinned memory, without waiting for the copy, for a GPU.
        offsets: Offsets of the batch that are on the device already; None to copy them.
    """

    def moved(tensor: Tensor) -> Tensor:
        if not (pin and tensor.is_cpu):
            return tensor.to(device)
        if tensor.dtype == torch.bfloat16:  # which NumPy lacks
            return tensor.pin_memory().to(device, non_blocking=True)
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        # By NumPy, in this thread: torch's copy waits for a team of threads on cores that the reader's threads use.
        pinned.numpy()[...] = tensor.detach().numpy()
        return pinned.to(device, non_blocking=True)

    jagged = batch.sparse
    weights = None if jagged.weights is None else moved(jagged.weights)
    # Read while they are in host memory.
    ends = feature_ends(jagged) if jagged.offsets.is_cpu and torch.device(device).type != "cpu" else jagged.ends
    offsets = moved(jagged.offsets) if offsets is None else offsets
    sparse = Jagged(names=jagged.names, keys=moved(jagged.keys), offsets=offsets, weights=weights, ends=ends)
    return Batch(
        dense=moved(batch.dense),
        label=moved(batch.label),
        sparse=sparse,
        weight=None if batch.weight is None else moved(batch.weight),
        metadata=batch.metadata,
    )


def column(batch: Batch, name: str) -> Tensor | pa.Array:
    """Return the values of a metadata column or the keys int64[B] of a feature with one key a sample.

    Raises:
        ConfigError: No such column, or a feature with more or fewer keys than samples.
    """
    if name in batch.metadata:
        return batch.metadata[name]
    _check_known(name, (*batch.metadata, *batch.sparse.names))
    return feature_keys(batch, name)


def feature_keys(batch: Batch, name: str) -> Tensor:
    """Return the keys int64[B] of a feature with one key a sample, for which models have rows.

    Metadata of the same name holds what a workflow made the keys of, so whoever wants keys reads it by this alone.
    """
    sparse = batch.sparse
    _check_known(name, sparse.names)
    batch_size, first = batch.batch_size, sparse.names.index(name) * batch.batch_size
    offsets = sparse.offsets[first : first + batch_size + 1]
    if not torch.equal(offsets - offsets[0], torch.arange(batch_size + 1, device=offsets.device)):
        raise ConfigError(f"column {name!r}", "got lists of keys, expected a column of one key a sample")
    start = int(offsets[0])
    return sparse.keys[start : start + batch_size]


def column_codes(batch: Batch, name: str) -> Tensor:
    """Return numbers int64[B] that are equal where the values of a column are, as `column` finds it; -1 for null.

    Raises:
        ConfigError: See `column`.
    """
    values = column(batch, name)
    if isinstance(values, Tensor):
        return values
    codes = values.dictionary_encode().indices.fill_null(-1)
    return torch.from_numpy(codes.to_numpy(zero_copy_only=False).astype("int64"))


def is_missing(batch: Batch, name: str, key: int) -> Tensor:
    """Return bool[B]: whether a sample has null in a column, as `column` finds it, or `key` where it has keys.

    Raises:
        ConfigError: See `column`.
    """
    values = column(batch, name)
    if isinstance(values, Tensor):
        return values == key
    return torch.from_numpy(values.is_null().to_numpy(zero_copy_only=False))


def column_digests(batch: Batch, name: str) -> Tensor:
    """Return numbers int64[B] that are equal where the values of a column are, in the batches of all processes.

    Raises:
        ConfigError: See `column`.
    """
    values = column(batch, name)
    if isinstance(values, Tensor):
        return values
    encoded = values.dictionary_encode()
    # Not `hash`, which differs between processes for strings.
    digests = [
        int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
        for value in [*encoded.dictionary.to_pylist(), None]
    ]
    codes = encoded.indices.fill_null(len(digests) - 1).to_numpy(zero_copy_only=False).astype("int64")
    return torch.tensor(digests)[torch.from_numpy(codes)]


def _check_known(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(
            f"column {name!r}", f"not in the batch{did_you_mean(name, known)}, expected one of {', '.join(known)}"
        )


def _check_covered(jagged: Jagged) -> None:
    first, last, num_keys = int(jagged.offsets[0]), int(jagged.offsets[-1]), jagged.keys.numel()
    if first != 0 or last != num_keys:
        raise ConfigError("offsets", f"got {first} to {last}, expected to rise from 0 to the {num_keys} keys")


def _with_parts(jagged: Jagged, names: tuple[str, ...], parts: Sequence[slice], offsets: Tensor) -> Jagged:
    """Concatenate the keys in `parts`, with their weights."""

    def joined(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[part] for part in parts]) if parts else tensor[:0]

    weights = None if jagged.weights is None else joined(jagged.weights)
    is_known = not (jagged.offsets.is_cpu or torch.compiler.is_compiling())
    ends = (0, *accumulate(part.stop - part.start for part in parts)) if is_known else None
    return Jagged(names=names, keys=joined(jagged.keys), offsets=offsets, weights=weights, ends=ends)
