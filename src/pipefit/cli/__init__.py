"""The command line.

Each command is one file that parses its arguments, calls the function of the same name, and prints.

Commands import their modules when they run, so that help costs no more than the parser. Errors are handled
here.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from shutil import get_terminal_size
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.main import get_command

from pipefit.cli import (
    certify,
    checkpoint,
    clusters,
    compare,
    demo,
    diff,
    doctor,
    export,
    fit,
    models,
    plan,
    profile,
    report,
    show,
    simulate,
    train,
)
from pipefit.cli.output import fill_streams
from pipefit.cli.progress import STOPPED, Stopped, stoppable
from pipefit.errors import (
    FileError,
    OutOfMemory,
    PipefitError,
    PipefitWarning,
    UsageError,
    in_one_line,
    no_memory,
)
from pipefit.processes import forking, met, no_room_for
from pipefit.texts import printable, unknown, without_long_words

_CHOICE = re.compile(r"Value error, '([^']*)' is not one of (.*)")  # matches the parser's message
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ALLOCATIONS = (
    500_000,
    20,
    100,
)  # less frequent garbage collection, because commands create many lasting objects
_EPILOG = (
    "Exit codes: 0 ok, 2 usage, 3 no plan found, 4 out of memory, 5 a worker failed, 6 bad file, 7 loss "
    "not finite, 130 stopped by Ctrl-C, 143 by SIGTERM, 1 anything else."
)

app = typer.Typer(
    name="pipefit",
    add_completion=False,
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,  # errors are printed here, in one sentence
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_COMMANDS = (
    demo, models, clusters, profile, plan, fit, simulate, certify, train, checkpoint, compare, diff, report,
    show, export, doctor,
)  # fmt: skip
for _module in _COMMANDS:
    app.command(_module.__name__.rpartition(".")[2], epilog=f"For example:\n\n\b\n  {_module.EXAMPLE}")(
        _module.command
    )


@app.callback(epilog=_EPILOG)
def pipefit(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; works after a command too.")
    ] = False,
) -> None:
    """Make a PyTorch model fit: will it fit, how, and how fast; then train it that way."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. `arguments` default to those of the process.

    With the process's own arguments, signals may end the process, garbage collection is rarer or disabled,
    and not run at exit, and forks may work in parallel.
    """
    is_open = fill_streams()
    if arguments is not None:
        return _run(list(arguments), own=False, is_open=is_open)
    gc.set_threshold(*_ALLOCATIONS)
    if sys.argv[1:2] == ["plan"]:
        gc.disable()  # the result is printed before its garbage would matter
    try:
        return _run(sys.argv[1:], own=True, is_open=is_open)
    finally:
        if "triton" not in sys.modules:  # triton would report all remaining objects as leaks, in thirty lines
            gc.freeze()  # skips the collection at exit, since the process frees everything anyway


def _run(words: list[str], *, own: bool, is_open: bool) -> int:
    failure = _Failure(debug=_take(words, "--debug"), as_json="--json" in _options(words))
    words = words or ["--help"]
    try:
        _check_surroundings(is_open)
        with (
            stoppable(at_once=own, to_the_end=own),
            _warnings_on_stderr(),
            forking() if own else nullcontext(),
        ):
            code = _call(words)
        sys.stdout.flush()
        if code == STOPPED:  # typer has converted the interrupt to an exit code
            return failure.told("stopped", STOPPED)
        return code if isinstance(code, int) else 0
    except (PipefitError, Stopped) as error:
        return failure.known(error)
    except typer.TyperException as error:
        return failure.told(_usage_sentence(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return failure.told("stopped", STOPPED)
    except (BrokenPipeError, SystemExit) as error:
        return _without_reader(error, failure)
    except OSError as error:
        if error.errno not in _FULL:
            return failure.unexpected(error)
        _close_stdout()
        sentence = f"the output cannot be written: {error.strerror}; free some space, or write it elsewhere"
        return failure.told(sentence, FileError.exit_code)
    except BaseException as error:  # noqa: BLE001 - the last resort: a sentence instead of a traceback
        return failure.unexpected(error)


def _check_surroundings(is_open: bool) -> None:
    """Check that stdout is open and that the working directory exists.

    Without a working directory, torch's libraries abort when they are loaded.

    Raises:
        FileError: stdout is closed.
        UsageError: the working directory has been removed.
    """
    if not is_open:
        raise FileError(
            "stdout is closed, so the result cannot be printed: redirect it to a file, or to /dev/null"
        )
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory cannot be used ({error.strerror}): cd to an existing folder"
        ) from None


def _call(words: list[str]) -> object:
    """Run the command in `words`; return its exit code, if any."""
    if words[:1] == ["--version"]:
        return _print_version()
    return _parser().main(args=words, prog_name="pipefit", standalone_mode=False)


@cache
def _parser() -> Any:
    """Return the parser of all commands, which takes 35 ms to build."""
    return get_command(app)


def _take(words: list[str], flag: str) -> bool:
    """Remove a flag, which may stand anywhere before a `--`; return whether it was there."""
    before = _options(words)
    words[: len(before)] = [word for word in before if word != flag]
    return flag in before


def _options(words: list[str]) -> list[str]:
    """Return the words that may be options: those before a `--`."""
    return words[: words.index("--")] if "--" in words else words[:]


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Print pipefit's warnings as sentences on stderr in the block, like errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PipefitWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, PipefitWarning):
                print(f"pipefit: {printable(without_long_words(str(message)))}", file=sys.stderr)
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _without_reader(error: BaseException, failure: _Failure) -> int:
    """Return the exit code after the reader of a pipe has left, as head does.

    Typer ends the program then.

    If anything else ended it, such as a model's own code, report that.
    """
    if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
        return failure.unexpected(error)
    _close_stdout()
    return 1


def _close_stdout() -> None:
    """Discard the remaining output to stdout, so that the interpreter's exit does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Failure:
    """Reporting of errors: a sentence on stderr, with --json also an object on stdout."""

    def __init__(self, *, debug: bool, as_json: bool) -> None:
        self._debug, self._as_json = debug, as_json

    def told(self, sentence: str, code: int, found: Mapping[str, Any] = MappingProxyType({})) -> int:
        """Report an error and return the exit code; `found` has partial results."""
        if self._debug:
            traceback.print_exc()
        sentence = without_long_words(sentence)
        text = " ".join(
            printable(line) for line in f"pipefit: {sentence}".splitlines()
        )  # names may have lines
        if sys.stderr.isatty():
            from pipefit.tables import wrapped

            text = wrapped(text, get_terminal_size().columns)
        print(text, file=sys.stderr)
        try:
            if self._as_json:
                print(json.dumps({"error": sentence, "exit_code": code, **found}))
            sys.stdout.flush()
        except OSError:  # no reader, or the disk is full
            _close_stdout()
        return code

    def known(self, error: PipefitError | Stopped) -> int:
        """Report a deliberate error; a model's own code that ran out of memory is reported as such."""
        behind = error.__cause__ if isinstance(error, UsageError) else None
        if behind is not None and no_memory(behind):
            return self.unexpected(behind)
        return self.told(str(error), error.exit_code, getattr(error, "found", {}))

    def unexpected(self, error: BaseException) -> int:
        """Report an unforeseen error in a sentence instead of a traceback; names a limit of the system."""
        if limit := met(error):
            sentence = f"{limit}, and this command needs more ({no_room_for(error) or in_one_line(error)})"
            return self.told(sentence, OutOfMemory.exit_code if no_memory(error) or no_room_for(error) else 1)
        what = in_one_line(error)
        return self.told(
            f"unexpected {what}; this is a defect of pipefit or of the model: run again with --debug for "
            "the traceback",
            1,
        )


def _usage_sentence(error: typer.TyperException) -> str:
    """Return the parser's message, with a pointer to the help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "pipefit"
    complaint = " ".join(error.format_message().split()).partition(", unable to parse")[0]
    complaint = complaint.replace("Input should be", "it must be")
    choice = _CHOICE.search(complaint)
    if choice:
        choices = re.findall("'([^']+)'", choice[2])
        complaint = (
            f"{complaint[: choice.start()]}{unknown(f'it cannot be {choice[1]!r}', choice[1], choices)}"
        )
    return f"{complaint.rstrip('.')}; see {command} --help"


def _print_version() -> int:
    from pipefit import __version__

    print(f"pipefit {__version__}")
    return 0
