"""The command line: ``hipjax generate`` and ``hipjax doctor``.

A command's module is imported once its arguments have been read, so that a bad argument is
answered before anything is set up.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hipjax.cli.errors import CommandError

_INTERRUPTED, _CLOSED_PIPE = 130, 141  # 128 + the number of SIGINT, of SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: its arguments; None takes them from the process, which is then this program's
        own and ends at once when the user interrupts it.

    Returns:
      The exit status: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C, 141 when the
      reader of the output has gone.

    Example:
      >>> import hipjax.cli
      >>> hipjax.cli.main(["generate", "import ", "--mtp-k", "99"])
      2
    """
    try:
        args = _parser().parse_args(argv)
        status: int = importlib.import_module(args.module).run(args)
        sys.stdout.flush()
        return status
    except CommandError as failure:
        print(f"hipjax: error: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        status = _INTERRUPTED
        if sys.stderr.isatty():
            print(file=sys.stderr)
    except BrokenPipeError:
        status = _CLOSED_PIPE
    if argv is None:
        os._exit(status)  # without waiting for threads that are inside the compiler
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    from hipjax import __version__
    from hipjax.checks import RECURRENT

    parser = _Parser(
        prog="hipjax",
        description="Decodes Qwen3.8-Flash-Next with its own multi-token-prediction head.",
    )
    parser.add_argument("--version", action="version", version=f"hipjax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    about = "continue a text with a model, and say how well speculation went"
    generate = commands.add_parser("generate", help=about, description=about)
    generate.set_defaults(module="hipjax.cli.generate")
    add = generate.add_argument
    add("prompt", metavar="PROMPT", help="the text to continue")
    add("--model", metavar="DIR", help="a checkpoint's folder; default: the bundled model")
    add("--max-new-tokens", metavar="N", type=int, default=128, help="default: %(default)s")
    mode = generate.add_mutually_exclusive_group()
    mode.add_argument("--mtp-k", metavar="K", type=int, help="drafts per window; default: 3")
    mode.add_argument("--no-speculation", action="store_true", help="one token per step")
    add("--ignore-eos", action="store_true", help="only the budget ends the text")
    add(
        "--dtype",
        choices=("auto", "stored", "float32"),
        default="auto",
        help="keep weights as stored or widen them, which is exact; default: auto, which is "
        "float32 on a CPU and stored elsewhere",
    )
    add(
        "--recurrent",
        choices=RECURRENT,
        default="float32",
        help="storage of the recurrent states; q8 takes a quarter of the memory and rounds after "
        "every token; default: %(default)s",
    )
    add(
        "--implementation",
        choices=("auto", "kernel", "reference"),
        default="auto",
        help="what decodes: native kernels, or plain JAX; default: auto, which is kernels where "
        "they run and else plain JAX with a warning",
    )
    add("--json", action="store_true", help="one JSON object per line and nothing else")
    add("--compare", action="store_true", help="measure plain decoding of the same prompt too")

    about = "say what is installed, which devices there are and what runs on them"
    doctor = commands.add_parser("doctor", help=about, description=about)
    doctor.set_defaults(module="hipjax.cli.doctor")
    doctor.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    return parser
