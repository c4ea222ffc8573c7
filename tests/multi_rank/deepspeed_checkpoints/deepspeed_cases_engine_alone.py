"""Cases for one rank that loads what two ranks saved in `deepspeed_cases_engine`."""

from pathlib import Path

import pytest
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed_cases_engine import after_loading, assert_alike, go_on, native
from deepspeed_helpers import make_engine


def case_fewer_ranks_load_what_torch_lets_them(folder: Path) -> None:
    for where, stage in (("same-0-bf16", 0), ("elastic-1", 1), ("elastic-2", 2), ("same-1-bf16", 1)):
        elastic = {"elastic_checkpoint": "elastic" in where}
        make = lambda s=stage, e=elastic: make_engine(stage=s, seed=9, zero=e)  # noqa: E731
        assert_alike(after_loading(make, folder / where, go_on, load_optimizer_states=stage == 0))
        assert_alike(after_loading(make, folder / where, go_on, load_module_only=True))


def case_fewer_ranks_are_refused_the_optimizer_state_as_by_torch(folder: Path) -> None:
    engine = make_engine(stage=1)
    native(engine)
    with pytest.raises(ZeRORuntimeException, match="world size of 2"):
        engine.load_checkpoint(str(folder / "same-1-bf16" / "native"))
    engine.destroy()


def case_one_rank_alone(folder: Path) -> None:
    engine = make_engine(stage=2)
    saver = native(engine)
    engine.save_checkpoint(str(folder / "alone"), tag="a")
    saver.wait()
    assert (folder / "alone" / "latest").read_text() == "a"
    engine.destroy()
