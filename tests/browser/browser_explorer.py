"""The explorer on a page: the content of its figure, and gestures with mouse and keyboard."""

import contextlib
from typing import Any

from browser_page import NotebookPage
from playwright.sync_api import TimeoutError

_TRACE = "document.querySelector('.dsh-figure').data.find(trace => trace.name === '{name}')"
_CELL = """([layer, step]) => {
    const plot = document.querySelector('.dsh-figure'), {left, top} = plot.getBoundingClientRect();
    const {xaxis, yaxis2} = plot._fullLayout;
    return [left + xaxis._offset + xaxis.d2p(step), top + yaxis2._offset + yaxis2.d2p(layer)];
}"""

_NOTICED = """([layer, step]) => {
    const point = document.querySelector('.dsh-figure')._hoverdata?.[0];
    return point && point.x === step && point.y === layer;
}"""
_MARK = """([name, step]) => {
    const plot = document.querySelector('.dsh-figure'), {left, top} = plot.getBoundingClientRect();
    const {xaxis, yaxis} = plot._fullLayout, trace = plot.data.find(trace => trace.name === name);
    const height = trace.y[Array.from(trace.x).indexOf(step)];
    return [left + xaxis._offset + xaxis.d2p(step), top + yaxis._offset + yaxis.d2p(height)];
}"""
_NOTICED_MARK = """([name, step]) => {
    const point = document.querySelector('.dsh-figure')._hoverdata?.[0];
    return point && point.x === step && [name, 'metric'].includes(point.data.name);
}"""
NOTICE_MS = 500
MOVES = 40


class ExplorerPage:
    """The only explorer on the page of a notebook."""

    def __init__(self, notebook: NotebookPage) -> None:
        self.notebook = notebook
        self.page = notebook.page
        self.page.locator(".dsh-explorer").wait_for()

    @property
    def code(self) -> str:
        """Return the line of Python that the explorer shows."""
        return self.page.locator(".dsh-code textarea").input_value()

    def values(self, trace: str, axis: str) -> list[Any]:
        """Return x, y or z of a trace; z as a list for each row."""
        array = f"{_TRACE.format(name=trace)}.{axis} ?? []"
        flat = "value => value?.length === undefined || typeof value === 'string' ? value : Array.from(value)"
        return list(self.page.evaluate(f"() => Array.from({array}, {flat})"))

    def wait_until(self, condition: str, *, trace: str = "heat") -> None:
        """Wait until the JavaScript expression is true for that `trace` of the figure."""
        self.page.wait_for_function(f"() => {{ const trace = {_TRACE.format(name=trace)}; return {condition}; }}")

    def wait_for_code(self, start: str) -> None:
        """Wait until the line of Python begins with `start`."""
        self.page.wait_for_function(
            "start => document.querySelector('.dsh-code textarea').value.startsWith(start)", arg=start
        )

    def drag_range(self, end: str, share: float) -> None:
        """Drag the "lower" or "upper" end of the slider of steps to a share of its length."""
        line = self.notebook.see(".dsh-range .noUi-base").bounding_box()
        handle = self.page.locator(f".dsh-range .noUi-handle-{end}").bounding_box()
        assert line
        assert handle
        height = handle["y"] + handle["height"] / 2
        self.page.mouse.move(handle["x"] + handle["width"] / 2, height)
        self.page.mouse.down()
        self.page.mouse.move(line["x"] + share * line["width"], height, steps=5)
        self.page.mouse.up()

    def click_cell(self, layer: str, step: int) -> None:
        """Click the heat map at the cell of that layer and step."""
        self._click(_CELL, _NOTICED, [layer, step])

    def click_mark(self, trace: str, step: int) -> None:
        """Click the mark of a trace of the first panel at that step."""
        self._click(_MARK, _NOTICED_MARK, [trace, step])

    def _click(self, place: str, noticed: str, target: list[Any]) -> None:
        self.notebook.see(".dsh-figure")
        for _ in range(MOVES):
            x, y = self.page.evaluate(place, target)
            self.page.mouse.move(x, y)
            # A figure that is being redrawn does not notice the mouse, and a click then has no effect.
            with contextlib.suppress(TimeoutError):
                self.page.wait_for_function(noticed, arg=target, timeout=NOTICE_MS)
                break
            self.page.mouse.move(0, 0)
        self.page.mouse.click(x, y)
