"""How large the package is, and how it hangs together: `make sizes`.

In: the folder `callqueue` of this checkout, and of every commit after `--at`. Out: a table with one
column for each. It reads source text only.

Every module counts but migrations. An arrow is an import of one module by another. Imports inside
functions count, those under `if TYPE_CHECKING` do not. A circle is two or more modules that import
each other, directly or through others. Floors are the modules of the longest chain of imports; a
circle is one floor. Tokens are names, numbers, texts and signs, without docstrings and imports:
they compare code whose lines end at different columns. A function's length is its lines of code
from `def` to its end, without decorators, docstring, comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"Limit", "SlidingWindow", "FixedWindow", "TokenBucket", "Concurrency"}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
Graph = dict[str, set[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", nargs="+", default=[], metavar="COMMIT", help="commits to show too")
    columns = {commit: sizes_at(commit) for commit in parser.parse_args().at}
    columns["checkout"] = sizes(ROOT / "callqueue")
    width = max(len(title) for title in columns["checkout"])
    print(" " * width, *(f"{commit:>10}" for commit in columns), sep="  ")
    for title in columns["checkout"]:
        print(f"{title:{width}}", *(f"{c[title]:>10}" for c in columns.values()), sep="  ")


def sizes_at(commit: str) -> dict[str, str]:
    """The sizes of the package as a commit has it."""
    archive = subprocess.check_output(["git", "archive", commit, "callqueue"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return sizes(Path(folder, "callqueue"))


def sizes(package: Path) -> dict[str, str]:
    """Every number by its title, for one folder with the source of the package."""
    paths = [path for path in package.rglob("*.py") if "migrations" not in path.parts]
    sources = {name_of(path, package): path.read_text("utf-8") for path in sorted(paths)}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    lines = [source.count("\n") for source in sources.values()]
    functions = [n for name, source in sources.items() for n in lengths(source, trees[name])]
    graph = arrows(trees)
    at_top = {name.split(".")[1] for name in trees if "." in name}
    return {
        "rooms: names at the top": f"{len(at_top)}",
        "packages among them": f"{sum((package / name).is_dir() for name in at_top)}",
        "modules": f"{len(trees)}",
        "lines": f"{sum(lines)}",
        "tokens of code": f"{sum(tokens(s, trees[name]) for name, s in sources.items())}",
        "modules over 200 lines": f"{sum(n > 200 for n in lines)}",
        "modules over 300 lines": f"{sum(n > 300 for n in lines)}",
        "functions": f"{len(functions)}",
        "median function, lines of code": f"{statistics.median(functions):g}",
        "functions under 20 lines of code": f"{statistics.mean(n < 20 for n in functions):.1%}",
        "arrows between modules": f"{sum(map(len, graph.values()))}",
        "floors of modules": f"{floors(graph)}",
        "circles of modules": sizes_of_circles(graph),
        "arrows between rooms": f"{sum(map(len, by_room(graph).values()))}",
        "floors of rooms": f"{floors(by_room(graph))}",
        "circles of rooms": sizes_of_circles(by_room(graph)),
        "modules that write a call's status": f"{sum(map(writes_status, trees.values()))}",
        "isinstance of a limit, outside limits": f"{asked_outside(trees)}",
    }


def name_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def lengths(source: str, tree: ast.Module) -> Iterator[int]:
    """The lines of code of each function. A nested one counts in its outer one, too."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[:1] if ast.get_docstring(node) is not None else []
            yield len((lines_of(node) - set().union(*map(lines_of, docstring))) & code)


def tokens(source: str, tree: ast.Module) -> int:
    """How many tokens of code a module has, without its docstrings and imports."""
    left_out = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in lines_of(node)
    }
    read = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(one.type not in LAYOUT and one.start[0] not in left_out for one in read)


def lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def arrows(trees: dict[str, ast.Module]) -> Graph:
    """Which modules each module imports."""
    is_package = {name for name in trees if any(other.startswith(f"{name}.") for other in trees)}
    graph: Graph = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in at_run_time(tree):
            for target in targets(node, name if name in is_package else name.rpartition(".")[0]):
                module = target if target in trees else target.rpartition(".")[0]
                graph[name] |= {module} & set(trees) - {name}
    return graph


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one, without the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from (child, *at_run_time(child))


def targets(node: ast.AST, package: str) -> list[str]:
    """The dotted names that a statement imports. `package` is what a relative import begins at."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = resolve_name("." * node.level + (node.module or ""), package)
    return [f"{base}.{alias.name}" for alias in node.names]


def by_room(graph: Graph) -> Graph:
    """The arrows between names at the top. The package itself, `callqueue/__init__.py`, is one."""
    rooms: Graph = {}
    for name, others in graph.items():
        one = name.split(".")[:2][-1]
        rooms.setdefault(one, set()).update({o.split(".")[:2][-1] for o in others} - {one})
    return rooms


def circle_of(name: str, graph: Graph) -> frozenset[str]:
    """The modules that one reaches and that reach it, and the one itself."""
    reached = reachable(name, graph)
    return frozenset({name} | {other for other in reached if name in reachable(other, graph)})


def reachable(name: str, graph: Graph) -> set[str]:
    found = set(graph[name])
    while new := {further for other in found for further in graph[other]} - found:
        found |= new
    return found


def sizes_of_circles(graph: Graph) -> str:
    circles = {circle_of(name, graph) for name in graph}
    return " + ".join(str(n) for n in sorted(map(len, circles)) if n > 1) or "none"


def floors(graph: Graph) -> int:
    circles = {name: circle_of(name, graph) for name in graph}

    @functools.cache
    def height(circle: frozenset[str]) -> int:
        below = {circles[other] for name in circle for other in graph[name]} - {circle}
        return 1 + max(map(height, below), default=0)

    return max(map(height, circles.values()))


def writes_status(tree: ast.Module) -> bool:
    """Whether a module says which status a call gets: `update(status=...)`, an UPDATE, columns."""
    shown = {id(n.right) for n in ast.walk(tree) if isinstance(n, ast.BinOp)}  # "..." % {...}
    return any(is_write(node) for node in ast.walk(tree) if id(node) not in shown)


def is_write(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return "update" in node.func.attr and any(k.arg == "status" for k in node.keywords)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "SET status" in node.value
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        states = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "status"]
        return any(isinstance(v, ast.Name | ast.Attribute) and not is_text(v) for v in states)
    return False


def is_text(value: ast.AST) -> bool:
    """Whether it is what people are shown of a state."""
    return isinstance(value, ast.Attribute) and value.attr == "label"


def asked_outside(trees: dict[str, ast.Module]) -> int:
    """How often code outside `limits` asks which kind a limit is."""
    outside = [tree for name, tree in trees.items() if name.split(".")[1:2] != ["limits"]]
    calls = [n for tree in outside for n in ast.walk(tree) if isinstance(n, ast.Call)]
    asked = [ast.unparse(n.args[1]) for n in calls if ast.unparse(n.func) == "isinstance"]
    return sum(bool(KINDS & set(re.findall(r"\w+", kinds))) for kinds in asked)


if __name__ == "__main__":
    main()
