"""The `fulltilt` command: finds the verb, turns every error of the user's into at most three lines and an exit code."""

from __future__ import annotations

import errno
import importlib
import shlex
import sys
from pathlib import Path

import typer

from fulltilt import __version__
from fulltilt.cli import streams
from fulltilt.errors import FulltiltError, MachineError, UsageError, refused_path

app = typer.Typer(
    name="fulltilt",
    help="Finds out why a PyTorch training job leaves its GPU idle, fixes it, and proves the fix.",
    epilog=streams.examples(
        "fulltilt run train.py --lr 0.1    # why is this script not faster?",
        "fulltilt run --auto train.py      # tune its data loading while it trains",
        "fulltilt report                   # the newest run again, and its page",
        "fulltilt run --help               # every verb has flags and examples",
    ),
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

# The order is the order of `fulltilt --help`.
VERBS = ("run", "report", "tune", "plan", "check", "watch", "train", "make-data", "cache", "demo")

# What is not installed without an extra, by the name under which it is imported.
EXTRAS = {
    **dict.fromkeys(("numpy", "PIL", "timm", "transformers", "yaml"), "recipes"),
    "safetensors": "train",
    "h5py": "hdf5",
    "accelerate": "hf",
    "lightning": "lightning",
}


def _show_version(asked: bool) -> None:
    if asked:
        print(f"fulltilt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    pass


def add_verb(app: typer.Typer, verb: str) -> None:
    """Add a verb: the function of its name in the file of its name, with the ``EXAMPLES`` and ``COMMAND`` there."""
    name = verb.replace("-", "_")
    module = importlib.import_module(f"fulltilt.cli.{name}")
    more = getattr(module, "COMMAND", {})
    app.command(verb, epilog=streams.examples(*module.EXAMPLES), **more)(getattr(module, name))


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and exit with its code; without any, show the help."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    streams.prepare()
    try:
        if arguments[0] not in VERBS and (arguments[0].endswith(".py") or Path(arguments[0]).is_file()):
            script = shlex.join(arguments)
            raise UsageError(
                f"{arguments[0]} is a file, not a verb", f"To run and explain a script: fulltilt run {script}"
            )
        # One verb alone starts faster; help and wrong verbs need them all.
        for verb in arguments[:1] if arguments[0] in VERBS else VERBS:
            add_verb(app, verb)
        code = app(args=arguments, prog_name="fulltilt", standalone_mode=False)
        sys.stdout.flush()
    except FulltiltError as error:
        streams.complain(str(error))
        code = error.exit_code
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        what = f"fulltilt {arguments[0]} needs {module}, which this Python does not have"
        streams.complain(f'{what}\nInstall: pip install "fulltilt[{EXTRAS[module]}]"')
        code = UsageError.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        streams.silence_stdout()  # the reader (head, less) has gone
        code = 141
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            where = f" {error.filename}" if error.filename else ""
            streams.complain(f"cannot write{where}: {error.strerror}")
            streams.silence_stdout()
        elif (refusal := refused_path(error)) is not None:
            streams.complain(str(refusal))
        else:
            raise
        code = MachineError.exit_code
    except Exception as error:
        # Typer bundles its own copy of click from 0.16 on, so its usage errors are known by their shape.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        hint = "" if context is None else f"\nTry: {context.command_path} --help"
        told = error.format_message()
        if told == f"No such command '{arguments[0]}'.":  # and none is like it
            hint = f"\nVerbs: {', '.join(VERBS)}"
        streams.complain(told + hint)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
