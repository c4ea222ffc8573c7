"""Records the events that the loop of a DeepSpeed engine tells its session, for the tests of the hooks."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_eager import Eager, take

from capture.loops.batch_digest import BatchDigest
from capture.loops.deepspeed.loop import DeepSpeedLoop


class Recorder:
    """LoopEvents that records every event, and the state at that time."""

    names_batches = True

    def __init__(self, loop: DeepSpeedLoop, *, copies: bool = False) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[bool, Mapping[str, Any]]] = []
        self._providers = loop.providers() if copies else None
        self.copies: list[Eager] = []

    def before_update(self) -> None:
        self._see("update")

    def after_step(self, *, applied: bool, metrics: Mapping[str, Any], batch: BatchDigest | None) -> None:
        self._see("step")
        self.steps.append((applied, metrics))

    def next_forward(self) -> None:
        """Forwards are none of the events that these cases count."""

    def before_access(self, what: str) -> None:
        self.said.append(what)

    @contextlib.contextmanager
    def editing(self, what: str) -> Iterator[None]:
        self.said.append(what)
        yield
        self.said.append("edited")

    def layout_changed(self) -> None:
        self.said.append("layout")

    def closing(self) -> None:
        self.said.append("closing")

    def _see(self, what: str) -> None:
        self.said.append(what)
        if self._providers is not None:
            self.copies.append(take(self._providers).without_buffers())
