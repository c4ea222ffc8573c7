"""Long work runs beside the kernel: the newest task counts, errors are reported, and nothing outlives `close`."""

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from tqdm.auto import tqdm

from catalog.errors import NotFoundError
from dshistory.display.progress import ByteProgress, listening
from dshistory.widgets.worker import Worker

PATIENCE_S = 60


class Told:
    """This is a worker with its reports."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, Exception]] = []
        self.shares: list[float | None] = []
        self.worker = Worker(
            on_error=lambda topic, error: self.errors.append((topic, error)), progress=self.shares.append
        )

    def submit(self, topic: str, task: Callable[[], None]) -> None:
        self.worker.first({topic: task})


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.worker.close()


class Long:
    """This task starts once it is let go, and then reports progress by one percent at a time."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.ended = False

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        with ByteProgress(100, description="long", quiet=True) as bar:
            for _ in range(100):
                bar.advance(1)
        self.ended = True


def test_tasks_run_one_after_the_other_in_another_thread(told: Told) -> None:
    ran: list[tuple[str, str]] = []
    told.worker.first({name: lambda name=name: ran.append((name, threading.current_thread().name)) for name in "abc"})
    assert told.worker.wait(PATIENCE_S)
    assert ran == [(name, "dshistory-explorer") for name in "abc"]


def test_a_thread_exists_only_while_there_is_something_to_do(told: Told) -> None:
    long = Long()
    told.submit("long", long)
    assert long.begun.wait(PATIENCE_S)
    assert not told.worker.wait(0)
    long.go.set()
    assert told.worker.wait(PATIENCE_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "dshistory-explorer"]


def test_progress_is_reported_to_the_end(told: Told) -> None:
    long = Long()
    long.go.set()
    told.submit("long", long)
    told.worker.wait(PATIENCE_S)
    assert told.shares == [*[n / 100 for n in range(1, 101)], None]


def test_a_listener_sees_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert ByteProgress(1, description="shown", quiet=False)._bar is not None
    with listening(lambda share: None):
        assert ByteProgress(1, description="heard", quiet=False)._bar is None


def test_a_newer_task_ends_the_running_one_and_replaces_the_waiting_one(told: Told) -> None:
    running, ran = Long(), []
    told.submit("heat", running)
    assert running.begun.wait(PATIENCE_S)
    for wish in (1, 2, 3):
        told.submit("heat", lambda wish=wish: ran.append(wish))
    running.go.set()
    told.worker.wait(PATIENCE_S)
    assert ran == [3]
    assert not running.ended
    assert told.errors == []


def test_the_newest_gesture_runs_first_and_an_interrupted_task_again_after_it(told: Told) -> None:
    running, ran = Long(), []
    told.submit("diff", running)
    assert running.begun.wait(PATIENCE_S)
    told.submit("heat", lambda: ran.append(("heat", running.ended)))
    told.submit("detail", lambda: ran.append(("detail", running.ended)))
    running.go.set()
    assert told.worker.wait(PATIENCE_S)
    assert ran == [("detail", False), ("heat", False)]
    assert running.ended
    assert told.errors == []


def test_a_task_that_ends_before_it_is_interrupted_does_not_run_again(told: Told) -> None:
    begun, go, ran = threading.Event(), threading.Event(), []

    def without_progress() -> None:
        ran.append("diff")
        begun.set()
        assert go.wait(PATIENCE_S)

    told.submit("diff", without_progress)
    assert begun.wait(PATIENCE_S)
    told.submit("heat", lambda: ran.append("heat"))
    go.set()
    assert told.worker.wait(PATIENCE_S)
    assert ran == ["diff", "heat"]


def test_what_is_shown_later_neither_interrupts_nor_goes_before_a_gesture(told: Told) -> None:
    running, ran = Long(), []
    told.submit("heat", running)
    assert running.begun.wait(PATIENCE_S)
    told.worker.later({"timeline": lambda: ran.append("timeline"), "heat": lambda: ran.append("heat again")})
    told.submit("page", lambda: ran.append("page"))
    running.go.set()
    assert told.worker.wait(PATIENCE_S)
    assert ran[0] == "page"
    assert "timeline" in ran


def test_a_history_that_grows_does_not_keep_long_work_from_its_end(told: Told) -> None:
    running = Long()
    told.submit("heat", running)
    assert running.begun.wait(PATIENCE_S)
    told.worker.later({"heat": lambda: None})
    running.go.set()
    assert told.worker.wait(PATIENCE_S)
    assert running.ended


def test_a_refusal_is_reported_and_the_next_task_runs(told: Told) -> None:
    def refused() -> None:
        raise NotFoundError("no such step")

    ran: list[int] = []
    told.submit("diff", refused)
    told.submit("heat", lambda: ran.append(1))
    assert told.worker.wait(PATIENCE_S)
    assert [(topic, str(error)) for topic, error in told.errors] == [("diff", "no such step")]
    assert ran == [1]


def test_a_bug_is_reported_and_raised_once(told: Told) -> None:
    told.submit("diff", lambda: [][0])
    with pytest.raises(IndexError):
        told.worker.wait(PATIENCE_S)
    assert [topic for topic, _ in told.errors] == ["diff"]
    assert told.worker.wait(PATIENCE_S)


def test_close_ends_what_runs_and_takes_nothing_more(told: Told) -> None:
    long, ran = Long(), []
    told.submit("long", long)
    assert long.begun.wait(PATIENCE_S)
    told.submit("other", lambda: ran.append(1))
    told.worker.abandon()
    long.go.set()
    told.worker.close()
    assert not long.ended
    told.submit("other", lambda: ran.append(2))
    assert told.worker.wait(PATIENCE_S)
    assert ran == []


def test_a_task_may_close_its_worker(told: Told) -> None:
    told.submit("last", told.worker.close)
    assert told.worker.wait(PATIENCE_S)
    assert told.errors == []


def test_only_its_own_thread_is_the_worker(told: Told) -> None:
    seen: list[bool] = []
    told.submit("me", lambda: seen.append(told.worker.is_me))
    told.worker.wait(PATIENCE_S)
    assert seen == [True]
    assert not told.worker.is_me


def test_progress_is_heard_while_the_lock_of_all_bars_is_held(told: Told) -> None:
    """The lock stays held for good once Ctrl-C has cut a bar of the main thread short."""

    def work() -> None:
        with ByteProgress(1, description="work", quiet=False) as bar:
            bar.advance(1)

    with tqdm.get_lock():
        told.submit("layers", work)
        assert told.worker.wait(PATIENCE_S)
    assert told.shares == [1.0, None]
