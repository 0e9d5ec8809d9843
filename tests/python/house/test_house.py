"""Holds every #include to the floors of the house (docs/architecture.md, section 2) and of its room (the room's README), every
import of sluice.torch to those of bindings/python/README.md, and what is written of files and functions to those that there
are."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
FLOORS = {"core": 1, "allocator": 2, "kernels": 2, "comm": 3, "offload": 3, "optim": 3, "engine": 4, "models": 5, "bindings": 6}
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
        if target == "mpi.h" and "mpi" not in path.parts:
            yield f"{path}: {target} belongs in comm/mpi, or every process needs MPI"


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
    ("comm/a.cc", "#include <mpi.h>"),
])
def test_a_violation_is_found(path, text):
    assert list(violations(pathlib.Path(path), text))


ROOMS = ["core", "allocator", "kernels", "comm", "offload", "optim", "engine", "models", "bindings/c", "bindings/cli"]


def floors_of(room):
    """The floor and the group of each name in the README's table; names that are joined by + are one group."""
    readme = (ROOT / room / "README.md").read_text()
    places = {}
    for floor, cell in re.findall(r"^\| (\d+) \| (.*) \|$", readme, re.MULTILINE):
        for group in re.findall(r"`[\w./-]+`(?: \+ `[\w./-]+`)*", cell):
            names = re.findall(r"`([\w./-]+)`", group)
            assert not places.keys() & set(names), f"{room} has {group} twice"
            places.update({name: (int(floor), names[0]) for name in names})
    return places


def place_of(path, places):
    """The floor and the group of a source: those of its name, else of its header, else of the innermost folder with one."""
    names = [str(path), str(path.with_suffix(".h")), *(f"{folder}/" for folder in path.parents)]
    return next((places[name] for name in names if name in places), None)


def floor_violations(room, path, text, places):
    own = place_of(path, places)
    if own is None:
        yield f"{room}/{path} stands on no floor of {room}/README.md"
        return
    for quote, target in INCLUDE.findall(text):
        if quote != '"' or not target.startswith(f"{room}/"):
            continue
        other = place_of(pathlib.Path(target).relative_to(room), places)
        if other is None or (other[1] != own[1] and other[0] >= own[0]):
            yield f"{room}/{path}, on floor {own[0]}, may not include {target}"


def sources_of(room):
    paths = [path.relative_to(ROOT / room) for path in sorted((ROOT / room).rglob("*.*"))]
    return [path for path in paths if path.suffix in {".h", ".cc", ".cu", ".cuh"}]


@pytest.mark.parametrize("room", ROOMS)
def test_includes_within_a_room_point_down(room):
    places, paths = floors_of(room), sources_of(room)
    assert len(paths) >= 7
    assert [v for path in paths for v in floor_violations(room, path, (ROOT / room / path).read_text(), places)] == []
    assert [name for name in places if not (ROOT / room / name).exists()] == []


@pytest.mark.parametrize("room, path, text", [
    ("models", "graph/program.cc", '#include "models/ops/linear.h"'),
    ("models", "graph/program.cc", '#include "models/data/tokens.h"'),
    ("models", "loose.cc", ""),
    ("core", "bytes.cc", '#include "core/log.h"'),
    ("engine", "store/pager.h", '#include "engine/step/gradients.h"'),
])
def test_a_violation_within_a_room_is_found(room, path, text):
    assert list(floor_violations(room, pathlib.Path(path), text, floors_of(room)))


# The imports inside of functions that are allowed, with their reasons.
LATE_IMPORTS = {
    ("_conversions", "transformers"): "it is needed for its own models alone, and takes seconds",
    ("_pretrained", "transformers"): "it is needed for its own models alone, and takes seconds",
}


def floors_of_torch():
    """The floor of each module in the README."""
    readme = (ROOT / "bindings" / "python" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", readme, re.MULTILINE)
    return {module: int(floor) for floor, modules in rows for module in re.findall(r"`(\w+)\.py`", modules)}


def imports_of(node):
    """The names that an import has: modules of its own package, and others."""
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
    header = "".join(path.read_text() for path in sorted((ROOT / "bindings/c").glob("sluice*.h")))
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
