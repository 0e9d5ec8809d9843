#!/usr/bin/env python3
"""Makes the table of docs/gpu.md from reports of scripts/gpu_check.sh: the properties checked on each GPU, and those
not checked yet.

    scripts/gpu_report.py [--write] [REPORT...]

Without arguments it reads docs/gpu/*.json, the published reports. It prints the table, or writes it into docs/gpu.md. For each
kind of GPU and each line, the newest report counts in which the line was checked, or its part failed. A report of the fake driver
is refused."""
import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_parts import PARTS, ROOT  # noqa: E402

DOCUMENT = ROOT / "docs" / "gpu.md"
HEAD = ["| what it shows | command | seen |", "| --- | --- | --- |"]


def read(path):
    report = json.loads(path.read_text())
    if report.get("version") != 1:
        raise SystemExit(f"gpu_report: {path} is no report of version 1 of scripts/gpu_check.sh")
    if report["is_fake"]:
        raise SystemExit(f"gpu_report: {path} is a report of the fake driver, which proves nothing about a GPU")
    return report


def seen(part, line, report):
    """Returns a report's text about a line; None where it has none."""
    for entry in report["parts"]:
        if entry["part"] == part.name and report["gpu"]:
            if line in entry["figures"]:
                return entry["figures"][line]
            if entry["outcome"] in ("failed", "timed out"):
                return f"{entry['outcome']}: {entry['why']}"
    return None


def cell(part, line, reports):
    """Returns the results for a line on each kind of GPU, the newest first."""
    newest = {}
    for report in sorted(reports, key=lambda report: report["date"]):
        if (told := seen(part, line, report)) is not None:
            newest[report["gpu"]["name"]] = f"{report['date'][:10]}, {report['gpu']['name']}, driver {report['driver']}: {told}"
    return "; ".join(sorted(newest.values(), reverse=True)).replace("|", "\\|") or "not yet seen"


def table(reports):
    rows = [f"| {title} | `{part.shown}` | {cell(part, line, reports)} |" for part in PARTS for line, title in part.lines.items()]
    return "\n".join(HEAD + rows) + "\n"


def with_table(document, made):
    """Returns the document with this table in place of its own."""
    lines = document.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    after = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "".join([*lines[:first], made, *lines[after:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", type=pathlib.Path, metavar="REPORT")
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    a = parser.parse_args()
    made = table([read(path) for path in a.reports or sorted((ROOT / "docs" / "gpu").glob("*.json"))])
    if a.write:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), made))
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
