"""A JupyterLab that uses only temporary folders, none of the user's own files, and stops with the test."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_S = 60
GRACE_S = 10
SETTINGS = {
    # Without this JupyterLab asks for permission to fetch news, and covers a part of the page.
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Without this no completion is shown when the kernel takes more than a second to answer on a busy machine.
    "@jupyterlab/completer-extension/manager": {"providerTimeout": 20_000},
    # Without this cells are laid out when they scroll into view, and the target of a click moves.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}


@dataclass(frozen=True)
class Lab:
    """A running server with its address, its access token and the folder that it shows."""

    address: str
    token: str
    root: Path

    def page(self, notebook: str) -> str:
        return f"{self.address}/lab/tree/{notebook}?reset&token={self.token}"


@contextlib.contextmanager
def running_lab(root: Path, own: Path, **environment: str) -> Iterator[Lab]:
    """Run a server for the notebooks in `root`; settings, state and log are in `own`. Kernels get `environment`."""
    token, port = secrets.token_hex(16), _free_port()
    lab = Lab(f"http://127.0.0.1:{port}", token, root)
    folders = _folders(own)
    _write_settings(Path(folders["JUPYTERLAB_SETTINGS_DIR"]))
    with (own / "lab.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *_options(port, token, root)],
            env={**os.environ, **folders, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        # A signal that would end the tests at once, such as at a time limit, lets them stop the server first.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            _wait_until_ready(server, lab, own / "lab.log")
            yield lab
        finally:
            _end(server)
            signal.signal(signal.SIGTERM, before)


def _options(port: int, token: str, root: Path) -> list[str]:
    options = {
        "--ip": "127.0.0.1",
        "--port": port,
        "--ServerApp.port_retries": 0,
        "--IdentityProvider.token": token,
        "--ServerApp.root_dir": root,
        "--LabApp.extension_manager": "readonly",
    }
    return [
        *(f"{name}={value}" for name, value in options.items()),
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
    ]


def _folders(own: Path) -> dict[str, str]:
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR")
    names += ("JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")
    return {name: str(own / name.lower()) for name in names}


def _write_settings(folder: Path) -> None:
    for name, settings in SETTINGS.items():
        file = folder / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(server: subprocess.Popen[bytes], lab: Lab, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{lab.address}/api?token={lab.token}", timeout=5).close()
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(0.1)
    raise AssertionError(f"JupyterLab is not there after {START_S} s:\n{log.read_text(errors='replace')}")


def _end(server: subprocess.Popen[bytes]) -> None:
    # At SIGTERM the server ends its kernels, which have their own process groups.
    for request in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, request)
            server.wait(GRACE_S)
            return
