"""Runs the `case_*` functions of a module inside one process group, so that ranks are started once for many cases.

The first case that fails on any rank ends the group, because the ranks would no longer agree on collectives. A module
of cases lies in the room of the test that runs it.
"""

import ast
import atexit
import contextlib
import importlib
import json
import logging
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fork_server import ForkServer

HERE = Path(__file__).parent
_COLLECTIVE_TIMEOUT = timedelta(seconds=300)
"""Longer than one rank works while the others wait for it, on a busy machine too."""

_servers: list[ForkServer] = []
Case = TypeVar("Case", bound=Callable[..., Any])


def case_names(module: str) -> list[str]:
    """Return the cases of a module in order. The module is not imported: the collecting process must not import
    deepspeed.
    """
    (path,) = HERE.glob(f"*/{module}.py")
    tree = ast.parse(path.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")]


def cases_as_tests(module: str, *, worlds: Sequence[int] = (2,)) -> tuple[Any, Any]:
    """Return a module-scoped fixture that runs all cases of `module` for each number of ranks, and a test for each
    case.

    A test module assigns both at its top: `said, test_hooks = cases_as_tests(...)`.
    """

    @pytest.fixture(scope="module", params=worlds, ids=lambda world: f"ranks={world}")
    def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        return run_ranks(module, world=request.param, folder=tmp_path_factory.mktemp("ranks"))

    @pytest.mark.parametrize("case", case_names(module))
    def test(said: dict[str, str], case: str) -> None:
        assert said[case] == "passed", said[case]

    return said, test


def groups_as_tests(*groups: tuple[str, int]) -> tuple[Any, Any, Any]:
    """Return what runs several process groups one after the other in one folder, so that each finds there what those
    before it have written: a fixture with the folder, one with the outcomes, and a test for each case of each group.

    A group is a module of cases and a number of ranks. A test module assigns all three at its top: `folder, said,
    test_resume = groups_as_tests(...)`. An outcome is `said[module, world, case]`. All groups run in the set-up of the
    first test, so a module with several of them needs a longer `timeout` than others.
    """

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("ranks")

    @pytest.fixture(scope="module")
    def said(folder: Path) -> dict[tuple[str, int, str], str]:
        return {
            (module, world, case): outcome
            for module, world in groups
            for case, outcome in run_ranks(module, world=world, folder=folder).items()
        }

    @pytest.mark.parametrize(
        ("module", "world", "case"),
        [
            pytest.param(module, world, case, id=f"{module}-ranks={world}-{case}")
            for module, world in groups
            for case in case_names(module)
        ],
    )
    def test(said: dict[tuple[str, int, str], str], module: str, world: int, case: str) -> None:
        assert said[module, world, case] == "passed", said[module, world, case]

    return folder, said, test


def covers(what: str) -> Callable[[Case], Case]:
    """Describe for docs/coverage.md what a case covers; `coverage_table` reads the text from the source."""
    return lambda case: case


def guards(promise: str) -> Callable[[Case], Case]:
    """Name the promise of docs/guarantees.md that a case breaks; `guarantees` reads the text from the source."""
    return lambda case: case


def run_ranks(module: str, *, world: int, folder: Path, timeout_s: float = 480.0) -> dict[str, str]:
    """Run all cases of `module` on `world` ranks in `folder`. Return "passed" for each case, or what every rank that
    failed says of it: the others may only have noticed that it was gone.
    """
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    places = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    troubles = _run(module, folder, places=places, timeout_s=timeout_s)
    names = case_names(module)
    failures: dict[str, list[str]] = {name: [] for name in names}
    for rank in range(world):
        report = folder / f"{module}-{rank}.json"
        reached = dict(map(json.loads, report.read_text().splitlines())) if report.exists() else {}
        log = (folder / f"{module}-{rank}.log").read_text()[-3000:]
        ended = f"{troubles[rank]}; the end of its log:\n{log}" if rank in troubles else ""
        for name in names:
            outcome = reached.get(name, f"rank {rank} did not get here: {ended or log}")
            if name == names[-1] and outcome == "passed" and ended:
                outcome = f"after all cases, rank {rank}: {ended}"
            if outcome != "passed":
                failures[name].append(outcome)
    return {name: "\n".join(failures[name]) or "passed" for name in names}


def _free_port() -> int:
    """Return a free port below the range of the kernel, so that no socket of another group takes it before the group
    starts.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run(module: str, folder: Path, *, places: list[dict[str, str]], timeout_s: float) -> dict[int, str]:
    """Run the ranks, alternating between the servers in random order. Return an error text for each failed rank."""
    if not all(server.alive for server in _servers):
        _stop()
    if not _servers:
        _servers.extend((ForkServer(), ForkServer()))
    random.shuffle(_servers)
    busy = [(server, places[i::2]) for i, server in enumerate(_servers) if places[i::2]]
    try:
        for server, own in busy:
            server.begin(module, folder, places=own, timeout_s=timeout_s)
        return {rank: trouble for server, _ in busy for rank, trouble in server.finish().items()}
    except BaseException:
        _stop()
        raise


@atexit.register
def _stop() -> None:
    while _servers:
        _servers.pop().stop()


def _join(module: str) -> None:
    """Create the process group: through DeepSpeed for modules with its name, and through torch for all others."""
    if module.startswith("deepspeed"):
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo", verbose=False, timeout=_COLLECTIVE_TIMEOUT)
    else:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", timeout=_COLLECTIVE_TIMEOUT)


def main(module: str, folder: Path) -> None:
    import torch

    _join(module)
    rooms = sorted(path for path in HERE.iterdir() if path.is_dir())
    sys.path[:0] = [str(path) for path in (HERE.parents[1], HERE.parent / "support", *rooms)]
    cases = importlib.import_module(module)
    rank = int(os.environ["RANK"])
    with (folder / f"{module}-{rank}.json").open("w") as report:
        for name in case_names(module):
            outcome = "passed"
            try:
                getattr(cases, name)(folder)
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - every failure is reported
                outcome = f"rank {rank}: {traceback.format_exc()}"
            report.write(json.dumps([name, outcome]) + "\n")
            report.flush()
            failed = torch.tensor(outcome != "passed")
            torch.distributed.all_reduce(failed, op=torch.distributed.ReduceOp.MAX)
            if failed:
                break
    torch.distributed.destroy_process_group()
