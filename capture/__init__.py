"""The runtime: captures every N-th step of a training, lazily and asynchronously, and puts any step back.

session = capture.enable(engine, every=50)        # a DeepSpeed engine, or a module with optimizer=...
capture.restore(1200, engine=engine)              # bit for bit
"""

try:
    from native._siblings import check_siblings
except ImportError as error:
    import native

    raise ImportError(
        f"DSHistory needs its own package 'native', but `import native` finds {native.__file__}: "
        "rename that file, or put it after DSHistory on sys.path"
    ) from error

check_siblings(__file__, ("catalog", "native"))

from capture.checkpoint_engine import checkpoint_engine  # noqa: E402
from capture.enable import enable  # noqa: E402
from capture.restore import restore  # noqa: E402
from capture.session.session import Session, SessionStats  # noqa: E402
from capture.state.interface import Available, StateProvider, TensorItem  # noqa: E402
from capture.state.providers import Stateful  # noqa: E402

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
