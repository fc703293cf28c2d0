"""Checks that tests catch errors: changes one randomly drawn statement at a time and runs tests.

`python -m tools.mutate --seed 0 1 --count 30 fedml_noniid/core fedml_noniid/engines` prints a
row per changed statement: the change, and the test that caught it or SURVIVED. A survivor is a gap
in the tests, or a change that has no effect.

The tests run in a clone of the last commit, outside the checkout. They first run once unchanged:
a tracer, in every Python process that they start, records which test runs which drawn statement.
Then each change runs only these tests, the fastest first. Statements that only a GPU or a slow test
runs are not caught: leave their files out with --skip.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import sizes

Target = tuple[str, int]  # a file, and the first line of a statement in it
SWAPPED: list[tuple[Any, Any]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.FloorDiv, ast.Mod),
]
OPERATORS = {a: b for left, right in SWAPPED for a, b in ((left, right), (right, left))}
IDLE = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.ClassDef,
    ast.Pass,
    ast.Global,
    ast.Nonlocal,
)
LOGGING = {"debug", "info", "warning", "error", "exception"}
SECONDS = 150  # of tests per change, as measured by the recording
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-m",
    "not slow",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
)
TRACER = """
import os, sys, threading
targets = {targets!r}
record = os.open({record!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
seen = set()
def write(file, line):
    key = (file, line, os.environ.get("PYTEST_CURRENT_TEST", "import ").rpartition(" ")[0])
    if key not in seen:
        seen.add(key)
        os.write(record, "{{}}\\t{{}}\\t{{}}\\n".format(*key).encode())
def on_line(frame, event, _):
    file, spans = targets[frame.f_code.co_filename]
    for first, last in spans:
        if first <= frame.f_lineno <= last:
            write(file, first)
    return on_line
def on_call(frame, event, _):
    if frame.f_code.co_filename not in targets:
        return None
    write(targets[frame.f_code.co_filename][0], 0)
    return on_line(frame, event, _)
sys.settrace(on_call)
threading.settrace(on_call)
"""
# A plugin of pytest: Python stops tracing after an error in a trace function, such as a recursion.
AGAIN = """
import sys, sitecustomize
def pytest_runtest_setup(item):
    sys.settrace(sitecustomize.on_call)
"""


@dataclass(frozen=True)
class Mutant:
    """One changed statement: where, what was done, and the text of the changed file."""

    file: str
    lines: tuple[int, int]
    change: str
    text: str

    @property
    def target(self) -> Target:
        """Names the statement in the record."""
        return self.file, self.lines[0]


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that may be drawn: those that do something when they run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not _is_idle(node):
            yield node


def _is_idle(node: ast.stmt) -> bool:
    """Whether a statement is an import, a definition, a docstring, an alias of a type, or logs."""
    text = ast.unparse(node)
    alias = (
        isinstance(node, ast.Assign) and node.col_offset == 0 and re.match(r"[A-Z]\w*[a-z]", text)
    )
    logs = re.match(r"\w+\.(\w+)\(", text) if isinstance(node, ast.Expr) else None
    return (
        isinstance(node, IDLE)
        or (isinstance(node, ast.AnnAssign) and node.value is None)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or text.startswith(("if TYPE_CHECKING", "__all__"))
        or bool(alias or (logs and logs[1] in LOGGING))
    )


def changes(statement: ast.stmt) -> list[tuple[str, ast.stmt]]:
    """(what is done, the changed statement) of every change that a statement allows."""
    mutants: list[tuple[str, ast.stmt]] = []
    if isinstance(statement, ast.If | ast.While):
        negated = copy.deepcopy(statement)
        negated.test = ast.UnaryOp(ast.Not(), negated.test)
        mutants.append((f"not ({ast.unparse(statement.test)})", negated))
    for number, expression in enumerate(_expressions(statement)):
        changed = copy.deepcopy(statement)
        if _change(_expressions(changed)[number]):
            done = f"{ast.unparse(expression)} -> {ast.unparse(_expressions(changed)[number])}"
            mutants.append((done, changed))
    if isinstance(statement, ast.Return) and ast.unparse(statement) not in (
        "return",
        "return None",
    ):
        mutants.append(("return None", ast.Return(ast.Constant(None))))
    elif not (
        mutants and isinstance(statement, ast.Assign)
    ):  # a name that is missing is found easily
        mutants.append(("delete", ast.Pass()))
    return mutants


def _expressions(node: ast.AST) -> list[ast.expr]:
    """The expressions of a statement, without those of statements in it, annotations and texts."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return []
    expressions = [node] if isinstance(node, ast.expr) else []
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.expr | ast.keyword | ast.comprehension | ast.withitem):
                expressions += _expressions(child) if name != "annotation" else []
    return expressions


def _change(node: ast.expr) -> bool:
    """Changes an operator or a number in place; False if a node has none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return True
    if isinstance(node, ast.Compare):
        node.ops[0] = OPERATORS[type(node.ops[0])]()
        return True
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        node.op = OPERATORS[type(node.op)]()
        return True
    return False


def draw(root: Path, paths: list[str], skip: list[str], seed: int, count: int) -> list[Mutant]:
    """Draws `count` statements of the Python files below paths, and one change of each."""
    rng = random.Random(seed)
    below = [file for path in paths for file in [root / path, *sorted((root / path).rglob("*.py"))]]
    files = [str(file.relative_to(root)) for file in below if file.is_file()]
    candidates = [
        (file, node)
        for file in files
        if file not in skip
        for node in statements(sizes.parsed(root / file))
    ]
    return [
        mutant(root, file, node, *rng.choice(changes(node)))
        for file, node in rng.sample(candidates, min(count, len(candidates)))
    ]


def mutant(root: Path, file: str, node: ast.stmt, change: str, changed: ast.stmt) -> Mutant:
    """Writes a changed statement into the text of its file."""
    lines = (root / file).read_text().encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    new = ast.unparse(changed).replace("\n", "\n" + " " * node.col_offset)
    if lines[first][node.col_offset :].startswith(b"elif"):
        new = (
            f"el{new}"
            if isinstance(changed, ast.If)
            else "elif False:\n" + " " * node.col_offset + "    pass"
        )
    text = b"".join([*lines[:first], before, new.encode(), after, *lines[last + 1 :]]).decode()
    head = min([child.lineno - 1 for child in getattr(node, "body", [])], default=node.end_lineno)
    return Mutant(file, (node.lineno, max(node.lineno, head or 0)), change, text)


def record(
    root: Path, mutants: list[Mutant], selection: list[str]
) -> tuple[dict[Target, set[str]], dict[str, float]]:
    """Runs the tests once: (the tests that run each statement, the seconds of each test)."""
    targets: dict[str, tuple[str, list[tuple[int, int]]]] = {}
    for mutant in mutants:
        path = (
            mutant.file if mutant.file.startswith("fedml_noniid") else f"fedml_noniid/{mutant.file}"
        )
        targets.setdefault(str(root / path), (mutant.file, []))[1].append(mutant.lines)
    rows = root / "record.tsv"
    hook = root / "sitecustomize.py"
    hook.write_text(TRACER.format(targets=targets, record=str(rows)))
    (root / "tracing_again.py").write_text(AGAIN)
    code, shown = run(root, ["-p", "tracing_again", "--durations=0", "-vv", *selection], 7200)
    hook.unlink()
    if code > 1:
        raise SystemExit(f"the tests can't run unchanged:\n{shown[-2000:]}")
    failed = set(re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", shown, re.MULTILINE))
    sys.stdout.write("".join(f"fails unchanged: {name}\n" for name in sorted(failed)))
    seconds: dict[str, float] = defaultdict(float)
    for took, name in re.findall(r"^([\d.]+)s \w+ +(tests/.*)$", shown, re.MULTILINE):
        seconds[name] += float(took)
    tests: dict[Target, set[str]] = defaultdict(set)
    for row in rows.read_text().splitlines():
        file, line, test = row.split("\t")
        if test not in failed:
            tests[file, int(line)].add(test)
    return tests, seconds


def run(root: Path, arguments: list[str], limit: float) -> tuple[int, str]:
    """Runs pytest in the clone: (its exit code, what it prints); beyond the limit it is killed."""
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    shown = root / "pytest.txt"
    with shown.open("w") as out:
        process = subprocess.Popen(
            [*PYTEST, *arguments],
            cwd=root,
            env={"OMP_NUM_THREADS": "1", **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), shown.read_text(errors="replace")


def outcome(
    root: Path, mutant: Mutant, tests: dict[Target, set[str]], seconds: dict[str, float]
) -> str:
    """Runs the tests of a changed statement: the first that fails, or SURVIVED."""
    covering = tests[mutant.target]
    if "import" in covering:  # runs before any test: take the tests that run anything of its file
        covering = tests[mutant.file, 0]
    ordered = sorted(covering - {"import"}, key=lambda test: (seconds.get(test, 0.0), test))
    chosen: list[str] = []
    total = 0.0
    for test in ordered:
        total += seconds.get(test, 0.0) + 0.02
        if chosen and total > SECONDS:
            break
        chosen.append(test)
    if not chosen:
        return "SURVIVED: no test runs it"
    (root / "chosen.txt").write_text("\n".join(chosen))
    original = (root / mutant.file).read_text()
    (root / mutant.file).write_text(mutant.text)
    code, shown = run(root, ["-x", "--timeout=120", f"@{root / 'chosen.txt'}"], 120 + 4 * total)
    (root / mutant.file).write_text(original)
    if code == 0:
        return f"SURVIVED {len(chosen)} of {len(ordered)} tests"
    caught = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", shown, re.MULTILINE)
    return caught[1] if caught else f"pytest ends with code {code}"


def main(argv: list[str]) -> int:
    """Prints the rows and the total of each seed; 1 if fewer than `--least` are caught."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    parser.add_argument("paths", nargs="+", help="files or folders whose statements are changed")
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--count", type=int, default=30, help="statements per seed")
    parser.add_argument("--skip", nargs="*", default=[], help="files that are left out")
    parser.add_argument("--least", type=int, default=0, help="changes that must be caught per seed")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="tests that are run")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "clone"
        subprocess.run(["git", "clone", "-q", str(sizes.ROOT), str(root)], check=True)
        drawn = {s: draw(root, asked.paths, asked.skip, s, asked.count) for s in asked.seed}
        every = [mutant for mutants in drawn.values() for mutant in mutants]
        tests, seconds = record(root, every, asked.tests)
        fewest = asked.count
        for seed, mutants in drawn.items():
            caught = 0
            for mutant in mutants:
                by = outcome(root, mutant, tests, seconds)
                caught += not by.startswith("SURVIVED")
                row = f"{seed}  {mutant.file}:{mutant.lines[0]}  {mutant.change}  |  {by}\n"
                sys.stdout.write(row)
                sys.stdout.flush()
            sys.stdout.write(f"seed {seed}: {caught} of {len(mutants)} caught\n")
            fewest = min(fewest, caught)
    return int(fewest < asked.least)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
