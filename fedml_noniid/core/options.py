"""The one check of settings: types and ranges stand at the fields, pydantic compares.

`check_options` checks the options of a dataclass (a method, a callback, a schedule) or of a
function (a reader, a partition, a network). Sections of files are pydantic models, `Section`.
`validated` makes them, and turns what pydantic finds into a UserError.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Strict,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import core_schema

from fedml_noniid.core.errors import (
    ABSENT,
    MISSING,
    REFUSED,
    UNKNOWN,
    KeyPath,
    Mistake,
    UserError,
    among,
    shown,
)

MOST = 1_000_000_000  # of anything that is counted: products of such numbers fit into 64 bits
LARGEST = 1e38  # of any other number: float32, in which training computes, ends at 3.4e38


class RecipeError(UserError):
    """A recipe that can't be composed, with the reason."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers, also as the annotation of an option.

    `open` names the ends that do not belong to it: "", "(", ")" or "()". `whole`: only its whole
    numbers belong to it.
    """

    low: float = -math.inf
    high: float = math.inf
    open: str = ""
    whole: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            (value > self.low if "(" in self.open else value >= self.low)
            and (value < self.high if ")" in self.open else value <= self.high)
            and not (self.whole and value % 1)
        )

    def __str__(self) -> str:
        low, high, no_end = self.low, self.high, math.isinf(self.high)
        return {
            "": f"from {low} up" if no_end else f"from {low} to {high}",
            "(": f"above {low}" if no_end else f"above {low}, at most {high}",
            ")": f"from {low} up" if no_end else f"from {low}, below {high}",
            "()": f"above {low}" if no_end else f"between {low} and {high}",
        }[self.open]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        allowed = f"a {'whole ' if source is int else ''}number {self}"

        def within(value: object, kind: Callable[[object], Any]) -> Any:
            try:
                number = kind(value)
            except ValidationError:
                number = math.nan
            if number in self:
                return number
            raise UserError(value=value, allowed=allowed)

        return core_schema.no_info_wrap_validator_function(within, handler(source))


@dataclass(frozen=True)
class OneOf:
    """Annotation of a text that is one of some names. They are asked for when it is checked."""

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._known)

    def _known(self, value: object) -> object:
        unknown((), value, self.names())
        return value


Positive = Annotated[float, Range(0, LARGEST, open="(")]
NonNegative = Annotated[float, Range(0, LARGEST)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, open="(")]
Below1 = Annotated[float, Range(0, 1, open=")")]
Momentum = Below1
Count = Annotated[int, Range(1, MOST)]
CountOrNone = Annotated[int, Range(0, MOST)]
Width = Annotated[int, Range(1, 1_000_000)]  # of a layer
WidthOrNone = Annotated[int, Range(0, 1_000_000)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
WHOLE = Range(-(2**63), 2**63 - 1)

M = TypeVar("M", bound=BaseModel)
STRICT = ConfigDict(
    extra="forbid",
    frozen=True,
    strict=True,
    allow_inf_nan=False,
    protected_namespaces=(),
    arbitrary_types_allowed=True,
)
# What pydantic calls a mistake -> what is allowed.
ALLOWED = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "invalid_key": "text",
    "list_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "tuple_type": "a list",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "none_required": "null",
}


class Section(BaseModel):
    """A section of a file: unknown keys and values of the wrong kind are errors, nothing is
    converted."""

    model_config = STRICT

    def __init__(self, **values: Any) -> None:
        """UserError with every mistake, also where no file is read."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _user_error(error, type(self)) from None

    @model_validator(mode="wrap")
    @classmethod
    def _named(cls, values: Any, handler: Any) -> Any:
        """Keys are text: pydantic takes them for the names of arguments."""
        if isinstance(values, dict) and (
            odd := [key for key in values if not isinstance(key, str)]
        ):
            raise UserError(f"the key {shown(odd[0])} is refused", allowed="text")
        return handler(values)


class OpenSection(Section):
    """A section beside whose keys the options of something else may stand."""

    model_config = STRICT | ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """What stands beside the keys."""
        return dict(self.model_extra or {})


def unknown(path: KeyPath, value: object, names: Iterable[object]) -> None:
    """UserError unless `value`, which stands at `where`, is one of `names`."""
    listed = list(names)
    # By type too: True is 1 for Python, but a flag is no number.
    if not any(type(name) is type(value) and name == value for name in listed):
        raise UserError(
            UNKNOWN if isinstance(value, str) else REFUSED,
            path=path,
            # A key is its own value.
            value=ABSENT if path and path[-1] == value else value,
            **among(value, map(str, listed)),
        )


@functools.cache
def model_of(*kinds: Callable[..., object]) -> type[BaseModel]:
    """The options of dataclasses, and of functions: what is keyword-only there."""
    fields: dict[str, Any] = {}
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        for parameter in inspect.signature(kind).parameters.values():
            if is_dataclass(kind) or parameter.kind is parameter.KEYWORD_ONLY:
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[parameter.name] = (checked_type(hints[parameter.name]), default)
    return create_model("Options", __config__=STRICT, **fields)


def check_options(
    kind: Callable[..., object] | tuple[Callable[..., object], ...],
    values: Mapping[str, object],
    also: Iterable[str] = (),
) -> None:
    """UserError with every mistake unless `values` are options of `kind`.

    `also`: further keys that may stand beside them, for near misses.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    model = cast("type[BaseModel]", kind) if is_section else model_of(*kinds)
    validated(model, values, also)


def validated(model: type[M], values: object, also: Iterable[str] = ()) -> M:
    """The values as a model. UserError with every mistake; `also` as above."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _user_error(error, model, also) from None


def _user_error(
    error: ValidationError, model: type[BaseModel], also: Iterable[str] = ()
) -> UserError:
    return UserError.from_mistakes(
        mistake
        for details in error.errors(include_url=False)
        for mistake in _mistakes(details, model, also)
    )


def _mistakes(details: Any, model: type[BaseModel], also: Iterable[str]) -> Iterator[Mistake]:
    """One error of pydantic; one of our validators may hold several."""
    # A key that is very long is cut.
    path = tuple(
        part if isinstance(part, int) else part[:97] for part in details["loc"] if part != "[key]"
    )
    context = details.get("ctx", {})
    if isinstance(context.get("error"), UserError):
        yield from context["error"].below(*path).mistakes
    elif details["type"] == "extra_forbidden":
        yield Mistake(UNKNOWN, path, **among(path[-1], [*_keys(model, path[:-1]), *also]))
    elif details["type"] == "missing":
        yield Mistake(MISSING, path)
    elif details["type"] == "literal_error":
        yield Mistake(
            UNKNOWN if isinstance(details["input"], str) else REFUSED,
            path,
            details["input"],
            **among(
                details["input"],
                re.findall("'([^']*)'", context["expected"]) or [context["expected"].lower()],
            ),
        )
    else:
        yield Mistake(
            path=path,
            value=details["input"],
            allowed=ALLOWED.get(details["type"], details["msg"]).format(**context),
        )


def keys_of(kind: type[BaseModel]) -> dict[str, str]:
    """All keys of a section -> the names of their fields; a field may have several keys."""
    keys: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        choices = field.validation_alias
        several = choices.choices if isinstance(choices, AliasChoices) else [field.alias or name]
        keys |= dict.fromkeys(map(str, several), name)
    return keys


def _keys(kind: Any, path: tuple[str | int, ...]) -> list[str]:
    """The keys of the section that `path` leads to below a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        names, fields = keys_of(kind), kind.model_fields
        return _keys(fields[names[str(path[0])]].annotation, path[1:]) if path else [*names]
    if get_origin(kind) in (dict, list):
        return _keys(get_args(kind)[-1], path[1:])
    return next((keys for part in get_args(kind) if (keys := _keys(part, path))), [])


def checked_type(hint: Any) -> Any:
    """The type that an option is checked with. A class of a user checks its own values."""
    if hint in (int, float):
        return Annotated[hint, WHOLE if hint is int else Range(-LARGEST, LARGEST)]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(map(checked_type, get_args(hint)))]  # noqa: UP007, `|` takes no list
    if get_origin(hint) is tuple:
        return Annotated[hint, Strict(False)]
    if get_origin(hint) is Literal:
        return Annotated[hint, OneOf(lambda: get_args(hint))]
    ours = hint in (bool, str, type(None))
    return hint if ours or get_origin(hint) in (Annotated, list, dict) else Any
