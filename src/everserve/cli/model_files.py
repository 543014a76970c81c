"""The files behind MODEL: where they are, and whether a server could serve them. Nothing is started before that."""

from pathlib import Path

from msgspec import structs

from everserve.cli import hub
from everserve.config.model import ModelSource
from everserve.errors import ConfigError, ModelError
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.model.fingerprint import fingerprint
from everserve.model.forms import shard_bytes
from everserve.model.headers import Headers, files_of
from everserve.model.layout import check_headers


def resolve_model(model: str, revision: str | None = None, token: str | None = None) -> Path:
    """The directory behind a MODEL argument. A name of the hub that is not complete in its cache is downloaded."""
    directory = DEMO_MODEL if model == "demo" else Path(model)
    if directory.is_dir():
        if revision is not None:
            raise ConfigError(f"--revision {revision} is for names of the hub, and {model} is a directory")
        return directory.resolve()
    if not hub.is_name(model):
        raise ConfigError(
            f"{model} is not a directory: give the path of a Hugging Face model, its name on the hub (like"
            " Qwen/Qwen3-0.6B), or `demo` for the bundled one"
        )
    found = hub.cached(model, revision)
    return found if found is not None and _is_complete(found) else hub.download(model, revision, token)


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in files_of(directory)) and has_tokenizer(directory)


def has_tokenizer(directory: Path) -> bool:
    """Whether there is a file that could be one; not whether it can be read."""
    return any(file.is_file() for pattern in hub.TOKENIZERS for file in directory.glob(pattern))


def check_model(source: ModelSource) -> ModelSource:
    """Refuses what processes would refuse once they run: files that are missing, or do not belong to each other. What
    it finds out is told to all of them."""
    directory, config = Path(source.directory), ModelConfig.from_source(source)
    sizes: tuple[int, ...] = ()
    if source.load_format != "dummy":
        headers = Headers.read(directory)
        check_headers(config, headers)
        if source.quantization not in (None, headers.method):
            said = headers.method or "that weights are not quantised"
            raise ConfigError(
                f"--quantization {source.quantization}: {directory / 'config.json'} says {said},"
                " and weights are not quantised anew; leave it out"
            )
        sizes = shard_bytes(config, headers, source.dtype)
    if not has_tokenizer(directory):
        raise ModelError(f"there is no tokenizer in {directory}: tokenizer.json is missing; download it, too")
    own_head = not config.tie_word_embeddings
    return structs.replace(source, fingerprint=fingerprint(directory), own_head=own_head, shard_bytes=sizes)
