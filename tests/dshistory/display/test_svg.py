"""A figure that plotly does not draw is seen as a small picture: the same lines, bars and cells at the same places."""

import base64
import re
import struct
import xml.etree.ElementTree as ET
import zlib

import numpy as np
import plotly.graph_objects as go
import pytest
from explorer_helpers import tiny_history

from dshistory.display.svg import svg
from dshistory.explorer import Explorer

SVG = "{http://www.w3.org/2000/svg}"


def drawn(figure: go.Figure) -> ET.Element:
    return ET.fromstring(svg(figure.to_plotly_json()))


def pixels(picture: ET.Element) -> np.ndarray:
    data = base64.b64decode(picture.get("href", "").partition(",")[2])
    width, height = struct.unpack(">II", data[16:24])
    body = zlib.decompress(data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8])
    return np.frombuffer(body, np.uint8).reshape(height, 1 + 4 * width)[:, 1:].reshape(height, width, 4)


def test_a_line_goes_through_its_points_and_ends_at_a_gap() -> None:
    figure = go.Figure(go.Scatter(x=[0, 1, 2, 3, 4], y=[0, 1, None, 1, 0], mode="lines", line={"color": "#0072B2"}))
    (path,) = [part for part in drawn(figure).iter(f"{SVG}path") if part.get("stroke") == "#0072B2"]
    places = [tuple(map(float, place)) for place in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d", ""))]
    assert len(places) == 4
    assert path.get("d", "").count("M") == 2
    (x0, low), (x1, high), (x3, _), (x4, _) = places
    assert x4 - x3 == pytest.approx(x1 - x0, abs=0.2)
    assert low > high


def test_a_heat_map_has_a_pixel_for_each_cell_and_none_for_a_gap() -> None:
    figure = go.Figure(go.Heatmap(z=[[0.0, None], [0.5, 1.0]], x=[1, 2], y=["a", "b"], colorscale="Cividis"))
    figure.update_yaxes(type="category", autorange="reversed")
    picture, _ = drawn(figure).iter(f"{SVG}image")
    cells = pixels(picture)
    assert cells.shape == (2, 2, 4)
    assert cells[0, 1, 3] == 0
    assert cells[0, 0, :3].sum() < cells[1, 0, :3].sum() < cells[1, 1, :3].sum()


def test_markup_in_names_stays_text() -> None:
    figure = go.Figure(go.Bar(x=[1.0], y=["&lt;b&gt;w"], orientation="h", marker={"color": "#0072B2"}))
    assert "<b>w" in [text.text for text in drawn(figure).iter(f"{SVG}text")]


def test_every_figure_can_be_drawn_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    for run in tiny_history(tmp_path_factory.mktemp("svg") / "history"):
        h = Explorer.open(run.root)
        h.analyze(quiet=True)
        figures = [
            h.log().plot(),
            h.diff(0, 20, quiet=True).plot(),
            h.layers().plot(),
            h.layers(metric="cosine").plot(),
            h.trajectory("*", metric="cosine", quiet=True).plot(),
            h.histogram("head.weight").plot(),
            h.anomalies().plot(),
            h.distances().plot(),
            h.distances().path().plot(),
        ]
        for figure in figures:
            assert "NaN" not in ET.tostring(drawn(figure)).decode()
            assert len(svg(figure.to_plotly_json())) < 20_000
