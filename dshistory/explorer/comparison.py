"""The explorer's looks at one or two checkpoints: what changed, and single tensors."""

from typing import TYPE_CHECKING

from catalog.errors import SetupError
from dshistory.explorer.opened import OpenedHistory
from dshistory.options import Grouping, Ref
from dshistory.patterns import Patterns
from dshistory.registry import verb

if TYPE_CHECKING:
    import torch

    from dshistory.comparison.diff import DiffTable

__all__ = ["Comparison"]


class Comparison(OpenedHistory):
    """The verbs of the room `comparison`."""

    @verb("diff 1200 1250", "diff 1200 latest --names '*.mlp.*' --kinds '*'")
    def diff(
        self,
        a: Ref,
        b: Ref = "latest",
        *,
        kinds: Patterns = "model",
        names: Patterns = "*",
        by: Grouping = "tensor",
        metrics: Patterns | None = None,
        exact: bool = False,
        tensor: str | None = None,
        axis: int = 0,
        parts: int | None = None,
        quiet: bool = False,
    ) -> "DiffTable":
        """Compare two checkpoints: a row for each logical tensor, the most unusual movement first.

        times_usual is how many times as far as its peers, the tensors of its name in all layers, a tensor moved,
        relative to its norm, or to that of a tensor of typical size where that is larger: neither a bias that was born
        at zero nor the noise in one that no gradient reaches comes first. A tensor without peers (an embedding, a head)
        is measured against the peers that moved most.
        Computed in float64, whatever world size or ZeRO stage wrote the two, in bounded memory; tensors with equal
        checksums are not read. When more than 256 MiB would have to be read, tensors with sketches are estimated from
        those unless `exact` is given; the column bound then gives the error bound. Where values are not finite, norms
        and changes cover the elements that are finite in both checkpoints. A step that was not captured but is in a
        redo log is made again first.

        Args:
            a: the checkpoint before
            b: the checkpoint after
            kinds: patterns of kinds: model, buffer, master, exp_avg, ...; '*' for all
            names: patterns of tensor names, as '*.mlp.*'
            by: a row for each tensor, or for each layer or kind, with norms over its tensors as one long vector
            metrics: only these columns, as cosine or 'norm_*', with the rows ordered by the first of them
            exact: read the tensors, however large
            tensor: compare only this tensor, of a single kind: a row for each index along an axis
            axis: the axis of that tensor: 0 for its rows
            parts: cut the axis into this many equal parts, as for the heads of an attention
            quiet: no progress bar
        """
        from dshistory.comparison import diff, drilldown

        (before, after), rebuilt = self._steps(a, b)
        if tensor is not None:
            if not isinstance(kinds, str):
                raise SetupError(f"diff: tensor= needs a single kind, not {kinds}")
            if by != "tensor":
                raise SetupError(f"diff: by={by!r} groups tensors, and tensor={tensor!r} is one: leave one of them out")
            table = drilldown.drill_down(
                self.history,
                before,
                after,
                name=tensor,
                kind=kinds,
                axis=axis,
                parts=parts,
                quiet=quiet,
                rebuilt=rebuilt,
            )
        else:
            table = diff.diff(
                self.history,
                before,
                after,
                kinds=kinds,
                names=names,
                by=by,
                exact=exact,
                quiet=quiet,
                rebuilt=rebuilt,
            )
        return table if metrics is None else table.only(metrics)

    @verb("tensor lm_head.weight 1200", "tensor lm_head.weight 1200 --state exp_avg")
    def tensor(self, name: str, step: Ref = "latest", *, state: str = "model") -> "torch.Tensor":
        """Read one logical tensor of one checkpoint: only its own bytes, verified against their checksums. Of a step
        that was not captured but is in a redo log, it is made again.

        Args:
            name: the tensor's name, or an alias of it
            step: the checkpoint
            state: model, buffer, master, exp_avg, ...
        """
        from dshistory.comparison import diff

        (ref,), rebuilt = self._steps(step)
        return diff.tensor(self.history, ref, name=name, kind=state, rebuilt=rebuilt)
