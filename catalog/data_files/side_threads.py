"""Work in a thread beside the caller, or by the caller itself where no thread can be started: while the interpreter
exits, and where the system gives no more of them.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

__all__ = ["begun"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def begun(pool: Executor, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
    """Begin work that may be done twice. Without a thread it is done when this returns, and raises what it raises."""
    try:
        return pool.submit(work, *args, **kwargs)
    except RuntimeError:
        done: Future[_T] = Future()
        done.set_result(work(*args, **kwargs))
        return done
