#!/usr/bin/env python3
"""Writes the generated pages of the documentation: the tables of results, and the index of decisions.

`make pages` runs it; `tests/test_docs_pages.py` fails if a page is not what it would write.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DECISIONS = ROOT / "docs" / "decisions"
MAX_ROWS = 160  # larger results are not printed; they have a file and a plot

Row = dict[str, Any]


def pages() -> dict[Path, str]:
    """Return the text of every generated page by its path."""
    return {ROOT / "docs" / "results.md": results_page(), DECISIONS / "index.md": decisions_page()}


def results_page() -> str:
    files = sorted(RESULTS.rglob("*.json"))
    contents = [json.loads(file.read_text()) for file in files]
    lines = [
        "# Results",
        "",
        "`make pages` generates this page from the files in `benchmarks/results`; do not edit it. Column *commit*",
        "names the code that was measured. Older files do not record it; their column has the commit that added the",
        "result (*in*). A value that was measured several times is a median, followed by the 10th and the 90th (or",
        "99th) percentile. A decode case without percentiles was measured once.",
        "",
        "| result | date | commit | hardware | rows |",
        "|---|---|---|---|---|",
    ]
    for file, result in zip(files, contents, strict=True):
        name = file.relative_to(RESULTS).with_suffix("").as_posix()
        cells = (f"[{name}](#{anchor(name)})", result["date"], commit(result), hardware(result), len(result["rows"]))
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    for file, result in zip(files, contents, strict=True):
        lines += ["", *section(file, result)]
    return "\n".join(lines) + "\n"


def anchor(name: str) -> str:
    """Return the anchor that GitHub and mkdocs make for a heading with the name of a result."""
    return re.sub(r"[^\w\- ]", "", name).lower()


def commit(result: Row) -> str:
    return result.get("commit") or (f"in {result['recorded_in']}" if "recorded_in" in result else "–")


def hardware(result: Row) -> str:
    """Return the GPU, or the number of CPU cores; a result that is computed from others has no hardware."""
    machine = result.get("hardware", {})
    return machine.get("gpu") or (f"{machine['num_cores']} CPU cores" if machine else "–")


def section(file: Path, result: Row) -> list[str]:
    """Return the heading, the provenance and the table of one result file."""
    path = file.relative_to(ROOT).as_posix()
    versions = "".join(f", {package} {version}" for package, version in result.get("versions", {}).items())
    lines = [
        f"## {file.relative_to(RESULTS).with_suffix('').as_posix()}",
        "",
        f"[File](../{path}), {result['date']}, commit {commit(result)}, {hardware(result)}{versions}.",
        *([f"Note of the file: *{result['note']}*"] if "note" in result else []),
        "",
        "```",
        result["command"],
        "```",
        "",
    ]
    rows = table_rows(result["rows"])
    if len(rows) > MAX_ROWS:
        return [*lines, f"{len(rows)} rows, in the file."]
    return lines + table(rows)


def table_rows(rows: list[Row] | dict[str, Any]) -> list[Row]:
    """Return the rows of a result as flat dictionaries. Tests name their rows; each has a list of requests."""
    if isinstance(rows, list):
        return [flat(row) for row in rows]
    flattened = []
    for name, value in rows.items():
        value = value if isinstance(value, dict) else {"value": value}
        compared = value.get("requests")
        found = {f"{system} same tokens": same_tokens(each) for system, each in (compared or {}).items() if each}
        flattened.append({"test": name} | found if found else {"test": name} | flat(value))
    return flattened


def same_tokens(requests: list[Row]) -> str:
    """Return the tokens in common with the reference before the first tie, and the widest tie in logprobs."""
    ties = [request["margin"] for request in requests if request["margin"] is not None]
    tokens = f"{sum(request['same'] for request in requests)} of {sum(request['tokens'] for request in requests)}"
    return f"{tokens}, widest tie {max(ties):.2f}" if ties else tokens


def flat(row: Row) -> Row:
    """Return a row with one entry per column: percentiles are joined, nested entries get dotted names, lists are
    dropped.
    """
    out: Row = {}
    for name, value in row.items():
        if isinstance(value, dict) and "median" in value:
            out[name] = f"{number(value['median'])} ({number(value['p10'])} to {number(value['p90'])})"
        elif isinstance(value, dict):
            out |= {f"{name}.{key}": number(each) for key, each in flat(value).items()}
        elif not isinstance(value, list):
            out[name] = number(value)
    for name in [name.removesuffix("_p50") for name in out if name.endswith("_p50")]:
        parts = {suffix: out.pop(f"{name}_{suffix}", None) for suffix in ("p50", "p10", "p90", "p99")}
        others = [f"p{key[1:]} {value}" for key, value in parts.items() if key != "p50" and value is not None]
        out[name] = f"{parts['p50']} ({', '.join(others)})" if others else parts["p50"]
    return out


def number(value: Any) -> Any:
    """Return a number with four significant digits, a dash for None, and any other value unchanged."""
    if value is None:
        return "–"
    return (f"{value:.4g}" if abs(value) < 1e4 else round(value)) if isinstance(value, float) else value


def table(rows: list[Row]) -> list[str]:
    """Return a table of the columns that differ between rows, after a line with the columns that do not."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    same = [name for name in columns if len(rows) > 1 and len({str(row.get(name)) for row in rows}) == 1]
    shown = [name for name in columns if name not in same]
    lines = []
    if same:
        lines += [f"All rows: {', '.join(f'{name} {rows[0][name]}' for name in same)}.", ""]
    lines += [f"| {' | '.join(shown)} |", "|" + "---|" * len(shown)]
    return lines + [f"| {' | '.join(str(row.get(name, '–')) for name in shown)} |" for row in rows]


def decisions_page() -> str:
    """Return the index of decisions: one line with dates and title for each."""
    found = []
    for file in DECISIONS.glob("*.md"):
        if file.name == "index.md":
            continue
        text = file.read_text()
        title = re.search(r"^# (.*)$", text, re.MULTILINE)
        dates = re.findall(r"\b20\d\d-\d\d-\d\d\b", text.partition("\n## ")[0])
        if title is None or not dates:
            raise SystemExit(f"{file.relative_to(ROOT)}: a decision has a title and a date")
        found.append((dates[0], dates[-1] if len(dates) > 1 else "", title[1], file.name))
    lines = [
        "# Decisions",
        "",
        "Each record has context, decision, alternatives with numbers, and the condition under which to revisit it.",
        "`make pages` generates this page; to add a decision, add a file to this folder.",
        "",
        "| date | changed | decision |",
        "|---|---|---|",
        *(f"| {date} | {changed} | [{title}]({name}) |" for date, changed, title, name in sorted(found)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
