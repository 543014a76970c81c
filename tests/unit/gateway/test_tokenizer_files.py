"""Tokenizers and chat templates are read as transformers reads them, without it."""

import asyncio
import inspect
import json
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from everserve.errors import ConfigError, ModelError
from everserve.gateway.text.chat_template import ChatTemplate
from everserve.gateway.text.templates import RESERVED
from everserve.gateway.text.tokenizer import load_tokenizer
from everserve.gateway.text.tokenizer_files import TokenizerFiles, read_tokenizer
from everserve.model.bundled import DEMO_MODEL
from tests.support.gateway_toy import EOS, byte_fallback_tokenizer, byte_level_tokenizer

TEXTS = ("It was a cold evening.", f" the and{EOS}plain text é  <|new|>€ <s>x</s>", "", "\n\ttabs <|more|> <unk>")
ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
HELLO = {"role": "user", "content": " Hello & <good> day "}
ANSWER = {"role": "assistant", "content": "It is, é!", "reasoning_content": "small talk"}


def write(directory: Path, backend: Tokenizer, config: dict[str, Any], **files: str) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def with_post_processor(backend: Tokenizer) -> Tokenizer:
    """One that begins every prompt with a special token, and has truncation and padding in its file."""
    backend.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
    backend.enable_truncation(4)
    backend.enable_padding(pad_token=EOS)
    return backend


LISTED = {
    "0": {"content": EOS, **ADDED, "special": True},
    "300": {"content": "<|more|>", **ADDED, "special": False},
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "byte level": (byte_level_tokenizer, {"eos_token": EOS, "chat_template": "{{ eos_token }}", "bos_token": None}),
    "byte fallback": (byte_fallback_tokenizer, {"eos_token": EOS, "unk_token": "<unk>", "tokenizer_class": "Llama"}),
    "no config": (byte_level_tokenizer, {}),
    "post processor": (lambda: with_post_processor(byte_level_tokenizer()), {"eos_token": EOS}),
    "special tokens that the tokenizer does not have": (
        byte_level_tokenizer,
        {"bos_token": {"__type": "AddedToken", "content": "<s>", **ADDED, "lstrip": True}, "image_token": "<|new|>"},
    ),
    "a token of the vocabulary that becomes special": (byte_level_tokenizer, {"eos_token": "plain text é"}),
    "all tokens are listed": (byte_level_tokenizer, {"added_tokens_decoder": LISTED, "eos_token": "<|more|>"}),
    "more special tokens": (byte_fallback_tokenizer, {"additional_special_tokens": ["<|more|>", "▁the"]}),
    "by names of their own": (byte_fallback_tokenizer, {"extra_special_tokens": {"call_token": "<|new|>"}}),
    "special tokens are text": (byte_level_tokenizer, {"eos_token": EOS, "split_special_tokens": True}),
    "several templates": (
        byte_level_tokenizer,
        {"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]},
    ),
}


def transformers_class() -> Any:
    """Imported late: it is slow, and every process imports this file."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    return PreTrainedTokenizerFast


def assert_same(files: TokenizerFiles, directory: Path) -> None:
    theirs = transformers_class().from_pretrained(directory, local_files_only=True)
    assert files.special_tokens == theirs.special_tokens_map
    assert (files.backend.token_to_id(theirs.eos_token) if theirs.eos_token else None) == theirs.eos_token_id
    template = theirs.chat_template
    assert files.chat_template == (template["default"] if isinstance(template, dict) else template)
    backend = theirs.backend_tokenizer
    assert files.backend.get_vocab() == backend.get_vocab()
    assert repr(files.backend.get_added_tokens_decoder()) == repr(backend.get_added_tokens_decoder())
    for text in TEXTS:
        for special in (True, False):
            ids = files.backend.encode(text, add_special_tokens=special).ids
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert files.backend.decode(ids, skip_special_tokens=special) == backend.decode(ids, special)


@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens(name: str, tmp_path: Path) -> None:
    make, config = CASES[name]
    assert_same(read_tokenizer(write(tmp_path, make(), config)), tmp_path)


def test_the_bundled_tokenizer() -> None:
    assert_same(read_tokenizer(DEMO_MODEL), DEMO_MODEL)


def test_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, byte_level_tokenizer(), {"chat_template": "old"}, chat_template__jinja="new")
    assert_same(read_tokenizer(tmp_path), tmp_path)
    assert load_tokenizer(str(tmp_path), None).files.chat_template == "new"
    assert load_tokenizer(str(tmp_path), "given").files.chat_template == "given"


@pytest.mark.parametrize("name", ["special_tokens_map__json", "added_tokens__json"])
def test_files_of_older_versions_are_left_to_transformers(name: str, tmp_path: Path) -> None:
    content = {"eos_token": EOS, "bos_token": "<s>"} if "special" in name else {"<|new|>": 265}
    write(tmp_path, byte_level_tokenizer(), {"pad_token": EOS}, **{name: json.dumps(content)})
    assert_same(read_tokenizer(tmp_path), tmp_path)


def test_a_tokenizer_without_a_tokenizer_json_is_converted(tmp_path: Path) -> None:
    vocabulary = {name: i for name, i in byte_level_tokenizer().get_vocab().items() if name != "plain text é"}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": EOS}))
    files = read_tokenizer(tmp_path)
    assert files.backend.encode(" the", add_special_tokens=False).tokens == ["Ġthe"]
    assert files.special_tokens["eos_token"] == EOS


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "tokenizer.json is missing"),
        ({"tokenizer.json": "{}"}, "tokenizer.json is broken"),
        ({"tokenizer_config.json": "["}, "not JSON"),
        ({"tokenizer_config.json": '{"eos_token": {"content": "x"}}'}, "not a token"),
    ],
)
def test_what_is_no_tokenizer_is_told(files: dict[str, str], reason: str, tmp_path: Path) -> None:
    if "tokenizer_config.json" in files:
        shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=reason):
        read_tokenizer(tmp_path)


def test_the_bundled_model_is_served_without_transformers() -> None:
    """Importing it takes as long as all else that the gateway does before it serves."""
    program = "import sys; from everserve.gateway import prepared as m; m.load_tokenizer(sys.argv[1], None)"
    program += "; assert 'tokenizers' in sys.modules and not {'transformers', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program, str(DEMO_MODEL)], check=True)


TEMPLATES = {
    "a usual one": (
        "{{ bos_token }}{% for m in messages %}\n  {%- if loop.first %}\n[{{ m['role'] }}]\n{% endif %}\n"
        "    {% set text = m.content | trim %}\n    {{ text }}{{ eos_token }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "loop controls, a namespace, a dict and macros": (
        "{% macro say(x) %}<{{ x }}>{% endmacro %}{% set ns = namespace(n=0) %}{% set d = dict(a=1) %}"
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}"
        "{{ say(m.content) }}{% endfor %}{{ ns.n }}{{ d.a }}{{ tools is none }}{{ documents }}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2, ensure_ascii=True, sort_keys=True) }}",
    "generation": (
        "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x }}|{% endfor %}"
    ),
    "thinking": "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}",
    "variables": "{{ enable_thinking }}{{ extra.deep[0] }}{{ eos_token }}{{ strftime_now('%Y') }}{{ messages|length }}",
}
FORBIDDEN = (
    "{{ raise_exception('no ' ~ messages[0].role) }}",
    "{{ messages.append(1) }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ dict.__init__.__globals__ }}",
    "{% set ns = namespace(_x=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ messages[0].content.missing.more }}",
)


DEFAULTS: dict[str, Any] = {"max_characters": 10_000}


def render_both(source: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """What each of the two makes of it; an error's kind is enough."""
    theirs = transformers_class()(tokenizer_object=byte_level_tokenizer(), eos_token=EOS, bos_token="<s>")
    theirs.chat_template = source
    special = theirs.special_tokens_map
    variables = options.pop("variables", {})
    rendered = []
    for render in (
        lambda: theirs.apply_chat_template(messages, tokenize=False, **options, **variables),
        lambda: ChatTemplate(source, special).render(messages, **DEFAULTS | options, variables=variables),
    ):
        try:
            rendered.append(str(render()))
        except Exception as error:
            rendered.append(f"{type(error).__name__}: {error}")
    return rendered


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}], ids=str)
def test_the_same_text(name: str, options: dict[str, bool]) -> None:
    for messages in ([HELLO], [HELLO, ANSWER], [HELLO, ANSWER, HELLO, HELLO]):
        variables = {"enable_thinking": False, "extra": {"deep": [EOS]}, "eos_token": "other"}
        theirs, ours = render_both(TEMPLATES[name], messages, **options, variables=variables)
        if theirs.startswith("ValueError"):  # a last message that is not there cannot be continued
            assert ours.startswith("ValueError")
        else:
            assert ours == theirs
    assert str(datetime.now().year) in ours if name == "variables" and not options else True


@pytest.mark.parametrize("source", FORBIDDEN)
def test_the_same_refusals(source: str) -> None:
    theirs, ours = (text.split(":")[0] for text in render_both(source, [HELLO]))
    assert ours == theirs and ours in ("TemplateError", "SecurityError", "UndefinedError")


def test_a_broken_template_is_told_at_once() -> None:
    tokenizer = load_tokenizer(str(DEMO_MODEL), "{% if %}")
    with pytest.raises(ConfigError, match=r"the chat template is broken: .* \(line 1\)"):
        asyncio.run(tokenizer.check_template())


def test_the_parameters_of_transformers_are_reserved() -> None:
    assert inspect.signature(transformers_class().apply_chat_template).parameters.keys() - {"self"} <= RESERVED
