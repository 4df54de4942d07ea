"""The `fulltilt` command: runs one subcommand and turns every user error into a few lines and an exit code."""

from __future__ import annotations

import errno
import importlib
import re
import shlex
import sys
from difflib import get_close_matches
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
        "fulltilt run --help               # flags and examples of one command",
    ),
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

# In the order of `fulltilt --help`.
COMMANDS = ("run", "report", "tune", "plan", "check", "watch", "train", "make-data", "cache", "demo")
# The other commands need Linux's clocks, signals and locks.
OFF_LINUX = ("watch",)

# Import name of an optional dependency → the extra that installs it.
EXTRAS = {
    **dict.fromkeys(("numpy", "PIL", "timm", "transformers", "yaml"), "recipes"),
    "safetensors": "train",
    "h5py": "hdf5",
    "accelerate": "hf",
    "lightning": "lightning",
}


_NOT_A_NUMBER = re.compile(r"Input should be a valid (integer|number)\b.*")


def _expected(message: re.Match[str]) -> str:
    return f"expects a {'whole ' if message[1] == 'integer' else ''}number"


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


def add_command(app: typer.Typer, command: str) -> None:
    """Add a command from the file of its name, with the ``EXAMPLES`` and ``COMMAND`` options there."""
    name = command.replace("-", "_")
    module = importlib.import_module(f"fulltilt.cli.{name}")
    more = getattr(module, "COMMAND", {})
    app.command(command, epilog=streams.examples(*module.EXAMPLES), **more)(getattr(module, name))


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code; show the help where none is given."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    streams.prepare()
    try:
        if arguments[0] not in COMMANDS and (arguments[0].endswith(".py") or Path(arguments[0]).is_file()):
            script = shlex.join(arguments)
            raise UsageError(
                f"{arguments[0]} is a file, not a command", f"To run and explain a script: fulltilt run {script}"
            )
        if not (arguments[0].startswith("-") or get_close_matches(arguments[0], COMMANDS)):
            raise UsageError(f"No such command '{arguments[0]}'.", f"Commands: {', '.join(COMMANDS)}")
        here = COMMANDS if sys.platform == "linux" else OFF_LINUX
        if arguments[0] in COMMANDS and arguments[0] not in here:
            raise MachineError(
                f"fulltilt {arguments[0]} needs Linux; this is {sys.platform}",
                "On Windows it runs in WSL 2. fulltilt watch works on every system.",
            )
        # One command alone starts faster; the help and misspelt commands need them all.
        for command in arguments[:1] if arguments[0] in COMMANDS else here:
            add_command(app, command)
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
        # Usage errors of click, of which Typer may bundle its own copy.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        hint = "" if context is None else f"\nTry: {context.command_path} --help"
        streams.complain(_NOT_A_NUMBER.sub(_expected, error.format_message()) + hint)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
