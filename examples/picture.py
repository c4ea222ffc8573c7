"""Draw a picture of the README with a headless Chromium: the cells of an executed notebook that are tagged "picture".

`make picture` calls it as: python examples/picture.py demo-output/quickstart.ipynb docs/images/quickstart.png 1220
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import notebook

WIDTH = 1000
STYLE = "<style>.modebar { display: none }</style>"


def draw(executed: Path, picture: Path, *, height: int) -> None:
    """Write `picture` as PNG of so many pixels, or exit with a message if no Chromium is installed."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no chromium found; install it with: sudo apt-get install chromium fonts-dejavu")
    document = nbformat.read(executed, as_version=4)
    document.cells = [cell for cell in document.cells if "picture" in cell.metadata.get("tags", [])]
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(notebook.as_html(document) + STYLE)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
        size = f"--window-size={WIDTH},{height}"
        subprocess.run(
            [browser, *options, size, f"--screenshot={picture.absolute()}", page.as_uri()],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]), height=int(sys.argv[3]))
