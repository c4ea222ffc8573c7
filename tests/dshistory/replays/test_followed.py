"""What a replay follows: the current run and its parents, each up to its fork."""

import torch
from explorer_helpers import Run, whole

from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.replays.followed import Followed


def test_of_a_run_that_another_went_on_from_only_the_steps_before_the_fork_are_followed(tmp_path):
    for number, (name, parent, steps) in enumerate(
        [("training", None, range(1, 31)), ("child", ("training", 20), range(21, 24))], start=1
    ):
        run = Run(tmp_path, name, parent=parent, facts={"number": number})
        for step in steps:
            run.metrics(step, loss=100.0 * number + step)
        for step in {10, 20, 23, 30} & {*steps, 20}:
            run.checkpoint(step, whole({"w": torch.ones(2)}))
        run.close()
    history = History.open(tmp_path)
    followed = Followed(history, CheckpointRef("training", 10))
    assert followed.run == "child"
    assert followed.losses() == {step: (100.0 if step <= 20 else 200.0) + step for step in range(11, 24)}
    assert list(followed.checkpoints.values()) == [CheckpointRef("child", 20), CheckpointRef("child", 23)]
    assert followed.last_step() == 23
    alone = Followed(history, CheckpointRef("training", 20))
    assert (alone.run, alone.last_step()) == ("training", 30)
