"""Kubernetes quantities ("500m", "2Gi"): https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["format_bytes", "format_quantity", "parse_quantity"]

_PATTERN = re.compile(
    r"^([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)(?:([eE][+-]?[0-9]+)|([KMGTPE]i|[numkMGTPE]))?$"
)
_FACTORS = {
    **{unit: Decimal(10) ** power for unit, power in zip("num", (-9, -6, -3), strict=True)},
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def parse_quantity(value: object) -> Decimal:
    """The number a quantity stands for (cores, bytes, devices); ValueError when it is none.

    >>> parse_quantity("2Gi"), parse_quantity("500m"), parse_quantity(3)
    (Decimal('2147483648'), Decimal('0.500'), Decimal('3'))
    """
    found = _PATTERN.match(str(value))
    if isinstance(value, bool) or not found:
        raise ValueError(f'quantity must be a number with a unit like "500m" or "2Gi", got {value!r}')
    number, exponent, unit = found.groups()
    if exponent:
        return Decimal(number + exponent)
    return Decimal(number) * _FACTORS[unit] if unit else Decimal(number)


def format_quantity(value: Decimal, *, binary: bool) -> str:
    """A quantity as a cluster writes it: in the largest unit, of 1024 or of 1000, in which it is a whole number.

    >>> format_quantity(Decimal(62914560), binary=True), format_quantity(Decimal("0.5"), binary=False)
    ('60Mi', '500m')
    """
    units = [f"{unit}i" for unit in "EPTGMK"] if binary else ["E", "P", "T", "G", "M", "k"]
    for unit in (*units, "", *("" if binary else "mun")):
        number = value / _FACTORS[unit] if unit else value
        if value and number == int(number):
            return f"{int(number)}{unit}"
    return f"{value:f}"


def format_bytes(count: float) -> str:
    """A number of bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
