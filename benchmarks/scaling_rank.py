"""One rank of a training that only saves: python -m benchmarks.scaling_rank RANK WORLD BYTES TENSORS FOLDER.

Every line of input asks for one snapshot. The answer is a line with this rank's seconds and bytes.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import capture
from benchmarks.measure import clock
from benchmarks.ours import NEVER


def main() -> None:
    rank, world, nbytes, tensors = map(int, sys.argv[1:5])
    folder = Path(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=world)
    model = nn.ParameterList(nn.Parameter(torch.rand(nbytes // tensors // 4)) for _ in range(tensors))
    for parameter in model:
        parameter.grad = torch.rand_like(parameter)  # The whole state changes, so that all of it is written.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture.enable(model, optimizer=optimizer, every=NEVER, stats_every=0, history=folder / "history") as session:
        session.wait()
        for _ in sys.stdin:
            optimizer.step()
            written = session.stats.bytes
            dist.barrier()
            with clock() as durable:
                with clock() as call:
                    session.snapshot()
                session.wait()
            answer = {"call": call.seconds, "durable": durable.seconds, "bytes": session.stats.bytes - written}
            print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
