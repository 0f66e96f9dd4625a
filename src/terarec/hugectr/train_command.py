"""``terarec-hugectr --train``: trains what a training file says, to its end."""

from __future__ import annotations

from terarec.hugectr.model import Model
from terarec.hugectr.session import compiled
from terarec.hugectr.training_json import SolverParser, read_training


def train(path: str) -> None:
    """Train the model of the training file `path`: evaluations, messages, snapshots and the AUC target are the file's.

    Raises:
        FileCannotOpenError: no such file.
        BrokenFileError: no JSON.
        WrongInputError: an unknown kind or key, or a value that is not accepted.
    """
    solver = SolverParser(path)
    model = compiled(solver, read_training(path), kind=_Exporting if solver.export_predictions_prefix else Model)
    model.summary()
    model.fit(snapshot_prefix=solver.snapshot_prefix)


class _Exporting(Model):
    """A model that writes what its evaluations predict, as ``export_predictions_prefix`` asks for."""

    def eval(self, is_first_batch: bool = True, *, eval_batch: int = -1) -> bool:
        is_there = super().eval(is_first_batch, eval_batch=eval_batch)
        if is_there:
            prefix, number = self.solver.export_predictions_prefix, self.last_iteration
            self.export_predictions(f"{prefix}_prediction_{number}", f"{prefix}_label_{number}")
        return is_there
