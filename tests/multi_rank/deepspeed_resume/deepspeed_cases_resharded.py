"""Cases that read what every world size and ZeRO stage wrote: equal logical tensors, and a training that continues."""

import math
from pathlib import Path

import torch
from deepspeed_cases_reshard import FP32, STAGES
from deepspeed_eager import Eager, assert_same, put_back, take
from deepspeed_helpers import make_engine, train
from ranks import covers, guards

from capture.loops.deepspeed.loop import DeepSpeedLoop


@guards("Resume is exact")
@covers("resharding: world sizes 1, 2, 4 and ZeRO 0, 1, 2, 3, every pair, bf16 and fp32")
def case_read_every_world_and_stage(folder: Path) -> None:
    """Restore every history into one engine of each stage, one after the other; the first into a fresh engine."""
    written = [torch.load(path, weights_only=False) for path in sorted(folder.glob("*-*.pt"))]
    assert len(written) == 3 * (len(STAGES) + len(FP32))
    for number, settings in enumerate([*STAGES, *FP32]):
        alike = [one for one in written if one[0].get("dtype") == settings.get("dtype")]
        engine = make_engine(seed=50, **settings)
        for _, tensors, objects in alike[number:] + alike[:number]:
            eager = Eager(tensors, objects)
            state = DeepSpeedLoop(engine).providers()
            put_back(state, eager)
            check_equal(take(state), eager)
            losses = train(engine, 1)
            assert all(map(math.isfinite, losses))
            assert engine.global_steps == 4
        engine.destroy()


def check_equal(mine: Eager, stored: Eager) -> None:
    shared = mine.tensors.keys() & stored.tensors.keys()
    assert_same(Eager({k: mine.tensors[k] for k in shared}, {}), Eager({k: stored.tensors[k] for k in shared}, {}))
    only = mine.tensors.keys() ^ stored.tensors.keys()
    assert {kind for kind, _ in only} <= {"master", "step"}, only
    for kind, name in only & mine.tensors.keys():
        if kind == "master":
            assert torch.equal(mine.tensors[(kind, name)], stored.tensors[("model", name)])
    assert mine.objects["counters"] == stored.objects["counters"]
    for one, other in zip(mine.objects["optimizer"]["groups"], stored.objects["optimizer"]["groups"], strict=True):
        assert sorted(one.pop("params")) == sorted(other["params"])
        assert one == {key: value for key, value in other.items() if key != "params"}
    assert steps(mine) == steps(stored)


def steps(eager: Eager) -> set[float]:
    """Return the number of updates, which plain torch keeps for each parameter and ZeRO for each group."""
    shared = eager.objects["optimizer"]["state"].get("step", [])
    return {float(t) for (kind, _), t in eager.tensors.items() if kind == "step"} | {float(step) for step in shared}
