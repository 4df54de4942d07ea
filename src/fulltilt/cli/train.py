"""`fulltilt train NAME`: trains a recipe. Its flags are those of all recipes and its own."""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from fulltilt.cli.streams import examples
from fulltilt.recipes import RECIPES, find, require
from fulltilt.recipes import options as flagged
from fulltilt.recipes.recipe import Recipe
from fulltilt.train.stop import limits_count_from_here, signals_end_it

EXAMPLES = (
    "fulltilt train cod                            # on made data, here and now",
    "fulltilt train cod --data /data/COD10K-v3 --out out/cod",
    "fulltilt train carclip --data cars --gpus 2 --max-time 11h",
    "fulltilt train visobert --config config.yaml  # the same command resumes",
)
# The flags depend on the recipe, so its own command parses them, below.
COMMAND = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
    "add_help_option": False,
}


def train(arguments: Annotated[list[str] | None, typer.Argument(metavar="NAME [OPTIONS]")] = None) -> None:
    """Train one of four models: cod, carclip, visobert or hdf5."""
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h"):
        _show_recipes()
        return
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.command()(command_of(find(name)))
    with limits_count_from_here():
        raise typer.Exit(app(args=rest, prog_name=f"fulltilt train {name}", standalone_mode=False) or 0)


def run_recipe(recipe: Recipe, given: dict[str, Any], config: Path | None = None) -> int:
    """Train with these flags and this config; returns the exit code. Raises UsageError where they are wrong."""
    require(recipe.name)
    request = flagged.read(recipe, given, config)
    from fulltilt.train import exit_code_of
    from fulltilt.train.checkpoint import claim
    from fulltilt.train.distributed import relaunch

    out = request.out
    if os.path.lexists(out):
        claim(out)  # before anything is read or written there
    of_ranks = 0

    def body() -> None:
        nonlocal of_ranks
        recipe.check_options(request)
        if request.synthetic:
            claim(out)
            _make_data(recipe, request.data)
        recipe.check(request)
        claim(out)
        code = relaunch(request.gpus, request.settings.device) if request.gpus else None
        if code is not None:
            of_ranks = code  # the ranks have printed their errors
        else:
            recipe.run(request)

    code: int = exit_code_of(body, out)
    return code or of_ranks


def _make_data(recipe: Recipe, folder: Path) -> None:
    from fulltilt.figures import count
    from fulltilt.recipes.synthetic import KINDS, make_folder

    if make_folder(recipe.synthetic, folder, recipe.synthetic_size, 0):
        print(f"Made {count(KINDS[recipe.synthetic], recipe.synthetic_size)} in {folder}", file=sys.stderr)


# --------------------------------------------------------------------------- flags


def command_of(recipe: Recipe) -> Callable[..., None]:
    """The command of a recipe, with one parameter for each of its flags."""

    def command(config: Path | None = None, **given: Any) -> None:
        with signals_end_it():
            flags = {key: value for key, value in given.items() if value is not None}
            raise typer.Exit(run_recipe(recipe, flags, config))

    known = inspect.Parameter.KEYWORD_ONLY
    file = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings in YAML, TOML or JSON.")]
    parameters = [inspect.Parameter("config", known, default=None, annotation=file)]
    for flag in flagged.flags(recipe):
        parameters.append(inspect.Parameter(flag.name, known, default=None, annotation=_annotation(flag)))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = recipe.about
    return command


def _annotation(flag: flagged.Flag) -> Any:
    options = get_args(flag.kind) if get_origin(flag.kind) in (Union, types.UnionType) else (flag.kind,)
    kind = next(option for option in options if option is not types.NoneType)
    word = flag.name.removesuffix("_s").replace("_", "-")
    metavar = None
    if kind is bool:
        word = f"{word}/--no-{word}"
    elif get_origin(kind) is Literal:
        kind, metavar = str, "|".join(get_args(kind))
    elif kind is float and flag.name.endswith("_s"):
        kind, metavar = str, "TIME"
    default = "on" if flag.default is True else flag.default
    shown = "" if default is None or default is False else f" [default: {default}]"
    # None, not the default: only flags that were given win over the config.
    return Annotated[
        kind | None, typer.Option(f"--{word}", metavar=metavar, help=flag.help + shown, show_default=False)
    ]


def _show_recipes() -> None:
    print("Usage: fulltilt train NAME [OPTIONS]\n")
    print("  Train one of four models. Its flags are in: fulltilt train NAME --help\n")
    for name, about in RECIPES.items():
        print(f"  {name:10} {about}")
    print(f"\n{examples(*EXAMPLES).lstrip(chr(8))[1:]}")
