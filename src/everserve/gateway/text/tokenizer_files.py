"""The tokenizer in a model directory, as its files describe it. The only file of the package that imports transformers.

    tokenizer.json          everything that turns text into tokens and back
    tokenizer_config.json   which tokens are special, and by which name; perhaps the chat template
    chat_template.jinja     the chat template, in newer directories

These are read here, with the meaning that transformers gives them: importing it takes two seconds. Directories of other
kinds (without a tokenizer.json, or with files of older versions beside it) are read by transformers, which can convert
them.
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from everserve.errors import ModelError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_Token = str | AddedToken


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What is in the files."""

    backend: Tokenizer
    special_tokens: dict[str, str]  # by the name of their purpose: eos_token and the like
    chat_template: str | None
    class_name: str
    config: dict[str, Any]  # tokenizer_config.json as it is


def read_tokenizer(directory: Path) -> TokenizerFiles:
    """What this directory says; a ModelError if that is no tokenizer."""
    config = read_json(directory / "tokenizer_config.json")
    try:
        files = _read(directory, config) if _is_plain(directory, config) else _read_with_transformers(directory, config)
    except ModelError:
        raise
    except Exception as error:  # tokenizers and transformers raise many kinds; all mean that these are no tokenizer
        state = "broken" if (directory / "tokenizer.json").is_file() else "missing"
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise ModelError(f"cannot load a tokenizer from {directory} (tokenizer.json is {state}): {reason}") from error
    files.backend.no_truncation()
    files.backend.no_padding()
    if not files.backend.encode("text", add_special_tokens=False).ids:  # as transformers makes where no files are
        raise ModelError(f"there is no tokenizer in {directory}: tokenizer.json is missing")
    return files


def _is_plain(directory: Path, config: dict[str, Any]) -> bool:
    """Whether these are only files whose meaning is known here."""
    legacy_files = any((directory / name).exists() for name in ("special_tokens_map.json", "added_tokens.json"))
    return (
        (directory / "tokenizer.json").is_file()
        and not (directory / "additional_chat_templates").exists()
        and not config.keys() & {"fast_tokenizer_files", "fix_mistral_regex", "model_specific_special_tokens"}
        and ("added_tokens_decoder" in config or not legacy_files)
    )


def _read(directory: Path, config: dict[str, Any]) -> TokenizerFiles:
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    special = _special_tokens(config, backend)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    backend.add_tokens(_added_tokens(config, backend, special))
    return TokenizerFiles(
        backend=backend,
        special_tokens={name: _content(token) for name, token in special.items()},
        chat_template=_chat_template(directory, config),
        class_name=str(config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        config=config,
    )


def _special_tokens(config: dict[str, Any], backend: Tokenizer) -> dict[str, _Token]:
    """The special tokens that have names: the usual ones first, then those that only this model has."""
    named = {**config}
    if backend.padding is not None:
        named.setdefault("pad_token", backend.padding["pad_token"])
    own = [name for name, value in config.items() if name.endswith("_token") and _is_token(value)]
    found = {name: _token(named[name]) for name in dict.fromkeys((*_NAMED, *own)) if named.get(name) is not None}
    extra = _extra_special_tokens(config)
    return found | {name: _token(value) for name, value in extra.items()} if isinstance(extra, dict) else found


def _added_tokens(config: dict[str, Any], backend: Tokenizer, special: dict[str, _Token]) -> list[AddedToken]:
    """All tokens that are found in a text before it is divided: those that the files list, and any special token that
    they forgot to list. What a name says is special is special."""
    listed = {int(i): AddedToken(**token) for i, token in config.get("added_tokens_decoder", {}).items()}
    if "added_tokens_decoder" not in config:
        listed = backend.get_added_tokens_decoder()
    tokens = [listed[i] for i in sorted(listed)]
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
    extra = _extra_special_tokens(config)
    for token in (*special.values(), *(map(_token, extra) if isinstance(extra, list) else ())):
        if _content(token) not in known:
            known.add(_content(token))
            tokens.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    names = set(map(_content, special.values()))
    for token in tokens:
        token.special = token.special or token.content in names
    return tokens


def _extra_special_tokens(config: dict[str, Any]) -> dict[str, Any] | list[Any]:
    """Special tokens without a usual name: a list, or by names of their own."""
    return config.get("extra_special_tokens") or config.get("additional_special_tokens") or []


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _token(value: Any) -> _Token:
    """A token as tokenizer_config.json writes it."""
    if not _is_token(value):
        raise ModelError(f"tokenizer_config.json: {textwrap.shorten(repr(value), 100)} is not a token")
    if isinstance(value, str):
        return value
    return AddedToken(**{name: field for name, field in value.items() if name != "__type"})


def _content(token: _Token) -> str:
    return token if isinstance(token, str) else token.content


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    try:
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        return _default_template(config.get("chat_template"))


def _default_template(template: Any) -> str | None:
    """Some models have several, by name."""
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}
    if isinstance(template, dict):
        template = template.get("default")
    return None if template is None else str(template)


def _read_with_transformers(directory: Path, config: dict[str, Any]) -> TokenizerFiles:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 - seconds of work, seldom needed

    kind = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    tokenizer = kind.from_pretrained(directory, local_files_only=True)
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"the tokenizer in {directory} has no fast version (tokenizer.json)")
    return TokenizerFiles(
        backend=tokenizer.backend_tokenizer,
        special_tokens=dict(tokenizer.special_tokens_map),
        chat_template=_default_template(tokenizer.chat_template),
        class_name=str(config.get("tokenizer_class") or type(tokenizer).__name__),
        config=config,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in the model directory; empty if there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content
