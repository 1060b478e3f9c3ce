"""Write docs/api.md: every public name of aiopipe with its signature and docstring.

    python scripts/api_reference.py            write it
    python scripts/api_reference.py --check    exit 1 if it is not up to date

Everything is read from the imported package by `inspect`. All annotations of aiopipe are strings
(``from __future__ import annotations``), and defaults are written out here, so the text is the same
whatever the version of Python.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "api.md"
PACKAGE = "aiopipe"
HEADINGS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Raises": "Raises",
    "Returns": "Returns",
    "Yields": "Yields",
}
KINDS = ("Functions", "Classes", "Values", "Errors")
PROTOCOLS = ("__await__", "__aiter__", "__call__")
"""Special methods that say what an object is for; they are listed where they have a docstring."""

INTRODUCTION = """\
# API reference

Every public name, as its docstring has it. `make api` writes this page; a test checks that it is up to date.
Sizes are in bytes (`nbytes`), times in seconds (`_s`). What is awaited may wait; nothing else does.
"""


def main() -> int:
    sys.path.insert(0, str(ROOT))
    text = reference()
    if "--check" in sys.argv[1:]:
        if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.relative_to(ROOT)} is not up to date: run `make api`", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


def reference() -> str:
    """The whole page."""
    names = public_names()
    lines = [INTRODUCTION]
    for kind in KINDS:
        members = sorted((name for name in names if kind_of(names[name]) == kind), key=str.lower)
        if members:
            links = ", ".join(f"[`{name}`](#{name.lower()})" for name in members)
            lines.append(f"**{kind}**: {links}\n")
    for kind in KINDS:
        members = sorted((name for name in names if kind_of(names[name]) == kind), key=str.lower)
        if members:
            lines.append(f"## {kind}\n")
            lines += [section for name in members for section in sections(name, names[name])]
    return "\n".join(lines).rstrip("\n") + "\n"


def public_names() -> dict[str, Any]:
    """What ``from aiopipe import *`` gives."""
    package = importlib.import_module(PACKAGE)
    return {name: getattr(package, name) for name in package.__all__}


def undocumented() -> list[str]:
    """Public names and public members of classes that have no docstring of their own or of a base of aiopipe."""
    missing = []
    for name, value in public_names().items():
        if kind_of(value) == "Values":
            continue
        if not docstring(value):
            missing.append(name)
        if isinstance(value, type):
            for member, found in members_of(value):
                if not docstring_of(value, member, found):
                    missing.append(f"{name}.{member}")
    return sorted(missing)


def kind_of(value: Any) -> str:
    if isinstance(value, type):
        return "Errors" if issubclass(value, BaseException) else "Classes"
    return "Functions" if callable(value) and hasattr(value, "__module__") and inspect.isroutine(value) else "Values"


def sections(name: str, value: Any) -> Iterator[str]:
    """A name's heading, signature and docstring, then the same for its members."""
    yield f"### {name}\n"
    if not isinstance(value, type):
        shown = signature(name, value) if kind_of(value) == "Functions" else name
        yield f"```python\n{shown}\n```\n"
        yield f"{rendered(docstring(value))}\n"
        return
    yield f"```python\n{class_signature(name, value)}\n```\n"
    yield f"{rendered(docstring(value))}\n"
    if issubclass(value, enum.Enum):
        yield "".join(f"- `{name}.{item.name}`\n" for item in value)
    for member, found in members_of(value):
        yield f"#### {name}.{member}\n"
        yield f"```python\n{member_signature(member, found)}\n```\n"
        yield f"{rendered(docstring_of(value, member, found))}\n"


def members_of(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties that aiopipe defines, those of undocumented bases included, by name."""
    public = [value for value in public_names().values() if isinstance(value, type) and value is not cls]
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.partition(".")[0] == PACKAGE or base in public:
            continue  # not ours, or with a section of its own
        for name, value in vars(base).items():
            is_special = name in PROTOCOLS and bool(getattr(value, "__doc__", None))
            is_member = isinstance(value, property | staticmethod | classmethod | types.FunctionType)
            if is_member and (is_special or not name.startswith("_")):
                found[name] = value
    return sorted(found.items())


def docstring(value: Any) -> str:
    """Its own docstring, cleaned; "" where it has none, or only the one that `dataclass` writes."""
    own = value.__dict__.get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    text = inspect.cleandoc(own) if isinstance(own, str) else ""
    return "" if isinstance(value, type) and text.startswith(f"{value.__name__}(") else text


def docstring_of(cls: type, name: str, member: Any) -> str:
    """A member's docstring; else that of the first base that has one."""
    for base in cls.__mro__:
        candidate = vars(base).get(name, member if base is cls else None)
        text = getattr(candidate, "__doc__", None)
        if isinstance(text, str) and base.__module__.partition(".")[0] == PACKAGE:
            return inspect.cleandoc(text)
    return ""


# Signatures ---------------------------------------------------------------------------------------


def signature(name: str, function: Any, *, drop_first: bool = False) -> str:
    """``async def name(...) -> ...``, on one line if it fits, else with a line for each parameter."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[drop_first:]
    shown = _parameters(parameters)
    is_async = inspect.iscoroutinefunction(function)
    head = f"{'async ' if is_async else ''}def {name}("
    returns = found.return_annotation
    tail = ")" if returns is inspect.Signature.empty else f") -> {_annotation(returns)}"
    return _wrapped(head, shown, tail)


def class_signature(name: str, cls: type) -> str:
    """``class Name(...)`` with what its constructor takes, for classes that a user may make."""
    if issubclass(cls, enum.Enum):
        return f"class {name}(Enum)"
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        fields = list(inspect.signature(cls.__new__).parameters.values())[1:]
        return f"class {name}(NamedTuple)\n" + _wrapped(f"{name}(", _parameters(fields), ")")
    shown = [base for base in cls.__bases__ if base in public_names().values() or base.__module__ == "builtins"]
    bases = ", ".join(base.__name__ for base in shown if base is not object)
    init = vars(cls).get("__init__")
    if not isinstance(init, types.FunctionType):
        return f"class {name}({bases})" if bases else f"class {name}"
    constructor = _wrapped(f"{name}(", _parameters(list(inspect.signature(init).parameters.values())[1:]), ")")
    return f"class {name}({bases})\n{constructor}" if bases else f"class {constructor}"


def member_signature(name: str, member: Any) -> str:
    if isinstance(member, property):
        returns = inspect.signature(member.fget).return_annotation if member.fget else inspect.Signature.empty
        return f"{name}: {_annotation(returns)}  # property"
    if isinstance(member, staticmethod):
        return f"@staticmethod\n{signature(name, member.__func__)}"
    if isinstance(member, classmethod):
        return f"@classmethod\n{signature(name, member.__func__, drop_first=True)}"
    return signature(name, member, drop_first=True)


def _parameters(parameters: list[inspect.Parameter]) -> list[str]:
    shown = []
    star = False
    for parameter in parameters:
        kind = parameter.kind
        if kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        star = star or kind is parameter.VAR_POSITIONAL
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        text = prefix + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += (" = " if parameter.annotation is not parameter.empty else "=") + _default(parameter.default)
        shown.append(text)
    return shown


def _wrapped(head: str, parameters: list[str], tail: str, width: int = 100) -> str:
    line = head + ", ".join(parameters) + tail
    if len(line) <= width or not parameters:
        return line
    return head + "\n" + "".join(f"    {p},\n" for p in parameters) + tail


def _annotation(annotation: Any) -> str:
    annotation = getattr(annotation, "__forward_arg__", annotation)  # a NamedTuple's
    if isinstance(annotation, str):
        return annotation
    if annotation is None:
        return "None"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type | types.FunctionType):
        return value.__name__
    if value is None or isinstance(value, bool | int | float | str | bytes | tuple):
        return repr(value)
    return "..."  # a value whose repr may have an address in it


# Docstrings ---------------------------------------------------------------------------------------


def rendered(text: str) -> str:
    """Google style to Markdown: a heading and a list for each section, the rest as it is."""
    out: list[str] = []
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        heading = re.fullmatch(r"(\w+):", lines[i])
        if heading is None or heading[1] not in HEADINGS:
            out.append(_prose(lines[i]))
            i += 1
            continue
        body = []
        i += 1
        while i < len(lines) and (not lines[i] or lines[i].startswith(" ")):
            body.append(lines[i])
            i += 1
        out.append(f"**{HEADINGS[heading[1]]}**\n")
        out += _items(inspect.cleandoc("\n" + "\n".join(body)).split("\n"), heading[1])
        out.append("")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip("\n")


def _items(body: list[str], heading: str) -> list[str]:
    """``name: text`` with indented lines after it becomes an item; without a name, the text is a paragraph."""
    out: list[str] = []
    for line in body:
        named = re.match(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)", line)
        if named is not None and heading not in ("Returns", "Yields"):
            names = ", ".join(f"`{name}`" for name in named[1].split(", "))
            out.append(f"- {names}: {_prose(named[2])}")
        elif line.startswith("    ") and out:
            out.append(f"  {_prose(line.strip())}")
        else:
            out.append(_prose(line))
    return out


def _prose(line: str) -> str:
    """``code`` in double backticks becomes `code`; lines of code stay as they are."""
    return line if line.startswith("    ") else re.sub(r"``([^`]+)``", r"`\1`", line)


if __name__ == "__main__":
    sys.exit(main())
