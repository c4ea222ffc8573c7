"""A process of its own that packs checkpoints of a run while its training goes on, at the lowest priority.

It is asked, a line of JSON at a time, and answers each `pack` with one; `packed_bytes` counts the images:

    {"pack": 30}        {"step": 30, "base": 20, "raw_bytes": 1000, "packed_bytes": 600},
                        or {"step": 30, "left": "why", "full": false}, "full" where the disk has no room for it; in
                        both "damaged": [[20, "what is wrong with it"]], the key frames that were found damaged
    {"dropped": 30}     no answer: the data files of step 30 are gone, so others may be packed against it

It removes nothing and replaces nothing: images come to be beside data files, and whoever holds the locks of the run
lets the data files go, while nobody removes a checkpoint. So it may die at any moment, and also live on for a moment
when its training has died. It ends at once when its input does.
"""

import ctypes
import json
import os
import platform
import queue
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from catalog.compaction.key_frames import KeyFrames
from catalog.disk.durable import is_full
from catalog.errors import HistoryError
from catalog.history import History
from catalog.paths import packed_file

__all__ = ["main", "take_lowest_priority"]

_LOOK_S = 1.0
_LOWEST_PRIORITY = 19
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE_IO = 3 << 13
"""IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0), which Linux has no function for."""


def main(root: str, run: str, key_every: str) -> None:
    """Answer requests until standard input ends."""
    history = History.open(Path(root))
    frames: KeyFrames | None = None
    for request in _requests():
        if "dropped" in request:
            # Removed since, it is no base for others.
            with suppress(HistoryError, OSError):
                if frames is not None:
                    frames.passed(request["dropped"])
            continue
        answer: dict[str, Any] = {"step": request["pack"], "damaged": []}
        try:
            frames = frames or _key_frames(history, run, int(key_every))
            answer.update(_packed(history, frames, request["pack"]))
        except (HistoryError, OSError) as error:
            answer["left"], answer["full"] = str(error), is_full(error)
        except Exception as error:  # noqa: BLE001 - what ails one checkpoint must not keep the others from being packed
            answer["left"], answer["full"] = f"{type(error).__name__}: {error}", False
        if frames is not None:
            answer["damaged"] = list(frames.damaged.items())
            frames.damaged.clear()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _packed(history: History, frames: KeyFrames, step: int) -> dict[str, Any]:
    manifests, base = frames.pack(step, alone=False, workers=1)
    images = [(history.root / packed_file(manifest.file)).stat().st_size for manifest in manifests]
    raw = sum(manifest.data_bytes for manifest in manifests)
    return {"base": base, "raw_bytes": raw, "packed_bytes": sum(images)}


def _key_frames(history: History, run: str, key_every: int) -> KeyFrames:
    steps = history.steps(run)
    frames = KeyFrames(history.paths, run, steps=steps, key_every=key_every)
    for step in steps:
        # An image that nobody can read is no base for others.
        with suppress(HistoryError, OSError):
            if frames.is_packed(step):
                frames.passed(step)
    return frames


def take_lowest_priority() -> None:
    """Let this process run, and read and write, only where nobody else wants to, and be the first that is killed where
    memory is short."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError):
        os.nice(_LOWEST_PRIORITY)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if platform.machine() in _IOPRIO_SET:
        ctypes.CDLL(None).syscall(_IOPRIO_SET[platform.machine()], 1, 0, _IDLE_IO)


def _requests() -> Iterator[dict[str, Any]]:
    """Yield the requests as they come. The process ends at once when the input does, also while it packs."""
    coming: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(coming,), daemon=True).start()
    while True:
        yield json.loads(coming.get())


def _listen(coming: "queue.SimpleQueue[str]") -> None:
    # A process that the training has forked may keep the pipe open when the training itself has died.
    parent = os.getppid()
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        found = os.read(0, 1 << 16)
        if not found:
            break
        *lines, rest = (rest + found).split(b"\n")
        for line in lines:
            coming.put(line.decode())
    os._exit(0)
