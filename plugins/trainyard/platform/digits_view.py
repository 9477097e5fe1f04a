"""Small pictures drawn in the terminal, beside what the served model says they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Answer", "draw", "read_answers", "side_by_side"]

_LEVELS = 24  # of the grey ramp in the 256-colour palette
_RAMP_START = 232


@dataclass(frozen=True)
class Answer:
    """What the model said of one picture; `confidence` 0 to 1 where it gives one, `truth` where it is known."""

    said: str
    confidence: float | None = None
    truth: str | None = None

    @property
    def caption(self) -> str:
        """Like "7 (99 %)", with the truth where it differs."""
        share = f" ({self.confidence:.0%})" if self.confidence is not None else ""
        wrong = f", is {self.truth}" if self.truth is not None and self.truth != self.said else ""
        return f"{self.said}{share}{wrong}"


def draw(picture: np.ndarray, *, colour: bool) -> list[str]:
    """A grey picture, [height, width] or [height, width, 1], as lines of half blocks; two rows a line.

    In colour a half block shows two pixels by its foreground and background; without, brightness is halved to
    on and off.
    """
    import numpy as np

    grey = np.asarray(picture, dtype=float).reshape(np.shape(picture)[:2])
    low, high = grey.min(), grey.max()
    grey = (grey - low) / ((high - low) or 1.0)
    if len(grey) % 2:
        grey = np.vstack([grey, np.zeros((1, grey.shape[1]))])
    lines = []
    for upper, lower in zip(grey[::2], grey[1::2], strict=True):
        if colour:
            cells = (f"\x1b[38;5;{_shade(u)};48;5;{_shade(d)}m▀" for u, d in zip(upper, lower, strict=True))
            lines.append("".join(cells) + "\x1b[0m")
        else:
            lines.append(
                "".join(" ▀▄█"[(u > 0.5) + 2 * (d > 0.5)] for u, d in zip(upper, lower, strict=True))
            )
    return lines


def _shade(brightness: float) -> int:
    return _RAMP_START + min(_LEVELS - 1, int(brightness * _LEVELS))


def read_answers(
    outputs: Mapping[str, Any], labels: Sequence[Any] = (), classes: Sequence[str] = ()
) -> list[Answer]:
    """What a classifier's outputs say: scores of shape [batch, classes], or classes of shape [batch].

    A regression's numbers, [batch, 1], are told with one decimal, as are their labels. Outputs of another kind give
    no answers. Scores that aren't a distribution are taken for logits.
    """
    import numpy as np

    scores = next(
        (np.asarray(v, float) for v in outputs.values() if np.ndim(v) == 2 and np.shape(v)[1] > 1), None
    )
    if scores is not None:
        if scores.min() < 0 or not np.allclose(scores.sum(axis=1), 1, atol=1e-2):
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        said = [(str(classes[i]) if i < len(classes) else str(i)) for i in scores.argmax(axis=1)]
        shares: list[float | None] = [float(share) for share in scores.max(axis=1)]
    else:
        numbers = next((np.asarray(v, float) for v in outputs.values() if np.shape(v)[1:] == (1,)), None)
        if numbers is not None:
            told = [f"{value:.1f}" for value in numbers.ravel()]
            wanted = [f"{float(label):.1f}" for label in np.ravel(labels)] or [None] * len(told)
            return [Answer(said, None, truth) for said, truth in zip(told, wanted, strict=False)]
        flat = next((np.asarray(v) for v in outputs.values() if np.ndim(v) == 1), None)
        if flat is None:
            return []
        said = [v.decode() if isinstance(v, bytes) else str(v) for v in flat.tolist()]
        shares = [None] * len(said)
    truths = [str(label) for label in labels] or [None] * len(said)
    return [Answer(s, share, truth) for s, share, truth in zip(said, shares, truths, strict=False)]


def side_by_side(
    pictures: Sequence[np.ndarray], answers: Sequence[Answer], *, colour: bool, width: int = 100
) -> str:
    """Pictures in rows as wide as the terminal, each above its caption."""
    import numpy as np

    blocks = []
    for picture, answer in zip(pictures, answers, strict=False):
        pixels = int(np.shape(picture)[1])
        cell = max(pixels, len(answer.caption)) + 3
        lines = [line + " " * (cell - pixels) for line in draw(picture, colour=colour)]
        blocks.append(([*lines, answer.caption.ljust(cell)], cell))
    rows: list[str] = []
    while blocks:
        fitting, used = 0, 0
        while fitting < len(blocks) and (not fitting or used + blocks[fitting][1] <= width):
            used += blocks[fitting][1]
            fitting += 1
        height = max(len(lines) for lines, _ in blocks[:fitting])
        padded = [[" " * cell] * (height - len(lines)) + lines for lines, cell in blocks[:fitting]]
        rows += ["".join(parts).rstrip() for parts in zip(*padded, strict=True)]
        blocks = blocks[fitting:]
    return "\n".join(rows)
