"""The runtime: it captures every N-th step of a training, lazily and asynchronously, and restores any step.

    session = capture.enable(engine, every=50)        # a DeepSpeed engine, or a module with optimizer=...
    capture.restore(1200, engine=engine)              # bit for bit

Importing this package loads neither torch, duckdb, pyarrow nor deepspeed; the first use of a name loads what it needs.
"""

from typing import TYPE_CHECKING

try:
    from native._siblings import check_siblings
except ImportError as error:
    import native

    raise ImportError(
        f"DSHistory needs its own package 'native', but `import native` finds {native.__file__}: "
        "rename that file, or put it after DSHistory on sys.path"
    ) from error

check_siblings(__file__, ("catalog", "native"))

from capture.lazy_doors import open_lazily  # noqa: E402

if TYPE_CHECKING:
    from capture.checkpoint_engine import checkpoint_engine
    from capture.enable import enable
    from capture.restore import restore
    from capture.session.session import Session, SessionStats
    from capture.state.interface import Available, StateProvider, TensorItem
    from capture.state.providers import Stateful

__all__ = [
    "Available",
    "Session",
    "SessionStats",
    "StateProvider",
    "Stateful",
    "TensorItem",
    "checkpoint_engine",
    "enable",
    "restore",
]

open_lazily(
    __name__,
    {
        "Available": "capture.state.interface",
        "Session": "capture.session.session",
        "SessionStats": "capture.session.session",
        "StateProvider": "capture.state.interface",
        "Stateful": "capture.state.providers",
        "TensorItem": "capture.state.interface",
        "checkpoint_engine": "capture.checkpoint_engine",
        "enable": "capture.enable",
        "restore": "capture.restore",
    },
)
