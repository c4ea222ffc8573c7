"""The cost of a save, and of a step that is not captured, against the number of tensors, with the same bytes in few
large or many small tensors.
"""

import shutil
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

import capture
from benchmarks.measure import Rows, Series, clock, make_durable, rotations

COLUMNS = {"step not captured": "ms", "snapshot call": "s", "durable": "s", "rate": "GB/s"}


def run(scratch: Path, *, total_bytes: int, counts: tuple[int, ...], times: int) -> tuple[Rows, dict[str, object]]:
    """Measure `times` interleaved snapshots for each count of equal tensors. Plain SGD keeps no state besides the
    weights. "step not captured" is the time of the training thread in the session's hooks at the step before.
    """
    models = {count: _model(count, total_bytes // count) for count in counts}
    rows: Rows = {_label(count, total_bytes // count): defaultdict(Series) for count in counts}
    sessions = {}
    for count, (model, optimizer) in models.items():
        sessions[count] = capture.enable(
            model, optimizer=optimizer, every=1_000_000_000, stats_every=0, history=scratch / f"tensors-{count}"
        )
        sessions[count].wait()
        # The first step lists the tensors.
        optimizer.step()
    for count in rotations(counts, times=times):
        row = rows[_label(count, total_bytes // count)]
        models[count][1].step()
        row["step not captured"].add(sessions[count].stats.stalls_s[-1])
        make_durable(scratch)
        with clock() as durable:
            with clock() as call:
                sessions[count].snapshot()
            sessions[count].wait()
        row["snapshot call"].add(call.seconds)
        row["durable"].add(durable.seconds)
        row["rate"].add(total_bytes / durable.seconds)
    for count, session in sessions.items():
        session.close()
        shutil.rmtree(scratch / f"tensors-{count}")
    return rows, {"total_bytes": total_bytes, "counts": counts, "rotations": times}


def _model(count: int, nbytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.rand(nbytes // 4, generator=generator)) for _ in range(count))
    for parameter in model:
        parameter.grad = torch.rand(nbytes // 4, generator=generator)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def _label(count: int, nbytes: int) -> str:
    size = f"{nbytes / (1 << 20):.0f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:.0f} KiB"
    return f"{count:,} x {size}"
