"""What ends a command with one line on standard error."""

import contextlib
from collections.abc import Iterator

FAILED, BAD_INPUT = 1, 2


class CommandError(Exception):
    """Something to tell the user in one line.

    Args:
      message: what is wrong; line breaks become spaces.
      status: the exit status.
    """

    def __init__(self, message: str, status: int = BAD_INPUT) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Turns the library's verdict on what the user gave into a `CommandError`.

    Only for loading and checking, so that an error of decoding keeps its traceback.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(str(error)) from error
