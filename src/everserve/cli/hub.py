"""Names of the Hugging Face hub: their files in the local cache of its library, or downloaded to it.

The cache is asked first, and what is complete there is served without a network. A download begins with the small
files, so that a model that cannot be served is refused before its weights come. The library is imported only for such
names: a directory does not wait for it.
"""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

from everserve.errors import ConfigError, ModelError, UserError
from everserve.model.config import ModelConfig
from everserve.model.headers import files_of
from everserve.words import count

log = logging.getLogger(__name__)

# The gateway reads the first, and has transformers convert the others.
TOKENIZERS = ("tokenizer.json", "*.model", "vocab*", "merges.txt", "*.tiktoken", "tekken*.json")
_BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "chat_template*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", *TOKENIZERS),
)
_TEMPLATES = "additional_chat_templates/"  # files in other folders are other formats of the same model
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SAY_EVERY_S = 15.0  # how far a download is, where there is no terminal


def is_name(model: str) -> bool:
    return _NAME.fullmatch(model) is not None


def cached(model: str, revision: str | None = None) -> Path | None:
    """The directory in the cache, complete or not."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  only for such names

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def download(model: str, revision: str | None = None, token: str | None = None) -> Path:
    """Brings what is missing in the cache. Raises a UserError of one line if it cannot be had."""
    try:
        with _ends_at_signals():
            return _download(model, revision, token)
    except UserError:
        raise
    except Exception as error:  # of the library, its HTTP client, the system: all mean that the model is not there
        raise ConfigError(_why_not(model, revision, error)) from error


def _download(model: str, revision: str | None, token: str | None) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars  # noqa: PLC0415

    found = HfApi(token=token).model_info(model, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    beside = [name for name in sizes if is_beside_weights(name)]

    def fetch(names: list[str]) -> Path:
        return Path(snapshot_download(model, revision=revision, token=token, allow_patterns=names))

    chooses_bars = constants.HF_HUB_DISABLE_PROGRESS_BARS is None  # else the environment has chosen
    if chooses_bars:
        disable_progress_bars()
    directory = fetch(beside)
    ModelConfig.from_directory(directory, own_head=False)  # or it is refused, before its weights come
    weights = files_of(directory)
    if not sizes.keys() >= set(weights):
        raise ModelError(f"{model} has no safetensors files on the hub; convert it, and serve the directory")
    num_bytes = sum(sizes[name] for name in weights)
    files = f"{count(len(weights), 'file')} of weights, {num_bytes / 1e9:.1f} GB"
    log.info("downloads %s (%s) to %s", model, files, constants.HF_HUB_CACHE)
    if chooses_bars and sys.stderr.isatty():
        enable_progress_bars()
    with _telling(Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}", num_bytes):
        return fetch([*beside, *weights])


def is_beside_weights(name: str) -> bool:
    """Whether this file of a repository is needed, besides its weights."""
    if "/" in name:
        return name.startswith(_TEMPLATES)
    return any(fnmatch(name, pattern) for pattern in _BESIDE_WEIGHTS)


def _why_not(model: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors  # noqa: PLC0415

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{model} is gated: accept its conditions at {constants.ENDPOINT}/{model}, then give a token that may read"
            " it (HF_TOKEN, or `hf auth login`)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision or 'main'} on the hub"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{model} is not a directory, and the hub has no model of this name, or a private one: correct it, or give"
            " a token that may read it (HF_TOKEN, or `hf auth login`)"
        )
    reason = f"the hub cannot be asked ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    if isinstance(error, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set"
    command = f"hf download {model}" + (f" --revision {revision}" if revision else "")
    return (
        f"{model} is not a directory, is not complete in {constants.HF_HUB_CACHE}, and {reason}: fetch it with"
        f" `{command}` where there is a network, and bring that cache here"
    )


@contextmanager
def _ends_at_signals() -> Iterator[None]:
    """The library's threads finish the files that they have begun, which may take an hour, and an interrupted main
    thread waits for them. Nothing has been started yet that would have to be stopped in order."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _telling(cache: Path, num_bytes: int) -> Iterator[None]:
    """A line now and then about how far the download is. On a terminal the library draws bars."""
    is_over = threading.Event()

    def run() -> None:
        before = _bytes_in(cache)
        while not is_over.wait(_SAY_EVERY_S):
            log.info("%.1f of %.1f GB are here", max(_bytes_in(cache) - before, 0) / 1e9, num_bytes / 1e9)

    if not sys.stderr.isatty():
        threading.Thread(target=run, daemon=True, name="download").start()
    try:
        yield
    finally:
        is_over.set()


def _bytes_in(cache: Path) -> int:
    """Bytes of files that are complete, and of those that are coming."""
    try:
        return sum(file.stat().st_size for file in (cache / "blobs").iterdir())
    except OSError:  # one has just got its name
        return 0
