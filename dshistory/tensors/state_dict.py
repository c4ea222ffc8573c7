"""The tensors of a checkpoint as `restore` gives them: a dict that says what it has instead of printing it."""

from typing import TYPE_CHECKING

import pyarrow as pa

from dshistory.display.report import Report
from dshistory.display.table import Table

if TYPE_CHECKING:
    import torch

__all__ = ["RestoredState"]

_SCHEMA = pa.schema([("kind", pa.string()), ("tensors", pa.int64()), ("elements", pa.int64()), ("bytes", pa.int64())])


class RestoredState(dict[str, dict[str, "torch.Tensor"]]):
    """`{kind: {name: tensor}}` in host memory, as any other dict but for its looks."""

    def __repr__(self) -> str:
        return repr(self._looks())

    def _repr_html_(self) -> str:
        return self._looks()._repr_html_()

    def _looks(self) -> Report:
        rows = [
            {
                "kind": kind,
                "tensors": len(tensors),
                "elements": sum(tensor.numel() for tensor in tensors.values()),
                "bytes": sum(tensor.nbytes for tensor in tensors.values()),
            }
            for kind, tensors in self.items()
        ]
        note = "tensors by kind and name: state['model']['...']"
        table = Table(pa.Table.from_pylist(rows, schema=_SCHEMA), formats={"bytes": "bytes"}, note=note)
        return Report("tensors in memory", {}, {"kinds": table})
