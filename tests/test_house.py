"""Rules of the source tree: language of docstrings, sizes of files and signatures, imports."""

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import SLOW

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "reluformer"
KERNELS = PACKAGE / "ops" / "backends" / "triton"

MAX_LINES = 500
MAX_PARAMETERS = 8
MAX_KERNEL_ARGUMENTS = 30
MIN_COMMENTS_PER_100_LINES = 8

# Public functions have one keyword argument for each option of the operation.
MANY_PARAMETERS = {
    "reluformer/context_parallel/sharded_attention.py::attention",
    "reluformer/nn/core.py::forward",
    "reluformer/nn/core.py::packed",
    "reluformer/nn/multihead.py::__init__",
    "reluformer/nn/transformer.py::__init__",
    "reluformer/ops/api.py::attention",
    "reluformer/ops/api.py::relu_attention",
    "reluformer/ops/paged_cache.py::__init__",
    "reluformer/ops/paged_cache.py::decode_attention",
    "reluformer/ops/varlen.py::relu_attention_varlen",
}
# Options of a command are the parameters of its function, and operators of torch have the flat
# signature of their schema.
FLAT_SIGNATURES = ("reluformer/cli/", "reluformer/ops/backends/triton/operators.py")

# Packages and modules that are not installed everywhere, and modules that import them.
OPTIONAL_MODULES = (
    "fcntl",
    "matplotlib",
    "onnxscript",
    "reluformer.ops.backends.triton.hopper",
    "reluformer.ops.backends.triton.portable",
    "reluformer.ops.backends.triton.prepared",
    "reluformer.ops.backends.triton.run_append",
    "reluformer.ops.backends.triton.run_backward",
    "reluformer.ops.backends.triton.run_decode",
    "reluformer.ops.backends.triton.run_forward",
    "reluformer.ops.backends.triton.run_packed",
    "reluformer.ops.backends.triton.versions",
    "tensorboard",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.tensorboard",
    "transformers",
    "triton",
)
# These keep the start of the command line and of the package fast.
LAZY_IMPORTERS = (
    "reluformer/__init__.py",
    "reluformer/__main__.py",
    "reluformer/cli/",
    "reluformer/console.py",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> list[Path]:
    """Python files of folders, in a stable order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def parameters(function: Function) -> list[str]:
    """Names of all parameters without self, cls and the context of an autograd function."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in every if each.arg not in ("self", "cls", "ctx")]


def is_kernel(function: Function) -> bool:
    """Whether a decorator compiles the function for a GPU."""
    texts = (ast.unparse(decorator) for decorator in function.decorator_list)
    return any(text.split("(")[0].endswith("jit") for text in texts)


def is_overload(function: Function) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in function.decorator_list)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def comments(path: Path) -> Iterator[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    for token in tokens:
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def kernel_files() -> list[Path]:
    return [path for path in KERNELS.rglob("*.py") if any(is_kernel(f) for f in functions(path))]


def test_slow_tests_are_listed_under_their_present_names() -> None:
    for entry in SLOW:
        path, _, function = entry.partition("::")
        assert (ROOT / path).exists(), entry
        if function:
            assert f"def {function}" in (ROOT / path).read_text(encoding="utf-8"), entry


@pytest.mark.parametrize("folder", ["reluformer", "benchmarks", "tests", "tools"])
def test_files_have_at_most_500_lines(folder: str) -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in sources(folder)}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_no_docstring_begins_with_of() -> None:
    found = [
        f"{name(path)}:{line}: {text[:60]}"
        for path in sources("reluformer", "benchmarks", "tools")
        for line, text in docstrings(path)
        if text.startswith("Of ")
    ]
    assert not found, "\n".join(found)


def test_examples_are_in_a_section_that_the_site_shows_as_code() -> None:
    found = [
        f"{name(path)}:{line}"
        for path in sources("reluformer")
        for line, text in docstrings(path)
        if ">>> " in text and "Examples:\n" not in text
    ]
    assert not found, "\n".join(found)


def test_counts_are_named_instead_of_so_many() -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()[:80]}"
        for path in sources("reluformer", "benchmarks", "tools")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if "so many " in line.lower()
    ]
    assert not found, "\n".join(found)


def test_host_functions_have_at_most_8_parameters() -> None:
    found = [
        f"{name(path)}::{function.name}: {len(parameters(function))}"
        for path in sources("reluformer", "benchmarks", "tools")
        for function in functions(path)
        if len(parameters(function)) > MAX_PARAMETERS
        and not is_kernel(function)
        and not is_overload(function)
        and not name(path).startswith(FLAT_SIGNATURES)
        and f"{name(path)}::{function.name}" not in MANY_PARAMETERS
    ]
    assert not found, "\n".join(found)


def test_the_exceptions_for_parameters_are_still_needed() -> None:
    defined = {
        f"{name(path)}::{function.name}": len(parameters(function))
        for path in sources("reluformer")
        for function in functions(path)
        if not is_overload(function)
    }
    assert all(defined.get(exception, 0) > MAX_PARAMETERS for exception in MANY_PARAMETERS)


def test_kernels_have_at_most_30_arguments() -> None:
    found = [
        f"{name(path)}::{function.name}: {len(parameters(function))}"
        for path in sources("reluformer", "benchmarks")
        for function in functions(path)
        if is_kernel(function) and len(parameters(function)) > MAX_KERNEL_ARGUMENTS
    ]
    assert not found, "\n".join(found)


def test_kernel_files_have_at_least_8_comments_per_100_lines() -> None:
    files = kernel_files()
    assert files
    shares = {
        name(path): 100 * len(list(comments(path))) / len(path.read_text().splitlines())
        for path in files
    }
    found = [
        f"{path}: {share:.1f}"
        for path, share in shares.items()
        if share < MIN_COMMENTS_PER_100_LINES
    ]
    assert not found, "\n".join(found)


def imports_of(node: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each module that the import statements below a node load."""
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            yield from ((each.lineno, alias.name) for alias in each.names)
        elif isinstance(each, ast.ImportFrom):
            assert each.level == 0 and each.module, f"{name(path)}:{each.lineno}: relative import"
            for alias in each.names:
                yield each.lineno, f"{each.module}.{alias.name}"


def is_optional(module: str) -> bool:
    """Whether a module belongs to an optional package or imports one."""
    return any(f"{module}.".startswith(f"{optional}.") for optional in OPTIONAL_MODULES)


def test_functions_import_optional_packages_only() -> None:
    found = {
        f"{name(path)}:{line}: {module}"
        for path in sources("reluformer")
        if not name(path).startswith(LAZY_IMPORTERS)
        for function in functions(path)
        for line, module in imports_of(function, path)
        if not is_optional(module)
    }
    assert not found, "\n".join(sorted(found))


def module_name(path: Path) -> str:
    return name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph() -> dict[str, set[str]]:
    """Modules that each module of the package imports at run time, also inside functions."""
    modules = {module_name(path): path for path in sources("reluformer")}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        for_types = {
            (line, imported)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for line, imported in imports_of(node, path)
        }
        targets = set()
        for line, imported in imports_of(tree(path), path):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if (line, imported) not in for_types and target in modules and target != module:
                targets.add(target)
        graph[module] = targets
    # The names of the package itself are looked up on first use.
    graph["reluformer"] = set()
    return graph


def test_modules_do_not_import_each_other_in_a_ring() -> None:
    graph = import_graph()
    finished: set[str] = set()
    rings: list[str] = []

    def visit(module: str, way: tuple[str, ...]) -> None:
        if module in way:
            rings.append(" -> ".join((*way[way.index(module) :], module)))
        elif module not in finished:
            for target in sorted(graph[module]):
                visit(target, (*way, module))
            finished.add(module)

    for module in sorted(graph):
        visit(module, ())
    assert not rings, "\n".join(rings)
