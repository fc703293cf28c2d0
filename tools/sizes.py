"""Prints the sizes that the project holds to, and fails where one is exceeded: `python -m
tools.sizes`.

Statements are counted, not lines: a line can be made wide. Imports and docstrings do not count.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("plugins", "pipelines", "fedml_noniid")
TESTS = ("tests",)
CHECKED = (*PRODUCT, *TESTS, "tools", "benchmarks", "examples", "research")


class Wing(NamedTuple):
    """A part of the project with a budget: statements at most, and where it has to come down to.

    Raising a budget needs a line of reason here.
    """

    paths: tuple[str, ...]
    most: int
    goal: int


WINGS = {
    # Above the goal are sites that took no part, a virtual clock, attackers and rules against
    # them, clusters, packed updates, and clients that the server chooses.
    "product": Wing(PRODUCT, 21953, 17000),
    "research": Wing(("research",), 2700, 2700),
    "benchmarks": Wing(("benchmarks",), 2300, 2300),
    "tools": Wing(("tools",), 300, 400),
    "tests": Wing(TESTS, 19940, 16500),
}
# Statements at most of single files and folders.
STATEMENTS = {
    # The watch over hooks of other packages came from the engines, which lost 93 statements.
    # + an Ask with a model for each client, which engines, tests, traffic and deployments read;
    # the staleness of these models; packed updates: which component packs, and that it owns them;
    # the hook that chooses a cohort. The rules of composition became a table.
    ("fedml_noniid/core",): 1494,
    ("fedml_noniid/privacy",): 177,  # `chained`, which the ledger and secure sums use, came here
    # + refusals where silos receive different models; packs at a silo, unpacks at the server,
    # a quorum too small for the method
    ("fedml_noniid/deploy",): 1719,
    ("plugins/baselines/scaffold.py",): 29,
    ("plugins/baselines/fedprox.py",): 15,
    ("plugins/baselines/fedrs.py",): 15,
    ("plugins/fnr/algorithm.py",): 68,
    ("plugins/fednnnn/algorithm.py",): 30,
    ("plugins/ccn/algorithm.py",): 30,
    ("plugins/fednlr/algorithm.py",): 75,
    ("plugins/rfedavg/algorithm.py",): 97,
}
PARAMETERS = 7  # of a function, without `self`
PER_OPTION = "one parameter per option, as documented"
WIDER = {  # functions with more parameters, and why
    "init": "nine options",
    "claims": PER_OPTION,
    "descend": "the tests' one reference of local training: its data, and SGD's options",
    "from_dataset": PER_OPTION,
    "leave_one_out": PER_OPTION,
    "run": "a run in files, by hand, in the tests",
    "partition": "of the training samples: labels, owners and the partition's own options",
    "sweep": "the arguments of `run`, and the values of the sweep",
    "table": PER_OPTION,
    "text": PER_OPTION,
    "__call__": "a network's, with all that a pass may need",
    "gradient": "a network's, with all that a pass may need",
    "simulated": "one parameter per part of a deployment in the tests",
}
DEPTH = 5  # blocks inside each other in a function
WIDTH, WIDE_LINES = 100, 15  # columns of a line; lines that are wider
SKIPS = 1  # statements that the formatter skips: tables of numbers
CONTRACT = "fedml_noniid/core/component.py"
# Of `Component`; of its file. + `assign`: clusters and asynchronous methods send clients models of
# their own, which `warm_start` can't: then FedProx would pull to a model that no client has.
# + `packing`: `leaving` changes what an update is, but not how it travels, so no byte was saved.
MEMBERS, TYPES = 35, 16
Block = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match | ast.FunctionDef


def files(*paths: str) -> list[Path]:
    """The Python files at and below paths, without those that a link leads to."""
    missing = [path for path in paths if not (ROOT / path).exists()]
    if missing:
        raise FileNotFoundError(f"tools/sizes.py names {', '.join(missing)}: not in this checkout")
    paths_ = [file for path in paths for file in [ROOT / path, *(ROOT / path).rglob("*.py")]]
    return sorted(file for file in paths_ if file.is_file() and file.resolve() == file)


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.AST) -> int:
    """The statements below a node: imports and docstrings do not count."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(
        not isinstance(node, ast.Import | ast.ImportFrom) and not is_text(node) for node in nodes
    )


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a string, such as a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The parameters of a function, without `self` and `cls`."""
    args = function.args
    names = [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    extra = (args.vararg is not None) + (args.kwarg is not None)
    return len(names) - (names[:1] in (["self"], ["cls"])) + extra


def depth(node: ast.AST) -> int:
    """The blocks that stand inside each other below a node; an `elif` stands beside its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = (
            isinstance(node, ast.If)
            and isinstance(child, ast.If)
            and child.col_offset == node.col_offset
        )
        deepest = max(deepest, depth(child) + (isinstance(child, Block) and not is_elif))
    return deepest


def classes(tree: ast.Module) -> dict[str, int]:
    """The classes at the top of a file; of each the members: annotated names and functions."""
    return {
        node.name: sum(isinstance(member, ast.AnnAssign | ast.FunctionDef) for member in node.body)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def measured() -> Iterator[tuple[str, int, float]]:
    """(what, found, at most) of every size."""
    for name, wing in WINGS.items():
        total = sum(statements(parsed(path)) for path in files(*wing.paths))
        yield f"statements of the wing {name}; goal: {wing.goal}", total, wing.most
    for named, most in STATEMENTS.items():
        total = sum(statements(parsed(path)) for path in files(*named))
        yield f"statements of {', '.join(named)}", total, most
    contract = classes(parsed(ROOT / CONTRACT))
    yield "members of Component", contract["Component"], MEMBERS
    yield f"types in {CONTRACT}", len(contract), TYPES
    checked = {path: path.read_text(encoding="utf-8") for path in files(*CHECKED)}
    skipped = sum(len(re.findall("# fmt: (skip|off)", text)) for text in checked.values())
    yield "statements that the formatter skips", skipped, SKIPS
    wide = [line for text in checked.values() for line in text.splitlines() if len(line) > WIDTH]
    yield f"lines wider than {WIDTH} columns", len(wide), WIDE_LINES
    for path, text in checked.items():
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
                most_parameters = math.inf if function.name in WIDER else PARAMETERS
                yield f"parameters of {where}", parameters(function), most_parameters
                yield f"blocks inside each other in {where}", depth(function), DEPTH


def main() -> int:
    """Prints the sizes, of functions only those that are exceeded; 1 if one is exceeded."""
    failed = False
    for what, size, most in measured():
        failed |= size > most
        if size > most or ".py:" not in what:
            mark = "   TOO LARGE" if size > most else ""
            sys.stdout.write(f"{size:5} of {most:5}  {what}{mark}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
