"""What the documentation takes from the code: the help of every verb, and the JSON schema of `report --json`.

MkDocs calls `on_files` (see mkdocs.yml). `python docs/make_reference.py` writes the schema, which is kept beside it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import textwrap
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

import fulltilt
from fulltilt.cli import main as command_line
from fulltilt.records import SCHEMA_VERSION, Diagnosis

SCHEMA = Path(__file__).with_name("report.schema.json")
PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of verbs and Python names to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference.md", content=reference()))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def reference() -> str:
    """The help of every verb, as 80 columns show it."""
    os.environ["COLUMNS"] = "80"
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    for verb in command_line.COMMANDS:
        command_line.add_command(app, verb)
    group: Any = typer.main.get_command(app)
    pages = [
        "# Reference\n\nThe help of every verb, from the code. JSON: [schema](report.schema.json) of `report --json`.\n"
    ]
    for verb in command_line.COMMANDS:
        command = group.commands[verb]
        context = command.make_context(verb, [], resilient_parsing=True)
        context.info_name = f"fulltilt {verb}"
        pages.append(f"## {verb}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(pages)


def api() -> str:
    """The exported names of the package, of the feed and of the callbacks, with their signatures."""
    from fulltilt import feed
    from fulltilt.recorder.manual_recording import Recording

    names: dict[str, Any] = {f"fulltilt.{name}": getattr(fulltilt, name) for name in ("record", "load", "diagnose")}
    names["fulltilt.recorder.Recording"] = Recording
    names |= {f"fulltilt.feed.{name}": getattr(feed, name) for name in feed.__all__}
    names |= {f"fulltilt.feed.augment.{name}": getattr(feed.augment, name) for name in feed.augment.__all__}
    pages = ["# Python\n\nThe exported names, from the code.\n"]
    for name, value in names.items():
        if inspect.ismodule(value):
            continue
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value)))
        call = f"{name.rpartition('.')[2]}{signature}"
        pages.append(f"## {name}\n\n```text\n{textwrap.fill(call, 100)}\n```\n\n{inspect.getdoc(value) or ''}\n")
    return "\n".join(pages)


def schema() -> dict[str, Any]:
    """The JSON schema of one answer of `fulltilt report --json`. Later versions may add keys, and change none."""
    defined: dict[str, Any] = {}
    answer = _object(Diagnosis, defined)
    scalar = {"type": ["string", "integer", "number", "boolean", "null"]}
    answer["properties"]["settings"] = {"type": "object", "additionalProperties": scalar}
    answer["properties"]["run"] = {"type": ["object", "null"]}
    answer["required"] = [*answer["required"], "run"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"fulltilt report --json, schema_version {SCHEMA_VERSION}",
        **answer,
        "$defs": defined,
    }


def _object(record: Any, defined: dict[str, Any]) -> dict[str, Any]:
    kinds = get_type_hints(record)
    fields = [field.name for field in dataclasses.fields(record)]
    described = {"description": record.__doc__.strip().splitlines()[0]} if record.__doc__ else {}
    return {
        **described,
        "type": "object",
        "properties": {name: _kind(kinds[name], defined) for name in fields},
        "required": fields,
    }


def _kind(kind: Any, defined: dict[str, Any]) -> dict[str, Any]:
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in defined:
            defined[name] = {}
            defined[name] = _object(kind, defined)
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_kind(option, defined) for option in arguments]}
    if origin is tuple and arguments[1:] == (...,):
        return {"type": "array", "items": _kind(arguments[0], defined)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_kind(item, defined) for item in arguments]}
    return {"type": PLAIN[kind]}


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
