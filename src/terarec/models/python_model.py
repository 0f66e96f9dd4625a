"""Models of the user's own code."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from terarec.errors import ConfigError
from terarec.spec import DatasetSpec, PythonModelSpec
from terarec.spec.named_code import check_allowed, imported


def python_model(
    spec: PythonModelSpec,
    dataset: DatasetSpec,
    *,
    num_outputs: int | None = None,
    seed: int = 0,
    allow_import: Sequence[str] = (),
) -> nn.Module:
    """Import the factory of `spec` and call it.

    Args:
        spec: The factory and its options.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the first weights.
        allow_import: Packages whose code may be imported.

    Raises:
        ConfigError: A package that is not allowed, a factory that is not there, or one that returns no module.
    """
    check_allowed(spec.factory, allow_import, f"model: factory {spec.factory!r}")
    factory = imported(spec.factory)
    outputs = len(dataset.labels) if num_outputs is None else num_outputs
    model = factory(dataset, num_outputs=outputs, seed=seed, **spec.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: factory {spec.factory!r}: returned {type(model).__name__}, expected a torch.nn.Module"
        )
    return model
