"""The explorer's looks at what a training has not computed itself: averages of its checkpoints, and metrics of them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dshistory.explorer.opened import OpenedHistory
from dshistory.options import Part, Ref, Steps
from dshistory.patterns import Patterns
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.hindsight.attribution import AttributionTable
    from dshistory.hindsight.computed_state import ComputedState
    from dshistory.hindsight.evaluation import EvaluationTable
    from dshistory.hindsight.loss_line import LineTable

__all__ = ["Hindsight"]


class Hindsight(OpenedHistory):
    """The verbs of the room `hindsight`."""

    @verb(surfaces=())
    def evaluate(
        self,
        fn: Callable[[Any], Any],
        *,
        model: Any,
        steps: Steps | None = None,
        name: str | None = "val_loss",
        weights: str = "model",
        workers: int = 1,
        again: bool = False,
        run: str | None = None,
        quiet: bool = False,
    ) -> "EvaluationTable":
        """Compute a metric over old checkpoints: `fn(model)` with the weights and buffers of each in the model.

        Values are stored beside the metrics of the training, where `sql`, `log`, `bisect` and `explore` find them, as
        soon as they are computed; a second call computes only what is missing. The model is in the mode for evaluation,
        and its gradients are None, whenever `fn` gets it; afterwards, also after an error or Ctrl-C, it is as it was,
        bit for bit. It may be a model that is being trained: the session waits for it as for a declared edit.

        Where `fn` raises, or the checkpoint does not fit the model, the row has the error in place of a value, and the
        others go on. Raises SetupError when all of the first three fail, when the training has recorded a metric of
        that name itself, or when values cannot be written; NotFoundError for steps that are gone, with the nearest.

        Args:
            fn: a function of the model that returns a number, or a dict of numbers, each stored as 'name/key'
            model: a torch module with the names and shapes of the training's; other dtypes are converted
            steps: a list of checkpoints, or 'last 10'; default: all of the run and its parents. In a list also steps of
                a redo log, which are made again
            name: the metric's name; None stores nothing
            weights: model, master, or the name of a State Provider that averages them, as ema
            workers: processes that measure at the same time, each with a model of its own; fn and the model are then
                pickled, so both come from modules that can be imported
            again: compute also what was stored; the new value counts
            run: this run and its parents; default: the current run
            quiet: no progress bar
        """
        from dshistory.hindsight import evaluation
        from dshistory.hindsight.chosen_steps import chosen_steps

        refs = chosen_steps(self.history, steps, run=self._named(run), verb="evaluate", redo=True)
        return evaluation.evaluate(
            self.history,
            fn,
            refs,
            name=name,
            model=model,
            weights=weights,
            workers=workers,
            again=again,
            quiet=quiet,
        )

    @verb(surfaces=())
    def losses_between(
        self,
        a: Ref,
        b: Ref,
        loss_fn: Callable[[Any], Any],
        *,
        model: Any,
        t: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
        quiet: bool = False,
    ) -> "LineTable":
        """Measure the loss along the straight line between two checkpoints: a row for each point; `.plot()` draws it.

        Each point is the state that `interpolate(a, b, t)` gives, with its errors. `.barrier` is how far the highest
        point is above the line between the losses of a and b. The model is treated as by `evaluate`.

        Args:
            a: the checkpoint at t = 0
            b: the checkpoint at t = 1
            loss_fn: a function of the model that returns a number, or a dict of numbers
            model: a torch module with the names and shapes of the training's
            t: the points; also below 0 and above 1
            quiet: no progress bar
        """
        from dshistory.hindsight import loss_line

        first, second = self.history.resolve(a), self.history.resolve(b)
        return loss_line.losses_between(self.history, first, second, loss_fn, model=model, t=t, quiet=quiet)

    @verb(surfaces=())
    def attribute(
        self,
        a: Ref,
        b: Ref,
        loss_fn: Callable[[Any], Any],
        *,
        model: Any,
        by: Part = "layer",
        kinds: Patterns = "model",
        quiet: bool = False,
    ) -> "AttributionTable":
        """Attribute the change of a loss between two checkpoints to the updates of single layers.

        One layer's values at a time are exchanged, in both directions: `alone` is what its update does to the loss of
        a, `without` what goes away when b is left without it, and `estimate` the gradient at a times the update. The
        largest mean of the first two comes first. `.unexplained` is the part of the change that no single layer
        explains, since layers act together. It takes two evaluations of the loss for each row, and holds both
        checkpoints in memory. The model is treated as by `evaluate`.

        Args:
            a: the checkpoint before
            b: the checkpoint after
            loss_fn: a function of the model that returns its loss, as a tensor with a gradient for the estimates
            model: a torch module with the names and shapes of the training's
            by: a row for each layer, for each tensor, or for each parameter group of the optimizer
            kinds: model, buffer, or '*' for both; buffers that are left out are in what is not explained
            quiet: no progress bar
        """
        from dshistory.hindsight import attribution

        first, second = self.history.resolve(a), self.history.resolve(b)
        return attribution.attribute(self.history, first, second, loss_fn, model=model, by=by, kinds=kinds, quiet=quiet)

    @verb("average 'last 10' --ema 0.9", "average '10, 20' --weights 1,3", surfaces=("magic",))
    def average(
        self,
        steps: Steps,
        *,
        weights: Sequence[float] | None = None,
        ema: float | None = None,
        kinds: Patterns = "model",
        names: Patterns = "*",
        run: str | None = None,
        quiet: bool = False,
    ) -> "ComputedState":
        """Average checkpoints: equally, with weights, or as an exponential moving average after the fact.

        `model.load_state_dict(avg.state_dict())` puts it into a model, `avg.export(path)` writes it as `export` writes
        a checkpoint, and `avg.evaluate(fn, model=model)` measures it. Computed in float64 and rounded once, to the
        dtype of the last checkpoint, whatever world size or ZeRO stage wrote them; beside the result this takes 8 bytes
        for each element of the largest tensor. With the weights come the persistent buffers. Tensors of whole numbers
        or truth values are those of the last checkpoint (`avg.taken_from_last` names those that differ).

        Raises MismatchError, with the tensor and the checkpoints, when one of them lacks a tensor or has it in another
        shape; SetupError when the weights do not fit, or the result is not finite, with the checkpoint that is not.

        Args:
            steps: a list of checkpoints, the newest last, or 'last 10' for those of the run and its parents
            weights: how much each checkpoint counts, divided by their sum; default: all the same
            ema: a decay as 0.999, in place of weights: the k-th before the last checkpoint counts ema^k, divided by the
                sum of these
            kinds: patterns of kinds: model, master, or a State Provider's; '*' for all
            names: patterns of tensor names
            run: steps mean those of this run and its parents; default: the current run
            quiet: no progress bar
        """
        from dshistory.hindsight import averages
        from dshistory.hindsight.chosen_steps import chosen_steps

        refs = chosen_steps(self.history, steps, run=self._named(run), verb="average")
        return averages.average(self.history, refs, weights=weights, ema=ema, kinds=kinds, names=names, quiet=quiet)

    @verb("interpolate 1200 latest 0.25", surfaces=("magic",))
    def interpolate(
        self, a: Ref, b: Ref, t: float = 0.5, *, kinds: Patterns = "model", names: Patterns = "*", quiet: bool = False
    ) -> "ComputedState":
        """Return the state on the line between two checkpoints, (1 - t) a + t b; beyond them for t < 0 or t > 1.

        A result as that of `average`, with its errors and its rules for buffers and whole numbers, which are those of
        b.

        Args:
            a: the checkpoint at t = 0
            b: the checkpoint at t = 1
            t: the place on the line
            kinds: patterns of kinds: model, master, or a State Provider's; '*' for all
            names: patterns of tensor names
            quiet: no progress bar
        """
        from dshistory.hindsight import averages

        first, second = self.history.resolve(a), self.history.resolve(b)
        return averages.point_between(self.history, first, second, t, kinds=kinds, names=names, quiet=quiet)

    @verb("delta 1200 latest --names '*.mlp.*'", surfaces=("magic",))
    def delta(
        self, a: Ref, b: Ref = "latest", *, kinds: Patterns = "model", names: Patterns = "*", quiet: bool = False
    ) -> "ComputedState":
        """Return the task vector from one checkpoint to another, b - a, computed in float64 and rounded once.

        A result as that of `average`, but without tensors of whole numbers. `interpolate(a, b, t)` adds it to a, t
        times.

        Args:
            a: the checkpoint before
            b: the checkpoint after
            kinds: patterns of kinds: model, master, or a State Provider's; '*' for all
            names: patterns of tensor names
            quiet: no progress bar
        """
        from dshistory.hindsight import averages

        first, second = self.history.resolve(a), self.history.resolve(b)
        return averages.difference(self.history, first, second, kinds=kinds, names=names, quiet=quiet)
