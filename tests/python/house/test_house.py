"""Holds every #include to the floors of the house (docs/architecture.md, section 2), every import of sluice.torch to those of
bindings/python/README.md, and what is written of files and functions to those that there are."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
FLOORS = {"core": 1, "allocator": 2, "comm": 2, "kernels": 2, "offload": 3, "optim": 3, "engine": 4, "models": 5, "bindings": 6}
VENDOR_FOLDERS = {"cuda", "nccl"}
VENDOR_HEADER = re.compile(r"(cuda|cublas|cudnn|nccl)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def violations(path, text):
    room = path.parts[0]
    for quote, target in INCLUDE.findall(text):
        other = target.split("/")[0]
        if quote == '"' and other in FLOORS and other != room and FLOORS[other] >= FLOORS[room]:
            yield f"{path}: {room} may not include {target}"
        if VENDOR_HEADER.match(target) and not VENDOR_FOLDERS & set(path.parts):
            yield f"{path}: {target} belongs in a folder named cuda or nccl"
        if target.startswith(("dnnl", "oneapi/dnnl")) and "dnnl" not in path.parts:
            yield f"{path}: {target} belongs in kernels/dnnl, or every process loads the matrix library"


def sources():
    for room in FLOORS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in {".h", ".cc", ".cu", ".cuh"}:
                yield path.relative_to(ROOT), path.read_text()


def test_includes_point_down():
    found = list(sources())
    assert len(found) > 50
    assert [v for path, text in found for v in violations(path, text)] == []


@pytest.mark.parametrize("path, text", [
    ("core/a.h", '#include "engine/engine.h"'),
    ("offload/a.h", '#include "optim/optimizer.h"'),
    ("engine/a.cc", "#include <cuda_runtime.h>"),
    ("models/a.cc", "#include <dnnl.h>"),
])
def test_a_violation_is_found(path, text):
    assert list(violations(pathlib.Path(path), text))


# What is imported inside of functions, and why.
LATE_IMPORTS = {
    ("_conversions", "transformers"): "it is needed for its own models alone, and takes seconds",
    ("_pretrained", "transformers"): "it is needed for its own models alone, and takes seconds",
}


def floors_of_torch():
    """The floor of each module, as the README has it."""
    readme = (ROOT / "bindings" / "python" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", readme, re.MULTILINE)
    return {module: int(floor) for floor, modules in rows for module in re.findall(r"`(\w+)\.py`", modules)}


def imports_of(node):
    """What an import names: modules of its own package, and the others."""
    if isinstance(node, ast.Import):
        return [], [alias.name.split(".")[0] for alias in node.names]
    if node.level == 1:
        return [node.module] if node.module else [alias.name for alias in node.names], []
    return [], [node.module.split(".")[0]] if node.level == 0 else []


def torch_violations(module, text, floors):
    tree = ast.parse(text)
    top = set(map(id, tree.body))
    for node in (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))):
        own, others = imports_of(node)
        yield from (f"{module} may not import {other}" for other in own if floors[other] >= floors[module])
        if id(node) not in top:
            late = [other for other in own + others if (module, other) not in LATE_IMPORTS]
            yield from (f"{module} imports {other} inside of a function or a condition" for other in late)


def test_modules_of_sluice_torch_import_from_lower_floors():
    floors, folder = floors_of_torch(), ROOT / "bindings" / "python" / "sluice" / "torch"
    sources = {path.stem: path.read_text() for path in folder.glob("*.py")}
    assert floors.keys() == sources.keys()
    assert [v for module, text in sources.items() for v in torch_violations(module, text, floors)] == []


@pytest.mark.parametrize("module, text", [
    ("_homes", "from ._session import Session"),
    ("_units", "def f():\n    from . import _checks"),
    ("_wrap", "if TYPE_CHECKING:\n    from ._homes import Home"),
    ("_homes", "def f():\n    import transformers"),
])
def test_a_violation_in_sluice_torch_is_found(module, text):
    assert list(torch_violations(module, text, floors_of_torch()))


def test_no_source_is_longer_than_the_house_allows():
    files = [path for room in FLOORS for path in (ROOT / room).rglob("*") if path.suffix in {".h", ".cc", ".c", ".py"}]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 200
    assert {path: lines for path, lines in lengths.items() if lines > 450} == {}


def test_every_room_has_a_readme():
    rooms = [room for room in FLOORS if (ROOT / room).is_dir()]
    assert [room for room in rooms if not (ROOT / room / "README.md").is_file() and room != "bindings"] == []


def test_the_c_header_names_functions_that_there_are():
    header = (ROOT / "bindings/c/sluice.h").read_text()
    declared = set(re.findall(r"^SLUICE_API [^(;]*?(sluice_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 30
    assert set(re.findall(r"(sluice_\w+)\(", header)) - declared == set()


@pytest.mark.parametrize("room", ["bindings/c", "bindings/python"])
def test_the_readme_of_a_door_names_its_files(room):
    text = (ROOT / room / "README.md").read_text()
    files = [path for path in (ROOT / room).rglob("*.*") if path.suffix in {".cc", ".py"} and "examples" not in path.parts]
    named = set(re.findall(r"[`/]([\w*]+\.[\w*]+)`", text))
    assert len(files) >= 7
    assert [f.name for f in files if not named & {f.name, f"{f.stem}.*"} and f.name != "__init__.py"] == []
