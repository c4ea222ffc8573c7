"""`make fuzz`: a million damaged inputs for every reader of a history. Only HistoryErrors may come out.

    python fuzz.py [EXECUTIONS [SEED]]      run, and print how many of what kind
    python fuzz.py NAME NUMBER SEED         make one input again, and read it

No execution may take longer than `MOST_SECONDS` of the processor or more than `MOST_BYTES` of memory. Each target runs
in a process of its own, so that a crash or a hang ends only that process, and the number of its last input is known.
"""

import faulthandler
import json
import mmap
import multiprocessing
import random
import resource
import shutil
import struct
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from folders import fast_folder
from fuzz_targets import targets
from structures import STRUCTURES, read_structures
from target import Target

from catalog.errors import HistoryError

__all__ = ["Report", "fuzz"]

EXECUTIONS = 1_000_000
STRUCTURED_PERCENT = 2
"""Hypothesis takes this share of the executions, each of which takes much longer."""

MOST_SECONDS = 10.0
MOST_BYTES = (1 << 30) + (512 << 20)
"""The format allows tables of 1 GiB; the rest is what else a reader may take."""

MOST_SHOWN = 10


@dataclass(slots=True)
class Report:
    """The outcome for one target: how many inputs were accepted and refused, and what was wrong, by its place."""

    name: str
    outcomes: Counter[str]
    wrong: dict[str, str]

    @classmethod
    def empty(cls, name: str) -> "Report":
        return cls(name, Counter(), {})


def input_of(target: Target, number: int, seed: int) -> bytes:
    """Return the `number`-th input of a target."""
    return target.make(random.Random(f"{target.name} {seed} {number}"))


def execute(target: Target, data: bytes, report: Report, *, number: int) -> None:
    """Read one input and note what came of it."""
    # Not the time of day: a machine that does something else meanwhile makes no reader slow.
    began, peak = time.process_time(), _peak_bytes()
    try:
        target.read(data)
        report.outcomes["accepted"] += 1
    except HistoryError:
        report.outcomes["refused"] += 1
    except Exception as error:  # noqa: BLE001 - anything else is what is looked for
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {last.name} ({last.filename}:{last.lineno})"
        report.outcomes["wrong"] += 1
        report.wrong.setdefault(what, f"{number}: {error}")
    if time.process_time() - began > MOST_SECONDS:
        report.wrong.setdefault("too slow", f"{number}: {time.process_time() - began:.1f} s")
    if _peak_bytes() - peak > MOST_BYTES:
        report.wrong.setdefault("too much memory", f"{number}: {_peak_bytes() - peak >> 20} MiB")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fuzz(folder: Path, *, executions: int, seed: int) -> list[Report]:
    """Run every target in this process, in proportion to its weight."""
    every = targets(folder)
    total = sum(target.weight for target in every)
    reports = []
    for target in every:
        report = Report.empty(target.name)
        for number in range(executions * target.weight // total):
            execute(target, input_of(target, number, seed), report, number=number)
        reports.append(report)
    return reports


def _child(target: Target, first: int, last: int, seed: int, at: mmap.mmap, result: Path) -> None:
    report = Report.empty(target.name)
    for number in range(first, last):
        if number % 256 == 0:
            # A reader that hangs inside of a library hears no signal: this ends the process from another thread.
            faulthandler.dump_traceback_later(30 * MOST_SECONDS, exit=True)
        at[:8] = struct.pack("<Q", number)
        execute(target, input_of(target, number, seed), report, number=number)
    faulthandler.cancel_dump_traceback_later()
    result.write_text(json.dumps([report.outcomes, report.wrong]))


def _in_processes(folder: Path, *, executions: int, seed: int) -> list[Report]:
    every = targets(folder)
    total = sum(target.weight for target in every)
    context = multiprocessing.get_context("fork")
    reports = []
    for target in every:
        report = Report.empty(target.name)
        first, last = 0, executions * target.weight // total
        while first < last:
            at, result = mmap.mmap(-1, 8), folder / "result.json"
            result.unlink(missing_ok=True)
            process = context.Process(target=_child, args=(target, first, last, seed, at, result))
            process.start()
            process.join()
            if result.exists():
                outcomes, wrong = json.loads(result.read_text())
                report.outcomes.update(outcomes)
                report.wrong.update(wrong)
                first = last
            else:
                number = struct.unpack("<Q", at[:8])[0]
                report.wrong[f"ended with {process.exitcode} at input {number}"] = f"{number}: a crash or a hang"
                report.outcomes["refused or accepted before a crash"] += number - first
                first = number + 1
        reports.append(report)
        _print(report)
    return reports


def _structures(folder: Path, *, executions: int) -> list[Report]:
    reports = []
    for name in STRUCTURES:
        report = Report.empty(f"structures of {name}")
        try:
            report.outcomes["read"] = read_structures(name, folder, examples=executions // len(STRUCTURES))
        except Exception as error:  # noqa: BLE001 - anything but a HistoryError is what is looked for
            report.wrong[f"{type(error).__name__}"] = f"{error}; {getattr(error, '__notes__', '')}"
        reports.append(report)
        _print(report)
    return reports


def _print(report: Report) -> None:
    told = ", ".join(f"{count} {what}" for what, count in sorted(report.outcomes.items()))
    print(f"{report.name}: {report.outcomes.total()} inputs: {told}", flush=True)
    for what, example in list(report.wrong.items())[:MOST_SHOWN]:
        print(f"  {what}, input {example[:300]}", flush=True)


def _again(folder: Path, name: str, number: int, seed: int) -> None:
    target = next(target for target in targets(folder) if target.name == name)
    data = input_of(target, number, seed)
    print(data)
    print(target.read(data))


def main(arguments: list[str]) -> int:
    folder = fast_folder()
    try:
        if len(arguments) == 3:
            _again(folder, arguments[0], int(arguments[1]), int(arguments[2]))
            return 0
        begun = time.monotonic()
        executions = int(arguments[0]) if arguments else EXECUTIONS
        seed = int(arguments[1]) if len(arguments) > 1 else 1
        structured = executions * STRUCTURED_PERCENT // 100
        reports = _structures(folder, executions=structured)
        reports += _in_processes(folder, executions=executions - structured, seed=seed)
    finally:
        shutil.rmtree(folder)
    done = sum(report.outcomes.total() for report in reports)
    wrong = sum(len(report.wrong) for report in reports)
    print(f"{done} executions, {wrong} kinds of problems; {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
