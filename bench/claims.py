"""Claims beside their limits, as every benchmark here shows and keeps them."""

from __future__ import annotations


class Claims:
    """What is shown and kept."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, name: str, value: float | None, unit: str, limit: float, at_least: bool, note: str = "") -> None:
        """One claim beside its limit; None is not measured, and a note beside a value says why it is not judged."""
        met = None if value is None or note else (value >= limit if at_least else value <= limit)
        verdict = {True: "met", False: "NOT MET", None: f"not judged: {note}"}[met]
        if value is None:
            print(f"{name:<62} not measured: {note}")
        else:
            bound = "at least" if at_least else "at most"
            print(f"{name:<62} {value:8.2f} {unit}  ({bound} {limit:g} {unit})  {verdict}")
        self.rows.append(
            {
                "claim": name,
                "value": value,
                "unit": unit,
                "limit": limit,
                "at_least": at_least,
                "met": met,
                "note": note,
            }
        )
