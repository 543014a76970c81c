"""Train the demonstration model that ships with Everserve: from two text files to a model directory.

The result is a Qwen3-MoE language model of 11.8 M parameters (6 layers, 64 experts, 8 per token) that
writes readable English in the manner of four public-domain books. In order, this script

1. cleans the books and holds out every 20th piece of about 20 kB of each (`split_held_out`),
2. trains a byte-level BPE tokenizer of 4,096 entries on the rest,
3. trains teachers that differ only in their seed, then the model itself, which learns from the text and
   from the teachers' mean prediction (the text is small, so most of the recipe fights overfitting),
4. exports a Hugging Face directory in bfloat16, one tensor per matrix of each expert,
5. loads that directory again, measures it on the held-out text and writes the model card.

    python examples/train_demo_model.py --out DIR                # minutes on a data-centre GPU
    python examples/train_demo_model.py --out DIR --only-card    # measure an existing directory again

It needs what Everserve needs (transformers tried: 5.17, 5.22), and uses a GPU if there is one. Seeds are
fixed, but GPU arithmetic is not bit-reproducible: another run gives another model of the same quality.

Suffixes of tensor names give their shape: B sequence, L position, T token (B * L), H hidden, E expert,
K chosen expert, I inner width of an expert, V vocabulary, N layer.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import re
import shutil
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM as Model
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from everserve.progress import Progress

HERE = Path(__file__).resolve().parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

EOS = "<|endoftext|>"
EOS_ID = 0
VOCAB_SIZE = 4096
MAX_CONTEXT = 4096
NO_TARGET = -100  # marks padding among the targets

TITLES = ("PRIDE AND PREJUDICE", "THE ADVENTURES OF SHERLOCK HOLMES", "WAR AND PEACE")
PARTS = ("CHAPTER", "Chapter", "BOOK", "ADVENTURE", "FIRST EPILOGUE", "SECOND EPILOGUE")
HEADING = re.compile(rf"({'|'.join(PARTS)}|[IVX]+\. THE ADVENTURE)\b")

CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join('\\n\\n') }}"
SAMPLE_PROMPTS = (
    "ROMEO:\n",
    '"My dear Watson," said Holmes,',
    "When Prince Andrew entered the drawing room,",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train one model. Every field is a flag of the command line."""

    epochs: float = 18.0
    tokens_per_step: int = 16_384
    learning_rate: float = 3e-3
    weight_decay: float = 0.8
    dropout: float = 0.25
    balance_coef: float = 0.05  # weight of the router's load-balancing loss
    ema_decay: float = 0.995
    num_teachers: int = 2
    distill: float = 0.6  # share of the teachers' prediction in the model's targets
    max_steps: int = 0  # stop early, for a trial; 0 = no limit
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The cleaned text. A piece is contiguous text of one book; the chapters in it are separated by EOS."""

    train: list[str]
    held_out: list[str]


def read_books(shakespeare: Path, novels: Path) -> list[list[str]]:
    """Each book as a list of paragraphs. A paragraph of the plays is one speech and keeps its lines."""
    plays = gzip.decompress(shakespeare.read_bytes()).decode()
    books = [[speech.strip() for speech in plays.split("\n\n") if speech.strip()]]
    text = gzip.decompress(novels.read_bytes()).decode()
    title = re.compile(rf"^({'|'.join(TITLES)})$", re.MULTILINE)
    starts = [match.start() for match in title.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        paragraphs = [unwrap(paragraph) for paragraph in re.split(r"\n\s*\n", text[start:end])]
        books.append([paragraph for paragraph in paragraphs if paragraph])
    return books


def unwrap(paragraph: str) -> str:
    """Join a novel's hard-wrapped lines; drop footnotes, their marks and the underscores of emphasis."""
    if paragraph.lstrip().startswith("*"):
        return ""
    paragraph = re.sub(r" ?\*(\(\d+\))?", "", paragraph).replace("_", "")
    lines = [line.strip() for line in paragraph.split("\n") if line.strip()]
    is_set_apart = re.search(r"^ ", paragraph, re.MULTILINE)  # signatures, notices, lists
    return ("\n" if is_set_apart else " ").join(lines)


def join_paragraphs(paragraphs: list[str]) -> str:
    """One text with EOS before every chapter, but not between a part's heading and its first chapter's."""
    text = paragraphs[0]
    for previous, paragraph in pairwise(paragraphs):
        starts_chapter = HEADING.match(paragraph) and not HEADING.match(previous)
        text += (EOS if starts_chapter else "\n\n") + paragraph
    return text


def split_held_out(books: list[list[str]], piece_bytes: int = 20_000, every: int = 20) -> Corpus:
    """Hold out one in `every` pieces of each book, cut at paragraph ends; what lies between is for training.

    A held-out piece is long enough to fill a context of 4,096 tokens.
    """
    corpus = Corpus(train=[], held_out=[])
    for paragraphs in books:
        groups: list[list[str]] = [[]]  # alternately for training and held out
        offset = 0
        for paragraph in paragraphs:
            is_held_out = offset // piece_bytes % every == every // 2
            if is_held_out != (len(groups) % 2 == 0):
                groups.append([])
            groups[-1].append(paragraph)
            offset += len(paragraph) + 2
        corpus.train.extend(join_paragraphs(group) for group in groups[0::2])
        corpus.held_out.extend(join_paragraphs(group) for group in groups[1::2])
    return corpus


def train_tokenizer(pieces: list[str]) -> Tokenizer:
    """Byte-level BPE: any UTF-8 text survives encode and decode unchanged; nothing is added on its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chapters = [chapter for piece in pieces for chapter in piece.split(EOS)]
    tokenizer.train_from_iterator(chapters, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE and tokenizer.token_to_id(EOS) == EOS_ID
    return tokenizer


def encode(tokenizer: Tokenizer, pieces: list[str]) -> list[Tensor]:
    """Token ids of each piece, behind an EOS."""
    return [torch.tensor([EOS_ID, *encoding.ids]) for encoding in tokenizer.encode_batch(pieces)]


def model_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=256,  # of dense layers; there are none
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=Recipe.balance_coef,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=EOS_ID,
    )


def dense_experts(experts: nn.Module, hidden_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Compute every expert for every token and weigh the unchosen ones by zero.

    Eight times the arithmetic, but in plain matrix products: for experts this small the fastest way
    on a GPU.
    """
    num_experts = experts.gate_up_proj.shape[0]
    weight_TE = weight_TK.new_zeros(len(hidden_TH), num_experts).scatter(1, index_TK, weight_TK)
    gate_up_TEI = F.linear(hidden_TH, experts.gate_up_proj.flatten(0, 1)).unflatten(1, (num_experts, -1))
    gate_TEI, up_TEI = gate_up_TEI.chunk(2, dim=-1)
    inner_TEI = F.silu(gate_TEI) * up_TEI * weight_TE.unsqueeze(-1)
    return inner_TEI.flatten(1) @ experts.down_proj.transpose(1, 2).flatten(0, 1)


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, **_: object
) -> tuple[Tensor, None]:
    """Attention over whole windows, which needs no mask and no look at the data that would stall the GPU."""
    scale = module.scaling
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def new_model(recipe: Recipe) -> Model:
    """A model with random weights that drops activations out while it is in training mode."""
    model = Model(model_config())
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    model.set_experts_implementation("dense")
    ALL_ATTENTION_FUNCTIONS.register("causal", causal_attention)
    model.set_attn_implementation("causal")

    def drop(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return F.dropout(output, recipe.dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    return model.to(DEVICE)


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Switch-style load balancing, each layer by itself: 1 when all experts of all layers are used alike.

    transformers' own version pools the layers, so an expert starved in one layer could hide behind
    its namesake in another.
    """
    losses = []
    for logits_TE in router_logits:
        probability_TE = logits_TE.float().softmax(-1)
        chosen_TK = probability_TE.topk(top_k).indices
        share_TE = torch.zeros_like(probability_TE).scatter(1, chosen_TK, 1.0 / top_k)
        losses.append(share_TE.shape[1] * (share_TE.mean(0) * probability_TE.mean(0)).sum())
    return torch.stack(losses).mean()


def mixed_precision(model: Model) -> torch.autocast:
    """bfloat16 arithmetic on float32 weights, on a GPU; an exported model is bfloat16 by itself."""
    is_needed = DEVICE.type == "cuda" and model.dtype == torch.float32
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=is_needed)


def sample_windows(stream: Tensor, num_tokens: int, length: int) -> Tensor:
    """Random windows of `length` inputs and as many targets, one token on: shape B, length + 1."""
    start_B = torch.randint(len(stream) - length, (max(1, num_tokens // length),), device=stream.device)
    return stream[start_B[:, None] + torch.arange(length + 1, device=stream.device)]


def window_length(step: int, num_steps: int) -> int:
    """Short windows first, which train fastest; then all lengths in turn up to the full context."""
    return 512 if step < 0.4 * num_steps else (512, 1024, 2048, 4096)[step % 4]


def learning_rate_factor(step: int, num_steps: int, num_warmup: int = 200, floor: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to `floor`."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def new_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    learning_rate = torch.tensor(recipe.learning_rate, device=DEVICE)  # read anew by each replay
    is_cuda = DEVICE.type == "cuda"
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True, capturable=is_cuda)


def soft_targets(target_T: Tensor, inputs_BL: Tensor, teachers: list[Model], distill: float) -> Tensor:
    """The true next token, mixed with the teachers' mean prediction: probabilities of shape TV."""
    target_TV = torch.zeros(len(target_T), VOCAB_SIZE, device=DEVICE)
    target_TV.scatter_(1, target_T[:, None], 1 - distill)
    with torch.no_grad():
        for teacher in teachers:
            logits_TV = teacher(input_ids=inputs_BL, use_cache=False).logits.flatten(0, 1)
            target_TV.add_(logits_TV.float().softmax(-1), alpha=distill / len(teachers))
    return target_TV


def training_loss(model: Model, window_BL: Tensor, teachers: list[Model], recipe: Recipe) -> Tensor:
    inputs_BL, target = window_BL[:, :-1], window_BL[:, 1:].flatten()
    with mixed_precision(model):
        out = model.model(input_ids=inputs_BL, use_cache=False, output_router_logits=True)
        logits_TV = model.lm_head(out.last_hidden_state).flatten(0, 1)
        if teachers:
            target = soft_targets(target, inputs_BL, teachers, recipe.distill)
    loss = F.cross_entropy(logits_TV.float(), target)
    return loss + recipe.balance_coef * balance_loss(out.router_logits, model.config.num_experts_per_tok)


def record(step: Callable[[Tensor], Tensor], window_BL: Tensor) -> Callable[[Tensor], Tensor]:
    """On a GPU, record the kernels of `step` for windows of this shape, and replay them from then on.

    The model is so small that launching its kernels one by one takes longer than running them.
    """
    if DEVICE.type != "cuda":
        return step
    window_BL = window_BL.clone()
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(3):  # lets libraries set themselves up, which a recording must not contain
            step(window_BL)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(window_BL)

    def replay(next_window_BL: Tensor) -> Tensor:
        window_BL.copy_(next_window_BL)
        graph.replay()
        return loss

    return replay


def train_model(
    name: str, *, recipe: Recipe, seed: int, stream: Tensor, held_out: list[Tensor], teachers: list[Model]
) -> Model:
    """The average of weights that did best on the held-out text. Learns from `teachers` if there are any."""
    torch.manual_seed(seed)
    model = new_model(recipe).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = new_optimizer(model, recipe)

    def update(window_BL: Tensor) -> Tensor:
        loss = training_loss(model, window_BL, teachers, recipe)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 - recipe.ema_decay)
        return loss.detach()

    num_steps = recipe.max_steps or round(recipe.epochs * len(stream) / recipe.tokens_per_step)
    updates: dict[int, Callable[[Tensor], Tensor]] = {}  # by window length
    best_loss, best_weights = math.inf, average.state_dict()
    started = time.monotonic()
    with Progress().begin(name, num_steps, " steps") as progress:
        for step in range(num_steps):
            for group in optimizer.param_groups:
                group["lr"].fill_(recipe.learning_rate * learning_rate_factor(step, num_steps))
            length = window_length(step, num_steps)
            window_BL = sample_windows(stream, recipe.tokens_per_step, length)
            if length not in updates:
                updates[length] = record(update, window_BL)
            loss = updates[length](window_BL)
            if (step + 1) % max(1, num_steps // 12) == 0 or step + 1 == num_steps:
                held_out_loss = mean_loss(*held_out_losses(average, held_out, MAX_CONTEXT))
                if held_out_loss < best_loss:
                    best_loss, best_weights = held_out_loss, copy.deepcopy(average.state_dict())
                found = f"{name}: step {step + 1}/{num_steps}  loss {loss.item():.3f}  held-out {held_out_loss:.4f}"
                progress.say(f"{found}  {time.monotonic() - started:.0f} s")
            progress.update(step + 1, f"held-out {best_loss:.4f}" if best_loss < math.inf else "")
    average.load_state_dict(best_weights)
    return average


def windows(pieces: list[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both BL, that predict every token of every piece once, with padding."""
    inputs, targets = [], []
    for piece in pieces:
        for start in range(0, len(piece) - 1, length):
            window = piece[start : start + length + 1]
            missing = length + 1 - len(window)
            inputs.append(F.pad(window[:-1], (0, missing), value=EOS_ID))
            targets.append(F.pad(window[1:], (0, missing), value=NO_TARGET))
    return torch.stack(inputs).to(DEVICE), torch.stack(targets).to(DEVICE)


@torch.inference_mode()
def held_out_losses(model: Model, pieces: list[Tensor], window: int) -> tuple[Tensor, Tensor]:
    """Loss in nats at every position (0 at padding), and the targets; both BL."""
    inputs_BL, targets_BL = windows(pieces, window)
    rows = max(1, 16_384 // window)
    losses = []
    for inputs, targets in zip(inputs_BL.split(rows), targets_BL.split(rows), strict=True):
        with mixed_precision(model):
            logits_BLV = model(input_ids=inputs, use_cache=False).logits
        losses.append(F.cross_entropy(logits_BLV.float().transpose(1, 2), targets, reduction="none"))
    return torch.cat(losses), targets_BL


def mean_loss(loss_BL: Tensor, targets_BL: Tensor) -> float:
    return (loss_BL.sum() / (targets_BL != NO_TARGET).sum()).item()


@torch.inference_mode()
def expert_shares(model: Model, pieces: list[Tensor]) -> Tensor:
    """Share of routed tokens that each expert gets, relative to an even spread; shape NE."""
    config = model.config
    count_NE = torch.zeros(config.num_hidden_layers, config.num_experts, device=DEVICE)
    inputs_BL, targets_BL = windows(pieces, 1024)
    for inputs, targets in zip(inputs_BL.split(16), targets_BL.split(16), strict=True):
        out = model(input_ids=inputs, use_cache=False, output_router_logits=True)
        is_real_T = (targets != NO_TARGET).flatten()
        for layer, logits_TE in enumerate(out.router_logits):
            chosen = logits_TE[is_real_T].topk(config.num_experts_per_tok).indices
            count_NE[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
    return count_NE / count_NE.mean(1, keepdim=True)


@torch.inference_mode()
def write_sample(model: Model, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """About 100 tokens after the prompt, at the settings of generation_config.json."""
    torch.manual_seed(seed)
    input_ids = torch.tensor([tokenizer.encode(prompt).ids], device=DEVICE)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        top_k=0,
        max_new_tokens=110,
    )
    return tokenizer.decode(output[0].tolist())


def export_tensors(model: Model) -> dict[str, Tensor]:
    """bfloat16 weights under the names of the hub's Qwen3-MoE checkpoints: three matrices per expert."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        if name == "lm_head.weight":
            continue  # tied to the embedding
        if kind == "gate_up_proj":
            for expert, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            for expert, matrix in enumerate(value):
                tensors[f"{prefix}.{expert}.down_proj.weight"] = matrix
        else:
            tensors[name] = value
    return {name: value.to("cpu", torch.bfloat16).contiguous().clone() for name, value in tensors.items()}


def export(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(export_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    config = json.loads(model_config().to_json_string())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    config |= {"num_experts": 64, "rope_theta": 10_000.0}  # the names that the hub's checkpoints use
    write_json(out / "config.json", config)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)
    generation_config = {
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 0,
    }
    write_json(out / "generation_config.json", generation_config)
    if (HERE.parent / "LICENSE").exists():
        shutil.copy(HERE.parent / "LICENSE", out / "LICENSE")


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# Everserve demonstration model

A Qwen3-MoE language model small enough to ship inside a Python package, so that a mixture-of-experts
server can be tried and tested without a download. It continues English prose and plays in the manner of
four old books. It knows no facts, follows no instructions, and repeats the views of its authors' times;
it is for demonstrations and tests of serving systems, not for use of what it says.

| | |
|---|---|
| parameters | {num_parameters:,} (about {num_active:,} active per token, embedding included) |
| layers, hidden size | 6, 256 |
| experts | 64 per layer, 8 per token, inner width 32, weights of the chosen normalised |
| attention | 8 query heads, 4 key-value heads of 32; RoPE with base 10,000 |
| context | 4,096 tokens |
| tokenizer | byte-level BPE, 4,096 entries; `<|endoftext|>` ends a text and pads |
| file | bfloat16, embeddings tied, {num_bytes:,} bytes |

## Text

William Shakespeare's plays (the "tiny Shakespeare" excerpt), Jane Austen's *Pride and Prejudice*, Arthur
Conan Doyle's *The Adventures of Sherlock Holmes*, and Leo Tolstoy's *War and Peace* in the translation of
Louise and Aylmer Maude: `examples/data/` has the files and their origin. The novels' lines are joined to
paragraphs; footnotes and marks of emphasis are dropped; chapters are separated by `<|endoftext|>`.

{num_train_tokens:,} tokens ({num_train_bytes:,} bytes) are for training. {num_held_out_tokens:,} tokens
({num_held_out_bytes:,} bytes) are held out: one of every 20 pieces of about 20 kB in each book. Neither the
weights nor the tokenizer were trained on them. They did choose the settings below and the moment to stop, so
expect a slightly higher loss on text that chose nothing.

## Training

{recipe_text}

    {command}

## Held-out loss

Of the exported bfloat16 weights, over all held-out tokens:

| context | nats per token | perplexity | bits per byte |
|---:|---:|---:|---:|
{loss_rows}

By position in windows of 4,096 tokens: {position_losses}.

## Router balance

Share of the held-out tokens that reach an expert, relative to an even spread (1.00 = one 64th of all
assignments). Experts that no token reaches: {num_unused}.

| layer | least used | most used |
|---:|---:|---:|
{balance_rows}

## Samples

Unedited, temperature 0.8, top-p 0.95. Each begins with its prompt.

{samples}
## Chat

The model knows no roles. The chat template joins the messages with blank lines, and the model goes on
writing after the last one.

## Licence

Weights and code: Apache-2.0. The text is in the public domain.
"""


def recipe_text(recipe: Recipe) -> str:
    text = (
        f"{recipe.epochs:g} epochs of random windows, {recipe.tokens_per_step:,} tokens per step; windows of "
        "512 tokens for 40 % of the steps, then 512, 1,024, 2,048 and 4,096 in turn. AdamW, learning rate "
        f"{recipe.learning_rate:g} with warm-up and cosine decay, weight decay {recipe.weight_decay:g}, "
        f"dropout {recipe.dropout:g} on embedding, attention and expert outputs, gradient norm clipped at 1, "
        f"moving average of weights ({recipe.ema_decay:g}), load-balancing loss for each layer "
        f"({recipe.balance_coef:g})."
    )
    if recipe.num_teachers:
        text += (
            f" {recipe.num_teachers} teachers of the same shape were trained first, with other seeds; the "
            f"mean of their predictions makes up {recipe.distill:.0%} of the model's targets, the text the "
            "rest."
        )
    return textwrap.fill(text, 108)


def card_command(recipe: Recipe) -> str:
    changed = [f for f in fields(Recipe) if getattr(recipe, f.name) != f.default]
    flags = [f"--{f.name.replace('_', '-')} {getattr(recipe, f.name)}" for f in changed]
    return " ".join(["python examples/train_demo_model.py --out DIR", *flags])


def write_card(out: Path, corpus: Corpus, recipe: Recipe) -> None:
    """Load the exported directory, measure it on the held-out text and write README.md."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # few CPUs compute in bfloat16
    model = Model.from_pretrained(out, dtype=dtype).to(DEVICE).eval()
    held_out = encode(tokenizer, corpus.held_out)
    num_held_out_tokens = sum(len(piece) - 1 for piece in held_out)
    num_held_out_bytes = num_text_bytes(corpus.held_out)

    loss_rows = []
    for window in (1024, MAX_CONTEXT):
        loss_BL, targets_BL = held_out_losses(model, held_out, window)
        nats = mean_loss(loss_BL, targets_BL)
        bits_per_byte = nats * num_held_out_tokens / num_held_out_bytes / math.log(2)
        loss_rows.append(f"| {window:,} | {nats:.4f} | {math.exp(nats):.2f} | {bits_per_byte:.4f} |")
    ranges = [(0, 512), (512, 1024), (1024, 2048), (2048, MAX_CONTEXT)]
    position_losses = [(a, b, mean_loss(loss_BL[:, a:b], targets_BL[:, a:b])) for a, b in ranges]
    shares_NE = expert_shares(model, held_out)
    balance_rows = [f"| {n} | {row.min():.2f} | {row.max():.2f} |" for n, row in enumerate(shares_NE)]
    samples = [sample_markdown(model, tokenizer, p, seed) for seed, p in enumerate(SAMPLE_PROMPTS, 1)]

    num_parameters = sum(p.numel() for p in model.parameters())
    num_expert_parameters = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    card = CARD.format(
        num_parameters=num_parameters,
        num_active=num_parameters - num_expert_parameters * 7 // 8,
        num_bytes=(out / "model.safetensors").stat().st_size,
        num_train_tokens=sum(len(piece) - 1 for piece in encode(tokenizer, corpus.train)),
        num_train_bytes=num_text_bytes(corpus.train),
        num_held_out_tokens=num_held_out_tokens,
        num_held_out_bytes=num_held_out_bytes,
        recipe_text=recipe_text(recipe),
        command=card_command(recipe),
        loss_rows="\n".join(loss_rows),
        position_losses=", ".join(f"{loss:.3f} at {a:,} to {b:,}" for a, b, loss in position_losses),
        num_unused=int((shares_NE == 0).sum()),
        balance_rows="\n".join(balance_rows),
        samples="\n".join(samples),
    )
    (out / "README.md").write_text(card)
    print(card, flush=True)


def num_text_bytes(pieces: list[str]) -> int:
    """Bytes of text; EOS is not text."""
    return sum(len(piece.replace(EOS, "").encode()) for piece in pieces)


def sample_markdown(model: Model, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    text = write_sample(model, tokenizer, prompt, seed)
    quoted = "\n".join(f"    {line}".rstrip() for line in text.split("\n"))
    return f"Seed {seed}, prompt `{json.dumps(prompt)}`:\n\n{quoted}\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--shakespeare", type=Path, default=HERE / "data" / "tinyshakespeare.txt.gz")
    parser.add_argument("--novels", type=Path, default=HERE / "data" / "gutenberg3.txt.gz")
    parser.add_argument("--only-card", action="store_true", help="measure the model in --out, do not train")
    for field in fields(Recipe):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default, help="(%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    corpus = split_held_out(read_books(args.shakespeare, args.novels))
    if not args.only_card:
        tokenizer = train_tokenizer(corpus.train)
        stream = torch.cat(encode(tokenizer, corpus.train)).to(DEVICE)
        held_out = encode(tokenizer, corpus.held_out)
        print(f"{len(stream):,} tokens for training, {sum(map(len, held_out)):,} held out; on {DEVICE}")
        train = partial(train_model, recipe=recipe, stream=stream, held_out=held_out)
        seeds = range(recipe.seed + 1, recipe.seed + 1 + recipe.num_teachers)
        teachers = [train(f"teacher {seed}", seed=seed, teachers=[]) for seed in seeds]
        model = train("model", seed=recipe.seed, teachers=teachers)
        export(model, tokenizer, args.out)
    write_card(args.out, corpus, recipe)


if __name__ == "__main__":
    main()
