"""Holds the documents to what there is: links lead somewhere, the guide names functions and messages of the sources, and pages stay
as short as they are meant to be."""

import functools
import re
import subprocess

import pytest
from support.sluice_process import SOURCE

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ROOMS = ["core", "allocator", "kernels", "comm", "offload", "optim", "engine", "models", "bindings"]
GUIDE = SOURCE / "docs" / "guide"


def documents():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=SOURCE, capture_output=True, text=True, check=True
    )
    return [path for path in (SOURCE / line for line in listed.stdout.splitlines()) if path.is_file()]


def prose(text):
    """A document without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """Returns the names by which links may name a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path, text):
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        if not there.exists():
            yield f"{path}: {target} is not there"
        elif anchor and anchor not in anchors(text if there == path else there.read_text()):
            yield f"{path}: {target} names no heading"


def test_links_lead_to_what_there_is():
    found = documents()
    assert len(found) > 30
    assert [link for path in found for link in dead_links(path, path.read_text())] == []


@pytest.mark.parametrize("text", ["[a](missing.md)", "[a](../ranks.md#no-such-heading)", "[a](#none)\n# One"])
def test_a_dead_link_is_found(text):
    assert list(dead_links(GUIDE / "ranks.md", text))


def test_pages_of_the_guide_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in GUIDE.glob("*.md")}
    assert len(lengths) >= 9
    assert {name: lines for name, lines in lengths.items() if lines > 150} == {}


def test_the_guide_names_functions_of_the_c_header():
    header = "".join(path.read_text() for path in (SOURCE / "bindings" / "c").glob("sluice*.h"))
    named = {name for path in GUIDE.glob("*.md") for name in re.findall(r"\bsluice_(?:engine|model|plan|ranks)\w*", path.read_text())}
    assert len(named) > 10
    assert {name for name in named if not re.search(rf"\b{name}\b", header)} == set()


@functools.cache
def sources():
    """All sources, in which a text that is written in several literals is one."""
    files = [path for room in ROOMS for path in sorted((SOURCE / room).rglob("*")) if path.suffix in {".cc", ".h", ".py"}]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))


def unknown_messages(text):
    """Yields the parts of messages in a table's first column that no source has. `...` stands for what differs."""
    for cell in re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE):
        if not cell.endswith("numpy)"):  # the system's and numpy's
            for message in re.findall(r"`([^`]+)`", cell):
                yield from (part for part in message.split("...") if part.strip() and part.strip() not in sources())


def test_messages_of_the_guide_are_those_of_the_sources():
    text = (GUIDE / "troubleshooting.md").read_text()
    assert len(re.findall(r"^\| `", text, re.MULTILINE)) > 50
    assert list(unknown_messages(text)) == []
    assert list(unknown_messages("| `nobody says ... such things` | x |\n")) == ["nobody says ", " such things"]


def test_decisions_are_numbered_short_and_listed():
    pages = sorted((SOURCE / "docs" / "decisions").glob("[0-9]*.md"))
    index = (SOURCE / "docs" / "decisions" / "README.md").read_text()
    assert [int(path.name[:4]) for path in pages] == list(range(1, len(pages) + 1))
    for number, path in enumerate(pages, 1):
        text = path.read_text()
        title = re.match(rf"# {number}\. (.+)\n", text)
        assert title and f"[{number}. {title[1]}]({path.name})" in index, path
        assert 100 <= len(text.split()) <= 300, f"{path} has {len(text.split())} words"


def test_the_architecture_is_read_in_one_sitting():
    assert len((SOURCE / "docs" / "architecture.md").read_text().split()) <= 4000


def test_files_that_the_architecture_and_decisions_name_are_there():
    pages = [SOURCE / "docs" / "architecture.md", *(SOURCE / "docs" / "decisions").glob("*.md")]
    rooms = "|".join([*ROOMS, "bench", "docs", "scripts", "tests"])
    own = {(path.name, name) for path in pages for name in re.findall(rf"`((?:{rooms})/[\w./-]+\.\w+)`", path.read_text()) if "NAME" not in name}
    assert len(own) > 20
    assert {pair for pair in own if not (SOURCE / pair[1]).exists()} == set()
