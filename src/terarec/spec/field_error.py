"""The error of one field of a spec."""

from __future__ import annotations

from terarec.errors import ConfigError


class FieldError(ConfigError):
    """A field of a spec, or an argument, is wrong.

    Python users read ``Owner.field: problem``; whoever knows the field under another name, such as a JSON path or an
    option of the command line, puts that name before `problem`.

    Attributes:
        owner: class of the spec; empty for an argument of a function.
        field: name of the field; empty if the spec is wrong as a whole.
        problem: what was received and what is accepted.
    """

    def __init__(self, owner: str, field: str, problem: str) -> None:
        super().__init__(": ".join(filter(None, (".".join(filter(None, (owner, field))), problem))))
        self.owner = owner
        self.field = field
        self.problem = problem
