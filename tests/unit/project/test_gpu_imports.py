"""What tests of GPUs import is there: they are not run where there is no GPU, and much they import inside functions."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = {"everserve": ROOT / "src", "everserve_bench": ROOT / "src", "tests": ROOT}
FILES = sorted((ROOT / "tests" / "gpu").glob("*.py"))


def names_in(path: Path) -> set[str]:
    """What a module defines or imports, inside an `if` too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def has(module: str, name: str) -> bool:
    base = FOLDERS[module.split(".", maxsplit=1)[0]].joinpath(*module.split("."))
    own = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if (base / name).is_dir() or (base / f"{name}.py").is_file():
        return True
    return own.is_file() and name in names_in(own)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_everything_is_there(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, alias.name) for node in imports for alias in node.names if node.module]
    ours = [(module, name) for module, name in ours if module.split(".")[0] in FOLDERS]
    assert [f"{module}.{name}" for module, name in ours if not has(module, name)] == []


def test_what_is_not_there_is_found() -> None:
    assert has("everserve.backends.cuda.ops.rows", "norm") and not has("everserve.backends.cuda.ops.rows", "rms_norm")
    assert has("everserve.backends.cuda.lanes", "send") and not has("everserve.backends.cuda.lanes", "sends")
