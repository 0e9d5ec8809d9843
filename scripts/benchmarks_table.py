#!/usr/bin/env python3
"""Makes docs/benchmarks.md: a table of the valid claims, each with its figure, the compared figure, machine, date and command.

    scripts/benchmarks_table.py [--write]     prints the document, or writes it
    scripts/benchmarks_table.py --run ID      prints all measurements of a run

docs/benchmarks/runs.json has the measurements of each run, including rows that are no longer valid. docs/benchmarks/claims.json has
the claims, each of which names its run. A claim's numbers must occur in its run."""

import argparse
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
FOLDER = ROOT / "docs" / "benchmarks"
INTRODUCTION = """# Benchmarks

Machines differ and are noisy, so the ratios count, which are measured side by side in one run. Each claim has the command that reproduces
it, and its run, of which `scripts/benchmarks_table.py --run RUN` prints everything that was measured: further rows, settings, and how it
was done. `scripts/benchmarks_table.py --write` makes this page of [claims.json](benchmarks/claims.json) and
[runs.json](benchmarks/runs.json).
"""


def read():
    return (json.loads((FOLDER / name).read_text()) for name in ("claims.json", "runs.json"))


def machine_of(claim, run):
    return claim.get("machine", run["machine"])


def unfounded(claims, runs):
    """Yields a description of each claim that its run does not support."""
    for claim in (claim for section in claims["sections"] for claim in section["claims"]):
        run = runs["runs"].get(claim["run"])
        if run is None or machine_of(claim, run) not in runs["machines"]:
            yield f"'{claim['claim']}' names the run '{claim['run']}' and a machine that are not both there"
            continue
        measured = set(re.findall(r"\d[\d.,]*\d|\d", json.dumps([run["tables"], run["notes"]])))
        told = re.findall(r"\d[\d.,]*\d|\d", claim["figure"] + " " + claim["beside"])
        yield from (f"'{claim['claim']}': {number} does not stand in {claim['run']}" for number in told if number not in measured)


def cell(text):
    return text.replace("|", "\\|")


def section_text(section, runs):
    lines = [f"## {section['title']}", ""]
    if section["note"]:
        lines += [section["note"], ""]
    commands = []
    lines += ["| claim | figure | beside it | machine, date | run | command |", "| --- | --- | --- | --- | --- | --- |"]
    for claim in section["claims"]:
        run = runs["runs"][claim["run"]]
        command = claim.get("command", run["commands"][0])
        if command not in commands:
            commands.append(command)
        told = (claim["claim"], claim["figure"], claim["beside"], f"{machine_of(claim, run)}, {run['date']}", claim["run"])
        lines.append(f"| {' | '.join(map(cell, told))} | {commands.index(command) + 1} |")
    lines += ["", *(f"{number}. `{command}`" for number, command in enumerate(commands, 1)), ""]
    return "\n".join(lines)


def document(claims, runs):
    machines = "\n".join(f"- *{name}*: {what}" for name, what in runs["machines"].items())
    sections = "\n".join(section_text(section, runs) for section in claims["sections"])
    return f"{INTRODUCTION}\nMachines:\n\n{machines}\n\n{sections}"


def run_text(name, run, machines):
    lines = [f"{name}: {machines[run['machine']]}, {run['date']}", *(f"    {command}" for command in run["commands"])]
    for table in run["tables"]:
        lines += ["", f"| {' | '.join(table['columns'])} |", f"|{' --- |' * len(table['columns'])}"]
        lines += [f"| {' | '.join(row)} |" for row in table["rows"]]
    return "\n".join([*lines, *(f"\n{note}" for note in run["notes"])])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--run", metavar="ID", help="print all that this run measured")
    a = parser.parse_args()
    claims, runs = read()
    if a.run is not None:
        if a.run not in runs["runs"]:
            raise SystemExit(f"benchmarks_table: there is no run '{a.run}'; there are {', '.join(runs['runs'])}")
        print(run_text(a.run, runs["runs"][a.run], runs["machines"]))
        return
    if found := list(unfounded(claims, runs)):
        raise SystemExit("benchmarks_table: " + "\n".join(found))
    if a.write:
        DOCUMENT.write_text(document(claims, runs))
    else:
        print(document(claims, runs), end="")


if __name__ == "__main__":
    main()
