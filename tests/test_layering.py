"""The rooms of the package import downwards only, and the oracle imports nothing but torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "smat"

# Lowest first: a room may import from itself and from every room before it.
ROOMS = [
    "extras",
    "console",
    "machine",
    "shapes",
    "geometry",
    "masks",
    "schedules",
    "minimal",
    "distributed",
    "ops",
    "layers",
    "models",
    "smat",  # the names that `import smat` gives
    "data",
    "tasks",
    "training",
    "experiments",
    "bench",
    "report",
    "cli",
    "__main__",
]
# A task makes examples and says what is correct; it must not know who answers.
ALSO_FORBIDDEN = {name: {"layers", "models", "smat"} for name in ("data", "tasks")}
ORACLE_MAY_IMPORT = {"torch", "__future__", "collections", "math", "typing"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Find a module's room; a room's own commands count as command line."""
    parts = module.split(".")
    if len(parts) == 1:
        return "smat"
    return "cli" if parts[-1] == "cli" else parts[1]


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Yield every module that a source imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                depth = node.level - 1 if is_package else node.level
                parents = module.split(".")
                base = ".".join([*parents[: len(parents) - depth], *filter(None, [base])])
            if base == "smat":  # `from smat import x`: a room, or a name of the facade
                rooms = [alias.name for alias in node.names]
                yield from (f"smat.{name}" if name in ROOMS else "smat" for name in rooms)
            else:
                yield base


def forbidden_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """List the imports of a module that go up, or that its room is denied."""
    room = room_of(module)
    return [
        imported
        for imported in imported_modules(source, module, is_package)
        if imported.split(".")[0] == "smat"
        and (
            ROOMS.index(room_of(imported)) > ROOMS.index(room)
            or room_of(imported) in ALSO_FORBIDDEN.get(room, set())
        )
    ]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_module_imports_from_a_room_above_its_own(path):
    module = module_name(path)
    assert room_of(module) in ROOMS, f"{module} is in no known room"
    assert forbidden_imports(path.read_text(), module, path.name == "__init__.py") == []


def test_the_oracle_imports_only_torch():
    path = PACKAGE / "ops" / "smat" / "reference.py"
    imported = {name.split(".")[0] for name in imported_modules(path.read_text(), "x", False)}
    assert imported <= ORACLE_MAY_IMPORT


@pytest.mark.parametrize(
    ("module", "source", "forbidden"),
    [
        ("smat.geometry.field", "from smat.masks.mask import SMatMask", ["smat.masks.mask"]),
        ("smat.masks.mask", "def f():\n    import smat.ops.causal", ["smat.ops.causal"]),
        ("smat.masks.mask", "from ..ops import causal", ["smat.ops"]),
        ("smat.ops.decode", "from smat import SMatMask", ["smat"]),
        ("smat.ops.decode", "from smat import layers", ["smat.layers"]),
        ("smat.tasks.recall", "from smat.models import heads", ["smat.models"]),
        ("smat.tasks.recall", "from smat.masks import vc", []),
        ("smat.ops.causal", "import torch\nfrom . import backend\nfrom smat.masks import mask", []),
        ("smat.bench.cli", "from smat.report import tables", []),
        ("smat.bench.tabulate", "from smat.report import tables", ["smat.report"]),
    ],
)
def test_the_check_itself_sees_what_it_should(module, source, forbidden):
    assert forbidden_imports(source, module) == forbidden
