"""Files that the command line names: is it a file, can it be read, can something be written there?"""

import tempfile
from pathlib import Path

from everserve.errors import ConfigError


def read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {_why(error)}") from error


def check_directory(path: Path, flag: str, mode: int = 0o777) -> None:
    """Before anything long begins. It is made if it is not there, with this mode (less what umask takes)."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path}: nothing can be written there: {_why(error)}") from error


def _why(error: OSError | UnicodeDecodeError) -> str:
    return "it is not text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
