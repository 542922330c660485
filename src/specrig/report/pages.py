"""Write the three files of a report: summary.json, summary.md and report.html."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from specrig.analysis.intervals import MIN_LAUNCHES
from specrig.report.forest import forest
from specrig.report.markdown import markdown
from specrig.report.view import view

FILES = ("summary.json", "summary.md", "report.html")


def html(summary: dict[str, Any]) -> str:
    """The self-contained page: no script, no external resource, light and dark, printable."""
    import jinja2

    source = resources.files("specrig.report").joinpath("templates/report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    shown = view(summary)
    caveat = False
    for table in shown["tables"]:
        table["svg"] = forest(table["forest"], summary["margin"], f"Decode speed-up, {table['title']}")
        items = [
            item
            for group in table["groups"]
            for row in group["rows"]
            for item in [*row["lengths"], row["over_reference"], row["end_to_end"], row["throughput"]]
        ]
        caveat = caveat or any(item["caveat"] for item in items if item)
    rules = sorted({rule for row in shown["cells"] for rule in row["unknown"]})
    return environment.from_string(source).render(
        **shown, any_caveat=caveat, unknown_rules=rules, min_launches=MIN_LAUNCHES
    )


def write(summary: dict[str, Any], folder: Path) -> list[Path]:
    """Write the files into ``folder``, each by rename, and return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    import msgspec

    from specrig.runs.lines import encoded

    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "summary.json": msgspec.json.format(encoded(summary), indent=1) + b"\n",
        "summary.md": markdown(summary).encode(),
        "report.html": html(summary).encode(),
    }
    out = []
    for name in FILES:
        path = folder / name
        scratch = folder / f".{name}.new"
        scratch.write_bytes(data[name])
        scratch.replace(path)
        out.append(path)
    return out
