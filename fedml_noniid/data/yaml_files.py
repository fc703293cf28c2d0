"""Reads settings in YAML, and JSON: what is wrong is said with its line and the remedy.

Others may have written both, so content that would take all of the stack or memory is refused.

`in_one_line` writes one value.
"""

from __future__ import annotations

import io
import json
import re
import sys
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from fedml_noniid.core.errors import UserError

MAX_DEPTH, MAX_VALUES, MAX_BITS = 50, 1_000_000, 10_000  # of a file; settings have far less
NESTED = f"is nested too deeply; allowed: {MAX_DEPTH} levels"
# What the parser raises for a number, a date, a tag or a key that Python does not have.
ODD = (ValueError, TypeError, AttributeError, LookupError, OverflowError)


def read_yaml(
    path: Path, wanted: str = "it has to hold keys", name: str | None = None
) -> dict[str, Any]:
    """The keys of a file in YAML 1.2, as DVC reads it: 1e-3 is a number.

    UserError also for a key that is given twice.

    `wanted` ends the error for a file without keys. `name`: of the file in errors.
    """
    name = name or path.name
    try:
        raw = path.read_bytes()
    except OSError as error:
        folder = path.parent.resolve()
        raise UserError(
            f"{name}: can't be read ({error.strerror or error}); it belongs into {folder}"
        ) from None
    content = loaded(raw, name)
    if not isinstance(content, dict):
        raise UserError(f"{name}: holds no settings; {wanted}")
    return content


@lru_cache(maxsize=64)
def _content(text: str) -> object:
    """Parses a text once: the parser is slow, and most verbs read the same files several times."""
    parser = YAML(typ="safe", pure=True)
    parser.composer.warn_double_anchors = False  # the warning prints the text as it is
    content = parser.load(text)
    _size(content, {})
    return content


def json_of(content: bytes) -> Any:
    """Parses JSON. ValueError if it is none, or nested too deeply."""
    try:
        values = json.loads(content)
    except RecursionError:
        raise ValueError(NESTED) from None
    _size(values, {})
    return values


def _size(value: object, known: dict[int, int], depth: int = 0) -> int:
    """Counts the values in a value; one that is there by several aliases counts each time.

    `known`: the counts of those that were counted, 0 while one is. ValueError for too many, too
    deeply nested, and a value in itself.
    """
    if isinstance(value, int) and value.bit_length() > MAX_BITS:  # Python can't print it
        raise ValueError(f"a number has more than {MAX_BITS} bits")
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if (size := known.get(id(value))) is None:
        if depth == MAX_DEPTH:
            raise ValueError(NESTED)
        known[id(value)] = 0
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        size = known[id(value)] = 1 + sum(_size(part, known, depth + 1) for part in inner)
    if not 0 < size <= MAX_VALUES:
        raise ValueError("its aliases make too many values, or one that is in itself")
    return size


def loaded(content: bytes, name: str) -> object:
    """What YAML holds that was read already. UserErrors begin with `name` and the line."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"{content[error.start]:#04x}"
        raise UserError(
            f"{name}: line {line}: is not UTF-8 (byte {byte}); save the file as UTF-8"
        ) from None
    try:
        return deepcopy(_content(text))
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(
            f"{name}: line {line}: holds the control character {chr(error.character)!r}; remove "
            "it, or save the file "
            "as UTF-8"
        ) from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        twice = re.match('found duplicate key "(.*?)" with', error.problem or "")
        if twice:
            raise UserError(
                f"{name}: line {line}: the key {twice[1]!r} is there twice; keep one of them"
            ) from None
        problem = "; ".join(
            " ".join(part.split()) for part in (error.context, error.problem) if part
        )
        raise UserError(
            f"{name}: line {line}: is not YAML ({problem}); correct this line or the one before"
        ) from None
    except RecursionError:
        raise UserError(f"{name}: {NESTED}") from None
    except (YAMLError, *ODD) as error:
        raise UserError(f"{name}: is not YAML ({' '.join(str(error).split())[:200]})") from None


def in_one_line(value: object) -> str:
    """A value in YAML, on one line."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = True, sys.maxsize
    yaml.sort_base_mapping_type_on_output = False
    text = io.StringIO()
    yaml.dump({"v": value}, text)
    return text.getvalue().strip()[len("{v: ") : -1]
