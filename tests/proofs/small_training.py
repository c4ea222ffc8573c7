"""A small training whose history is damaged."""

from pathlib import Path

import pyarrow as pa
import torch

import capture
from catalog.format.audit_file import SCHEMA, publish_audit
from catalog.history import History

__all__ = ["train"]


def train(root: Path, *, width: int, steps: int, every: int = 1) -> None:
    """Capture a training with metrics, a tag, statistics, a redo log, and the audit of its last step."""
    torch.manual_seed(3)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with capture.enable(
        model, optimizer=optimizer, every=every, history=root, budget_bytes=32 << 20, redo=True
    ) as session:
        for _ in range(steps):
            model(torch.ones(2, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=1.0)
            session.wait()
        session.tag("end")
    history = History.open(root)
    figures = dict.fromkeys(SCHEMA.names, 0.5) | {"name": "weight", "since": steps - 1, "cause": None, "updates": 1}
    publish_audit(history.paths, history.runs()[0].run, steps, pa.Table.from_pylist([figures], schema=SCHEMA))
