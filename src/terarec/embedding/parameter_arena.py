"""`ParameterArena`: the rows of one `torch.nn.Parameter`, as `terarec.optim.RowOptimizer` updates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from terarec.embedding.row_gradient import PendingGradients
from terarec.errors import ConfigError
from terarec.ops.row_update import BagGradient, state_dtype
from terarec.spec.tables import DEFAULT_OPTIMIZER


class ParameterArena:
    """The rows of a weight that stays an ordinary parameter of its module, with the optimizer state beside them.

    Modules that share a weight share its arena (`arena_of`), so that its rows move once a step.

    Attributes:
        parameter: [V, D].
        table_names: none: the parameter's place in the model is its name.
        optimizer: "default", the name of the rule that moves the rows.
        num_defaults: 0, the rows at the begin that belong to no key.
        state: name -> optimizer state; empty until `attach_state`.
        attached: token of the row optimizer that the state belongs to.
        pending: gradients since the last step, while a row optimizer updates the rows; ``.grad`` is then a
            `terarec.embedding.row_gradient.RowGradient`.
    """

    table_names: tuple[str, ...] = ()
    optimizer = DEFAULT_OPTIMIZER
    num_defaults = 0

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.state: dict[str, Tensor] = {}
        self.attached: object = None
        self.pending = PendingGradients(parameter, (self,), [f"a weight {list(parameter.shape)}"])

    @property
    def is_attached(self) -> bool:
        """Whether a row optimizer updates the rows."""
        return self.attached is not None

    @property
    def weights(self) -> Tensor:
        """[V, D], sharing memory with the parameter."""
        return self.parameter.detach()

    @property
    def num_rows(self) -> int:
        """Rows V."""
        return self.parameter.shape[0]

    @property
    def width(self) -> int:
        """Length D of a vector."""
        return self.parameter.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.parameter.device

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Take an optimizer's state, in place of any former optimizer's.

        Args:
            shapes: name and shape of each state tensor, as ``ops.row_update.state_shapes`` gives them.
            fills: state -> its first value, 0 for those that are not named.

        Raises:
            ConfigError: a weight whose rows do not lie one after the other.
        """
        if not self.parameter.is_contiguous():
            shape, strides = list(self.parameter.shape), self.parameter.stride()
            raise ConfigError(f"row optimizer: got a weight {shape} of strides {strides}, expected a contiguous one")
        first = fills or {}
        self.state = {
            name: torch.full(shape, first.get(name, 0), dtype=state_dtype(name), device=self.device)
            for name, shape in shapes
        }

    def take_gradients(self) -> tuple[list[BagGradient], float]:
        """Return the gradients since the last step and the factor that they are to be multiplied by, and forget them.

        Raises:
            ConfigError: the weight has another ``.grad``, which no row optimizer sees, or no row optimizer has it.
        """
        if not self.is_attached:
            raise ConfigError(
                f"row optimizer: a weight {list(self.parameter.shape)} took the place of another, or began to learn, "
                "since the optimizer was made, expected a row optimizer made after that"
            )
        (taken,), factor = self.pending.take()
        return taken, factor

    def follow_device(self) -> None:
        """Take the state to where the parameter is."""
        self.state = {name: held.to(self.device) for name, held in self.state.items()}


_ARENAS: WeakValueDictionary[int, ParameterArena] = WeakValueDictionary()  # by id of a parameter, which its arena holds


def arena_of(parameter: nn.Parameter) -> ParameterArena:
    """The arena of `parameter`: one as long as somebody holds it."""
    arena = _ARENAS.get(id(parameter))
    if arena is None:
        arena = _ARENAS[id(parameter)] = ParameterArena(parameter)
    return arena
