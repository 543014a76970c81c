"""Flags of a command that are fields of configs (config/).

A command with a parameter `engine: Said[EngineConfig]` has a flag for every field of that config that declares one, and
is called with what the command line says of them. The config is made of that once the rest of it is known.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import typer

from everserve.config.base import Config, Flag
from everserve.errors import ConfigError

T = TypeVar("T", bound=Config)


@dataclass(frozen=True)
class Said(Generic[T]):
    """What the command line says of a config, by field."""

    kind: type[T]
    values: dict[str, Any]

    @classmethod
    def of(cls, kind: type[T], flags: Mapping[str, Any]) -> "Said[T]":
        """None: the command line does not have this flag."""
        given = [(option, flags[option.name]) for option in _options_of(kind)]
        return cls(kind, {option.field: option.read(value) for option, value in given if value not in (None, [])})

    def make(self, device: str = "", /, **otherwise: Any) -> T:
        """The config: what was said, else these values, else the defaults; some of those are of a kind of device."""
        of_device = {
            option.field: option.flag.on_device[device]
            for option in _options_of(self.kind)
            if device and option.flag.on_device is not None
        }
        config = self.kind(**of_device | otherwise | self.values)
        config.check()
        return config


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """The command with flags in the places of its `Said` parameters."""
    own = inspect.signature(command)
    configs = {
        name: typing.get_args(parameter.annotation)[0]
        for name, parameter in own.parameters.items()
        if typing.get_origin(parameter.annotation) is Said
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        if name in configs:
            parameters += [option.parameter() for option in _options_of(configs[name])]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        said = {name: Said.of(kind, values) for name, kind in configs.items()}
        command(**said, **{name: values[name] for name in own.parameters if name not in configs})

    vars(run)["__signature__"] = own.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True, eq=False)
class _Option:
    """A field and its flag."""

    field: str
    flag: Flag
    type: Any
    default: Any  # None: what is not said is filled in later, or left to the field's own default

    @property
    def name(self) -> str:
        return self.flag.name or self.field

    def parameter(self) -> inspect.Parameter:
        """The parameter for typer. What is off can be turned on; what is on has a `--no-` too."""
        spelled = [_spelled(self.name)] if self.default is False or self.flag.short else []
        spelled += [self.flag.short] if self.flag.short else []
        flag, type_, default = self.flag, self.type, self.default
        if typing.get_origin(type_) is tuple:  # repeatable, unless the flag has a way of its own to say several
            item, *_ = typing.get_args(type_)
            if flag.parse is None:
                type_, default = GenericAlias(list, item), default and list(default)
            else:
                type_, default = str, default if default is None else ",".join(map(str, default))
        elif isinstance(type_, type) and issubclass(type_, Config):  # the flag's `parse` makes one
            type_, default = str, None
        type_ = type_ if default is not None else type_ | None
        option = typer.Option(*spelled, help=self.help(), min=flag.min, max=flag.max, envvar=flag.envvar)
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, option]
        )

    def help(self) -> str:
        defaults = self.flag.on_device
        if defaults is None:
            return self.flag.help
        on_cpu, on_gpu = (_said(defaults[device]) for device in ("cpu", "cuda"))
        return f"{self.flag.help} (default: {on_cpu} on a CPU, {on_gpu} on a GPU)."

    def read(self, value: Any) -> Any:
        """What the field gets."""
        if self.flag.choices and value not in self.flag.choices:
            choices = ", ".join(map(str, self.flag.choices))
            raise ConfigError(f"{_spelled(self.name)} {value}: choose one of {choices}")
        if self.flag.parse is not None:
            return self.flag.parse(value)
        return tuple(value) if typing.get_origin(self.type) is tuple else value


@functools.cache
def _options_of(kind: type[Config]) -> tuple[_Option, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    options = []
    for field in msgspec.structs.fields(kind):
        type_, *extras = typing.get_args(hints[field.name]) or (None,)
        default = field.default if field.default is not msgspec.NODEFAULT else None
        options += [_Option(field.name, flag, type_, default) for flag in extras if isinstance(flag, Flag)]
    return tuple(options)


def _said(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
