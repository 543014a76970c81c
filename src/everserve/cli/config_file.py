"""`everserve serve --config file.yaml`: flags from a file."""

import json
from pathlib import Path

import typer
import yaml

from everserve.cli.files import read_text
from everserve.cli.foreign_flags import hint, similar
from everserve.errors import ConfigError


def load(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of the option: keys are flags without dashes; the command line wins."""
    if path is None:
        return None
    try:
        values = yaml.safe_load(read_text(path, "--config")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected `flag: value` lines")
    known = {parameter.name for parameter in context.command.params if parameter.name} - {"config"}
    names = {str(key): str(key).lstrip("-").replace("-", "_") for key in values}
    if unknown := [_suggest(key, name, known) for key, name in names.items() if name not in known]:
        raise ConfigError(f"--config {path}: unknown: {'; '.join(unknown)}; see `everserve serve --help`")
    said = [json.dumps(value) if isinstance(value, dict) else value for value in values.values()]
    named = dict(zip(names.values(), said, strict=True))
    context.default_map = {**(context.default_map or {}), **named}
    return path


def _suggest(key: str, name: str, known: set[str]) -> str:
    """A key as the file has it, and the flag that it may have meant."""
    if (instead := hint(name)) is not None:
        return f"{key} ({instead})"
    meant = similar(name, known)
    return f"{key} (did you mean {meant[0].replace('_', '-')}?)" if meant else key
