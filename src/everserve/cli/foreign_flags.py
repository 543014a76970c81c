"""Flags of vLLM that `serve` does not have: what to do instead, or why nothing has to be done.

A flag that is unknown in any other way gets the names of flags that look like it, but never that of one that lets
faults be injected.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperCommand

from everserve.errors import ConfigError

NEVER_SUGGESTED = ("enable-chaos",)

# What to do -> the flags it is said of.
_INSTEAD = {
    "what weights are quantised with is read from config.json; leave it out": (
        *("quantization-config", "allow-deprecated-quantization"),
    ),
    "the KV cache has the dtype of --dtype; leave it out": (
        *("kv-cache-dtype", "kv-cache-dtype-skip-layers", "calculate-kv-scales"),
    ),
    "no code of a model is ever run; leave it out": ("trust-remote-code", "code-revision"),
    "layers are not divided into stages: -tp N divides each of them, --attention-workers and --expert-workers"
    " divide attention from FFNs": ("pipeline-parallel-size",),
    "context is not divided: -tp N divides attention by heads": (
        *("decode-context-parallel-size", "prefill-context-parallel-size", "dcp-comm-backend"),
    ),
    "parsers of calls are built in (--tool-call-parser); leave it out": (
        *("tool-parser-plugin", "tool-server", "tool-strict-level"),
    ),
    "tools that must not be called are never shown; leave it out": ("exclude-tools-when-tool-choice-none",),
    "reasoning is told apart if it is known how it is marked (--reasoning-parser); leave it out": (
        *("reasoning-parser-plugin", "reasoning-config", "enable-reasoning"),
    ),
    "llguidance follows all grammars; leave it out": ("structured-outputs-config", "guided-decoding-backend"),
    "no code of a client is ever run; leave it out": ("logits-processor-pattern", "logits-processors"),
    "--speculative-config has it": (
        *("speculative-model", "num-speculative-tokens", "spec-method", "spec-model"),
        *("spec-tokens", "num-lookahead-slots"),
    ),
    "adapters are not built: merge them into the model's weights first": (
        *("enable-lora", "lora-modules", "max-loras", "max-lora-rank", "max-cpu-loras", "lora-dtype"),
        *("fully-sharded-loras", "lora-extra-vocab-size", "enable-lora-bias", "lora-target-modules"),
    ),
    "images, audio and video are not built; leave it out": (
        *("limit-mm-per-prompt", "mm-processor-kwargs", "mm-processor-cache-gb", "allowed-local-media-path"),
        *("allowed-media-domains", "media-io-kwargs", "mm-encoder-tp-mode", "disable-mm-preprocessor-cache"),
        *("language-model-only", "skip-mm-profiling", "interleave-mm-strings", "enable-mm-embeds"),
    ),
    "the KV cache is not moved to the host when it is full: --kv-cache-memory-bytes sizes it; leave it out": (
        *("swap-space", "preemption-mode", "kv-offloading-size", "kv-offloading-backend"),
    ),
    "weights of a GPU are all in its memory: divide the model over more of them; leave it out": (
        *("cpu-offload-gb", "cpu-offload-params", "offload-backend"),
    ),
    "--kv-cache-memory-bytes sizes the KV cache": ("num-gpu-blocks-override",),
    "KV is not handed to other servers; leave it out": ("kv-transfer-config", "kv-events-config", "ec-transfer-config"),
    "steps on a GPU are always captured as graphs, and nothing is compiled for a model; leave it out": (
        *("enforce-eager", "compilation-config", "optimization-level", "cudagraph-capture-sizes"),
        *("max-cudagraph-capture-size", "max-seq-len-to-capture", "use-v2-block-manager", "performance-mode"),
    ),
    "there is one set of kernels for each device; leave it out": (
        *("attention-backend", "attention-config", "moe-backend", "linear-backend", "kernel-config", "model-impl"),
        *("all2all-backend", "disable-custom-all-reduce", "disable-cascade-attn", "enable-flashinfer-autotune"),
    ),
    "prompts are always computed in chunks: --max-num-batched-tokens and --max-prefill-while-decoding bound them; leave"
    " it out": (
        *("enable-chunked-prefill", "long-prefill-token-threshold", "max-num-partial-prefills"),
        "max-long-partial-prefills",
    ),
    "on a GPU the next step is always launched ahead; leave it out": (
        *("async-scheduling", "num-scheduler-steps", "multi-step-stream-outputs"),
    ),
    "which stream is computed next cannot be chosen; leave it out": (
        *("scheduling-policy", "scheduler-cls", "scheduler-delay-factor", "scheduler-reserve-full-isl"),
    ),
    "sliding windows are not built: models with one are refused; leave it out": (
        *("disable-sliding-window", "disable-hybrid-kv-cache-manager"),
    ),
    "weights are read in place, or by all workers at once; leave it out": (
        *("max-parallel-loading-workers", "safetensors-load-strategy", "model-loader-extra-config"),
        *("use-tqdm-on-load", "pt-load-map-location"),
    ),
    "workers are processes of this machine, and nothing else runs them; leave it out": (
        *("distributed-executor-backend", "worker-cls", "worker-use-ray", "worker-extension-cls"),
        *("data-parallel-backend", "ray-workers-use-nsight", "distributed-timeout-seconds"),
    ),
    "an instance is on one machine: start one on each, behind a proxy": (
        *("nnodes", "node-rank", "master-addr", "master-port", "headless", "data-parallel-address"),
        *("data-parallel-rpc-port", "data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local"),
        *("data-parallel-hybrid-lb", "data-parallel-external-lb"),
    ),
    "--gateways N is the same": ("api-server-count",),
    "only HTTP is spoken; leave it out": ("grpc",),
    "dead workers are always replaced, and their streams go on; leave it out": (
        *("enable-fault-tolerance", "fault-tolerance-config", "enable-elastic-ep"),
    ),
    "TLS in the gateway would die with it, and connections are to outlive a gateway: have a proxy in front end TLS"
    " (deploy/nginx/everserve.conf)": (
        *("ssl-certfile", "ssl-keyfile", "ssl-keyfile-password", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers"),
        "enable-ssl-refresh",
    ),
    "--log-level says it of all processes": ("uvicorn-log-level",),
    "requests are never logged: --event-log has what happens to workers; leave it out": (
        *("disable-log-requests", "enable-log-requests", "max-log-len", "enable-log-outputs", "enable-log-deltas"),
        *("disable-uvicorn-access-log", "disable-access-log-for-endpoints"),
    ),
    "statistics are at /metrics, and never logged; leave it out": (
        *("disable-log-stats", "aggregate-engine-logging", "show-hidden-metrics-for-version"),
    ),
    "it is always on; leave it out": (
        *("enable-server-load-tracking", "enable-tokenizer-info-endpoint", "enable-request-id-headers"),
        "enable-prompt-tokens-details",
    ),
    "the model is the argument itself: everserve serve MODEL": ("model",),
    "the tokenizer is the one in the model's directory; leave it out": (
        *("tokenizer", "tokenizer-mode", "tokenizer-revision", "skip-tokenizer-init", "tokenizer-pool-size"),
    ),
    "set HF_HUB_CACHE to that directory instead": ("download-dir",),
    "the model's own files are what is served: change them in a copy": (
        *("hf-overrides", "hf-config-path", "rope-scaling", "rope-theta", "config-format", "generation-config"),
        *("override-generation-config", "model-class-overrides"),
    ),
    "only text is generated; leave it out": ("task", "runner", "convert", "pooler-config"),
    "--max-queue bounds the requests that wait": ("max-num-queued-reqs",),
    "it is not built; leave it out": ("enable-sleep-mode", "enable-prompt-embeds", "enable-dbo"),
}
HINTS = {flag: instead for instead, flags in _INSTEAD.items() for flag in flags}
_SHORT = {
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-cc": "compilation-config",
    "-O": "optimization-level",
    "-ac": "attention-config",
    "-asc": "api-server-count",
    "-n": "nnodes",
    "-r": "node-rank",
}


def hint(flag: str) -> str | None:
    """What to do instead of this flag, as it was written on a command line or in a file; None if it is not vLLM's."""
    name = flag.partition("=")[0]
    plain = _SHORT.get(name, name).lstrip("-").replace("_", "-")
    return HINTS.get(plain) or HINTS.get(plain.removeprefix("no-"))


def similar(flag: str, known: Iterable[str]) -> list[str]:
    """Those of the known names that this one may have meant."""
    plain = flag.lstrip("-").replace("_", "-")
    names = {name.lstrip("-").replace("_", "-"): name for name in known}
    found = difflib.get_close_matches(plain, names.keys() - NEVER_SUGGESTED, n=3)
    return [names[name] for name in found]


class ServeCommand(TyperCommand):
    """A command that says of vLLM's flags what to do instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # which class it is depends on typer's version
            flag = getattr(error, "option_name", None)
            if flag is None or not hasattr(error, "possibilities"):
                raise
            raise ConfigError(self._why_not(_as_written(flag, given))) from None

    def _why_not(self, flag: str) -> str:
        if (instead := hint(flag)) is not None:
            return f"{flag}: {instead}"
        known = [name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)]
        meant = similar(flag, (name for name in known if name.startswith("--")))
        return f"No such option: {flag}" + (f" (did you mean {' or '.join(meant)}?)" if meant else "")


def _as_written(flag: str, arguments: Sequence[str]) -> str:
    """The flag as the user wrote it: of `-pp 2` the parser says that there is no `-p`."""
    if flag.startswith("--"):
        return flag
    return next((one for one in arguments if one.startswith(flag) and hint(one)), flag).partition("=")[0]
