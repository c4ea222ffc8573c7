"""The dict of tensors that `restore` returns to a person: it shows a summary instead of every element."""

from typing import TYPE_CHECKING

import pyarrow as pa

from dshistory.display.report import Report
from dshistory.display.table import Table

if TYPE_CHECKING:
    import torch

__all__ = ["RestoredState"]

_SCHEMA = pa.schema([("kind", pa.string()), ("tensors", pa.int64()), ("elements", pa.int64()), ("bytes", pa.int64())])


class RestoredState(dict[str, dict[str, "torch.Tensor"]]):
    """`{kind: {name: tensor}}` in host memory: a plain dict except for how it is displayed."""

    def __repr__(self) -> str:
        return repr(self._summary())

    def _repr_html_(self) -> str:
        return self._summary()._repr_html_()

    def _summary(self) -> Report:
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
