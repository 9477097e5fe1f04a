"""A drawing of rectangles, lines, dots and texts, written as SVG for a page and as PNG for everything else.

Pillow alone, which images of records need already: the plots are few and plain, and a plotting library would be the
largest dependency of a trainer's image.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Canvas"]

_SCALE = 2  # of the PNG, for screens with narrow pixels
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


class _Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    color: str


class _Line(NamedTuple):
    points: tuple[tuple[float, float], ...]
    color: str
    width: float


class _Dot(NamedTuple):
    x: float
    y: float
    radius: float
    color: str


class _Text(NamedTuple):
    x: float
    y: float
    text: str
    size: float
    anchor: str
    color: str


class Canvas:
    """A drawing of `width` times `height` units; y grows downwards, colours are "#rrggbb"."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self._shapes: list[_Rect | _Line | _Dot | _Text] = [_Rect(0, 0, width, height, "#ffffff")]

    def rect(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """A filled rectangle."""
        self._shapes.append(_Rect(x, y, max(width, 0.0), max(height, 0.0), color))

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float = 1.0) -> None:
        """A line through points."""
        self._shapes.append(_Line(tuple(points), color, width))

    def dot(self, x: float, y: float, radius: float, color: str) -> None:
        """A filled circle."""
        self._shapes.append(_Dot(x, y, radius, color))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 11,
        anchor: str = "start",
        color: str = "#5c6875",
    ) -> None:
        """A line of text that stands on y; `anchor` says which end of it is at x."""
        self._shapes.append(_Text(x, y, text, size, anchor, color))

    def svg(self) -> str:
        """The drawing as an SVG document; texts are escaped."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            ' font-family="system-ui, sans-serif">',
            f"<title>{_escaped(self.title)}</title>",
        ]
        for shape in self._shapes:
            if isinstance(shape, _Rect):
                x, y, width, height, color = shape
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
                )
            elif isinstance(shape, _Line):
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
                stroke = f'stroke="{shape.color}" stroke-width="{shape.width}"'
                parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
            elif isinstance(shape, _Dot):
                parts.append(
                    f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius}" fill="{shape.color}"/>'
                )
            else:
                where = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}"'
                look = f'font-size="{shape.size}" fill="{shape.color}"'
                parts.append(f"<text {where} {look}>{_escaped(shape.text)}</text>")
        return "\n".join([*parts, "</svg>"])

    def png(self) -> bytes:
        """The drawing as a PNG file's bytes, two pixels a unit."""
        from PIL import Image, ImageDraw, ImageFont

        image = Image.new("RGB", (self.width * _SCALE, self.height * _SCALE), "#ffffff")
        draw = ImageDraw.Draw(image)
        fonts: dict[float, Any] = {}
        for shape in self._shapes:
            if isinstance(shape, _Rect):
                if shape.width and shape.height:
                    left, top = shape.x * _SCALE, shape.y * _SCALE
                    right = max(left, left + shape.width * _SCALE - 1)
                    draw.rectangle(
                        (left, top, right, max(top, top + shape.height * _SCALE - 1)), fill=shape.color
                    )
            elif isinstance(shape, _Line):
                points = [(x * _SCALE, y * _SCALE) for x, y in shape.points]
                draw.line(points, fill=shape.color, width=max(1, round(shape.width * _SCALE)))
            elif isinstance(shape, _Dot):
                x, y, radius = shape.x * _SCALE, shape.y * _SCALE, shape.radius * _SCALE
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shape.color)
            else:
                font = fonts.setdefault(shape.size, ImageFont.load_default(shape.size * _SCALE))
                at = (shape.x * _SCALE, shape.y * _SCALE)
                draw.text(at, shape.text, fill=shape.color, font=font, anchor=_ANCHORS[shape.anchor])
        out = io.BytesIO()
        image.save(out, "PNG", optimize=True)
        return out.getvalue()


def _escaped(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))
