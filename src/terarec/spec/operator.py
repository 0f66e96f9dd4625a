"""The operators of feature workflows as data: a base class, and the registry that the codec reads kinds from.

`terarec.etl.ops` registers terarec's own operators when it is imported; users register theirs with the same decorator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

from terarec.spec.registry import Registry


class OperatorSpec:
    """Step of a workflow: a frozen dataclass whose fields are its JSON form.

    Attributes:
        kind: Name of the operator in JSON.
    """

    kind: ClassVar[str] = ""

    @classmethod
    def members(cls) -> Mapping[str, type[OperatorSpec]]:
        """Return kind -> class of all registered operators."""
        return _OPERATORS

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return ()

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served."""
        return self.reads

    @property
    def side_table(self) -> str | None:
        """Name of the side table that the step is fitted on; None for the training rows."""
        return None


_OPERATORS: Registry[type[OperatorSpec]] = Registry("operator")
OperatorT = TypeVar("OperatorT", bound=type[OperatorSpec])


def register(kind: str | None = None) -> Callable[[OperatorT], OperatorT]:
    """Register an operator class: a decorator above ``@dataclass(frozen=True, kw_only=True)``.

    Args:
        kind: Name in JSON; None names it ``"package.module:Class"``, by which a saved workflow imports it where the
            reader allows its package.

    Raises:
        ConfigError: Another class is registered under the name.
    """

    def decorate(operator: OperatorT) -> OperatorT:
        name = kind or f"{operator.__module__}:{operator.__qualname__}"
        _OPERATORS.add(name, operator)
        operator.kind = name
        return operator

    return decorate
