import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.imports import LEVELS, PACKAGE, ROOT, folder_of, imported_folders, imported_modules, sources

PYTHON_FILES = [path for name in (PACKAGE, "recipes", "benchmarks", "plugins") for path in (ROOT / name).rglob("*.py")]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_folder_has_a_level() -> None:
    folders = {folder_of(path) for path in sources()} - {""}
    assert folders <= set(LEVELS), f"give {folders - set(LEVELS)} a level in docs/architecture.md and in imports.py"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_a_file_imports_lower_levels_or_its_own_folder(path: Path) -> None:
    folder = folder_of(path)
    if not folder:
        return
    wrong = {other for other in imported_folders(path) if other != folder and LEVELS[other] >= LEVELS[folder]}
    assert not wrong, f"{module_of(path)} (level {LEVELS[folder]}) imports {wrong}"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_only_distributed_imports_torchrec_distributed(path: Path) -> None:
    imported = imported_modules(path)
    if folder_of(path) != "distributed":
        assert not [name for name in imported if name.startswith("torchrec.distributed")]
    assert not [name for name in imported if name.split(".")[0] in ("recipes", "benchmarks", "plugins", "tests")]
    assert not [name for name in imported if name.split(".")[0] in ("pickle", "dill", "cloudpickle")]


@pytest.mark.parametrize("path", PYTHON_FILES, ids=module_of)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400, "one concern a file: split it"
    assert path.name != "utils.py"


def test_importing_the_package_is_lean() -> None:
    code = "import sys, torchrec_adaptive; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "torchrec", "starlette", "uvicorn", "torchx", "triton", "tensorboard", "prometheus_client"}
    assert not heavy & set(loaded)


def test_a_serving_process_loads_no_trainer() -> None:
    code = "import sys, torchrec_adaptive.serving.server; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    # torchrec itself loads its train pipelines at import; what is ours to keep out is the trainer and the launcher
    assert not [m for m in loaded if m.startswith(("torchrec_adaptive.training", "torchx", "tensorboard"))]


def test_public_names_are_importable_from_the_top() -> None:
    package = importlib.import_module(PACKAGE)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    for later in ("UnifiedEmbeddingCollection", "SelectiveFP8Linear"):
        assert not hasattr(package, later)


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_docstring_examples_run(path: Path) -> None:
    result = doctest.testmod(importlib.import_module(module_of(path)), verbose=False)
    assert result.failed == 0


def public_functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
    found = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node for node in found if not node.name.startswith("_")]


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_public_functions_are_typed_and_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or path.name == "__init__.py", "a file says what it is for"
    for function in public_functions(tree):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        if "triton.jit" not in [ast.unparse(decorator) for decorator in function.decorator_list]:  # Triton's own types
            assert function.returns is not None, f"{function.name} has no return type"
            assert not untyped, f"{function.name}: {untyped} have no type"
        assert ast.get_docstring(function), f"{function.name} has no docstring"


def test_torchx_components_are_plain() -> None:
    for path in (ROOT / "recipes").glob("*_component.py"):
        text = path.read_text()
        assert "from __future__ import annotations" not in text
        assert not re.search(r":\s*[\w\[\]]+\s*\|", text), f"{path.name}: X | Y breaks the TorchX command line"


def test_every_gpu_test_is_marked() -> None:
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert "pytest.mark.gpu" in path.read_text(), f"{path.name} lacks the gpu mark"


def test_nothing_shipped_names_a_place_outside() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    outside = re.compile("|".join(["\\.\\./" + "shared", "/wo" + "rk/main", "(?<!torch)\\.lib" + "rary"]))
    for name in filter(None, listed.split("\0")):
        text = (ROOT / name).read_text(errors="ignore") if (ROOT / name).is_file() else ""
        assert not outside.search(text), f"{name} names a path outside the project"


def test_signatures_of_the_package_resolve() -> None:
    for name in ("request.batch", "request.rows", "request.schema"):
        module = importlib.import_module(f"{PACKAGE}.{name}")
        for _, function in inspect.getmembers(module, inspect.isfunction):
            assert inspect.get_annotations(function, eval_str=True) is not None
