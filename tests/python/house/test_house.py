"""Holds every #include to the floors of the house (docs/architecture.md, section 2), the folders of a room and
the modules of sluice.torch to one direction, and what is written of files and functions to those that there are."""

import ast
import inspect
import pathlib
import re
import shutil
import subprocess

import pytest
import torch

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
    ("core/a.h", '#include "engine/steps/engine.h"'),
    ("offload/a.h", '#include "optim/optimizer.h"'),
    ("engine/a.cc", "#include <cuda_runtime.h>"),
    ("models/a.cc", "#include <dnnl.h>"),
    ("comm/a.cc", "#include <mpi.h>"),
])
def test_a_violation_is_found(path, text):
    assert list(violations(pathlib.Path(path), text))


VENDORS = {"cuda", "dnnl", "mpi"}  # folders of plug-ins, each a part of the folder that it lies in


def folder_of(path):
    folder = pathlib.PurePosixPath(path).parent
    return str(folder.parent if folder.name in VENDORS else folder)


def folders_included(texts):
    """By folder, the other folders of its room that its sources include. texts: by path."""
    included = {}
    for path, text in texts.items():
        targets = [folder_of(target) for quote, target in INCLUDE.findall(text) if quote == '"' and "/" in target]
        room = path.split("/")[0]
        inside = {target for target in targets if target.split("/")[0] == room}
        included.setdefault(folder_of(path), set()).update(inside - {folder_of(path)})
    return included


def cycle_in(graph):
    """Nodes each of which includes the next one, and the last one the first; none: there is no cycle."""
    done, way = set(), []

    def visit(node):
        if node in way:
            return way[way.index(node):]
        if node in done:
            return []
        way.append(node)
        for other in sorted(graph.get(node, ())):
            if cycle := visit(other):
                return cycle
        done.add(way.pop())
        return []

    return next((cycle for node in sorted(graph) if (cycle := visit(node))), [])


def test_folders_of_a_room_include_each_other_one_way():
    graph = folders_included({path.as_posix(): text for path, text in sources()})
    assert {"engine/memory", "engine/plan", "models/graph"} <= graph.keys()
    assert cycle_in(graph) == []


def test_a_cycle_of_folders_is_found():
    texts = {"engine/plan/a.h": '#include "engine/memory/b.h"', "engine/memory/b.cc": '#include "engine/layout/c.h"',
             "engine/layout/c.h": '#include "engine/plan/a.h"'}
    assert sorted(cycle_in(folders_included(texts))) == ["engine/layout", "engine/memory", "engine/plan"]


# The imports inside of functions that are allowed, with their reasons.
LATE_IMPORTS = {
    ("_weights", "transformers"): "it is needed for its own models alone, and takes seconds",
    ("_wrap", "transformers"): "it is needed for its own models alone, and takes seconds",
}


def imports_of(node):
    """The names that an import has: modules of its own package, and others."""
    if isinstance(node, ast.Import):
        return [], [alias.name.split(".")[0] for alias in node.names]
    if node.level == 1:
        return [node.module] if node.module else [alias.name for alias in node.names], []
    return [], [node.module.split(".")[0]] if node.level == 0 else []


def imports(module, text):
    """The modules of its own package that a module imports, and what it imports elsewhere than at its top against the rule."""
    tree = ast.parse(text)
    top = set(map(id, tree.body))
    own, late = set(), []
    for node in (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))):
        mine, others = imports_of(node)
        own |= set(mine)
        if id(node) not in top:
            late += [other for other in mine + others if (module, other) not in LATE_IMPORTS]
    return own, late


def test_modules_of_sluice_torch_import_each_other_one_way_and_at_the_top():
    folder = ROOT / "bindings" / "python" / "sluice" / "torch"
    found = {path.stem: imports(path.stem, path.read_text()) for path in folder.glob("*.py")}
    assert {"_wrap", "_session"} <= found.keys()
    assert cycle_in({module: own for module, (own, _) in found.items()}) == []
    assert {module: late for module, (_, late) in found.items() if late} == {}


# Names of PyTorch that begin with _, which may change with each of its versions, and for which it has no others.
PRIVATE = set(
    "_C _amp_foreach_non_finite_check_and_unscale_ _apply _autograd _backward_hooks _call_impl _compiled_call_impl _composable "
    "_current_graph_task_id _dynamo _engine_run_backward _execution_engine _flat_weights _foreach_ _foreach_norm _foreach_supported_types "
    "_foreach_utils _functorch _grouped_mm _higher_order_ops _hooks _load_from_state_dict _make_wrapper_subclass _modules _non_persistent_buffers_set "
    "_post_accumulate_grad_hooks _python_dispatch _schema _set_static_graph _step_supports_amp_scaling _subclasses _to_copy "
    "_top_saved_tensors_default_hooks _version".split()
)
OTHERS = {  # of transformers, of namedtuples, the end of zeros_like, and attributes that the package gives to modules, parameters and its own objects
    "_from_config", "_get_dtype_plan", "_init_weights", "_is_hf_initialized", "_keys_to_ignore_on_load_unexpected", "_reset_parameters",
    "_fields", "_make", "_like",
    "_before_wrap", "_cut_of", "_slot", "_sluice", "_sluice_drawn", "_sluice_pipeline", "_was",
}  # fmt: skip
# What has attributes that the package's objects may share by chance: its names there are PyTorch's, unless they are of `self`.
PLACES = (torch.nn.Module(), torch.ones(1), torch.optim.SGD([torch.ones(1)]), torch.nn.parallel.DistributedDataParallel, torch.ops.aten)


def is_private(name):
    return name.isidentifier() and name.startswith("_") and not name.startswith("__") and name != "_"


def is_of_itself(node):
    """Whether an attribute is of the object whose method the node is in."""
    return ast.unparse(node.value) in ("self", "cls", "super()")


def given_names(node):
    """The private names that a node gives something of the package."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        names = [node.name]
    elif isinstance(node, ast.Name):
        names = [node.id] if isinstance(node.ctx, ast.Store) else []
    else:
        names = [node.attr] if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_itself(node) else []
    return set(filter(is_private, names))


def used_names(node, given):
    """The private names in a node that are not the package's own."""
    if isinstance(node, ast.Attribute):
        names = [node.attr] if node.attr not in given or (not is_of_itself(node) and is_of_pytorch(node.attr)) else []
    elif isinstance(node, ast.Constant):
        names = node.value.split(".") if isinstance(node.value, str) else []
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        whole = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        names = [] if getattr(node, "level", 0) else ".".join(whole).split(".")
    else:  # a method that PyTorch calls
        methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)] if isinstance(node, ast.ClassDef) and node.bases else []
        names = filter(is_of_pytorch, methods)
    return set(filter(is_private, names))


def is_of_pytorch(name):
    return any(hasattr(place, name) for place in PLACES) or f'"{name}"' in inspect.getsource(torch.amp.grad_scaler)


def private_names(*texts):
    """The private names of others that sources use."""
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    given = set().union(*map(given_names, nodes))
    return set().union(*(used_names(node, given) for node in nodes))


def test_sluice_torch_uses_few_private_names_of_pytorch():
    package = ROOT / "bindings" / "python" / "sluice"
    assert private_names(*(path.read_text() for path in package.rglob("*.py"))) == PRIVATE | OTHERS


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def _apply(): pass\nchild._apply()", {"_apply"}),
        ("def _foreach_norm(): pass\ntorch.ops.aten._foreach_norm()", {"_foreach_norm"}),
        ("self._parameters = 1\nchild._parameters", {"_parameters"}),
        ("def _apply(): pass\noverride(module, '_apply')", {"_apply"}),
        ("class A(B):\n def _step_supports_amp_scaling(self): pass", {"_step_supports_amp_scaling"}),
        ("from torch._C import _this\nfrom ._that import _other", {"_C", "_this"}),
        ("class A:\n def _values(self): self._buffers = self._values()", set()),
        ("class A:\n def f(self): self._mine = 1\na._mine", set()),
    ],
)
def test_which_private_names_are_others(text, names):
    assert private_names(text) == names


@pytest.mark.parametrize("folder", ["bench", "bindings/python/sluice", "examples", "scripts", "tests"])
def test_python_files_can_be_read(folder):
    """No test runs what measures beside peers."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths or folder == "scripts"
    for path in paths:
        ast.parse(path.read_text(), str(path))


def test_every_room_has_a_readme():
    rooms = [room for room in FLOORS if (ROOT / room).is_dir()]
    assert [room for room in rooms if not (ROOT / room / "README.md").is_file() and room != "bindings"] == []


@pytest.mark.parametrize("room", ["bindings/c", "bindings/python"])
def test_the_readme_of_a_door_names_its_files(room):
    text = (ROOT / room / "README.md").read_text()
    files = [path for path in (ROOT / room).rglob("*.*") if path.suffix in {".cc", ".py"} and "examples" not in path.parts]
    named = set(re.findall(r"[`/]([\w*]+\.[\w*]+)`", text))
    assert len(files) >= 7
    assert [f.name for f in files if not named & {f.name, f"{f.stem}.*"} and f.name != "__init__.py"] == []


@pytest.mark.skipif(shutil.which("clang-tidy-16") is None, reason="there is no clang-tidy (scripts/setup.sh --tidy)")
def test_tidy_refuses_a_room_that_there_is_not_beside_others():
    done = subprocess.run([ROOT / "scripts" / "tidy.sh", "core", "cor"], capture_output=True, text=True)
    assert done.returncode == 2 and "no room is named so: cor\n" in done.stderr
