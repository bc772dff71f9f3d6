"""Four kinds of numbers that must never be taken for one another, and how each of them looks."""

import html
from dataclasses import dataclass

KINDS = {
    "published": "as others printed it",
    "recomputed": "arithmetic on published figures, prices and measured speeds: nothing ran that long",
    "measured": "on the machine that is named, with this program",
    "projected": "by the model in projection.py, with its error on settings that it has not seen: the least it can be",
}


@dataclass(frozen=True)
class Number:
    """A value of one kind.

    Attributes:
        error: relative, of a projection; None where nobody knows it.
    """

    value: float | None
    kind: str
    digits: int = 0
    prefix: str = ""
    unit: str = ""
    error: float | None = None

    def plain(self) -> str:
        if self.value is None:
            return "unknown"
        text = f"{self.prefix}{self.value:,.{self.digits}f}{self.unit}"
        return f"{text} ±{self.error:.0%} or more" if self.error is not None else text

    def markdown(self) -> str:
        if self.value is None:
            return "unknown"
        looks = {"published": "*{}* (p)", "recomputed": "= {}", "measured": "**{}**", "projected": "~ {}"}
        return looks[self.kind].format(self.plain())

    def html(self) -> str:
        if self.value is None:
            return '<span class="unknown">unknown</span>'
        return f'<span class="{self.kind}" title="{self.kind}: {KINDS[self.kind]}">{html.escape(self.plain())}</span>'


def markdown(cell: object) -> str:
    return cell.markdown() if isinstance(cell, Number) else str(cell)


def to_html(cell: object) -> str:
    return cell.html() if isinstance(cell, Number) else html.escape(str(cell))
