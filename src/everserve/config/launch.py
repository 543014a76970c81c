"""What only the process of `everserve serve` needs: how it starts the others."""

from pathlib import Path
from typing import Annotated

from everserve.config.base import Config, Flag
from everserve.errors import ConfigError


class LaunchConfig(Config, frozen=True, kw_only=True):
    """Files, and the share of a machine that an instance takes."""

    revision: Annotated[
        str | None, Flag("Of a MODEL that is a name of the hub: a branch, a tag or a commit (default: main).")
    ] = None
    hf_token: Annotated[
        str | None,
        Flag("Token for models of the hub that need one; better in HF_TOKEN.", envvar="HF_TOKEN"),
    ] = None
    chat_template: Annotated[Path | None, Flag("Jinja file to use instead of the model's own template.")] = None
    share_device: Annotated[
        bool | None,
        Flag("Several workers on one GPU, through NVIDIA's MPS. Default: if there are more workers than GPUs."),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Flag("Share of a GPU's memory to use; the KV cache gets what weights and buffers leave (default 0.9)."
             " On a CPU: share of the available RAM for the KV cache (default 0.25)."),
    ] = None  # fmt: skip
    log_format: Annotated[
        str,
        Flag("How log lines look: text, or json: one JSON object per line, of every process.", choices=("text", "json"),
             envvar="EVERSERVE_LOG_FORMAT"),
    ] = "text"  # fmt: skip
    log_level: Annotated[
        str,
        Flag(
            "The least that is logged: debug, info, warning or error.",
            choices=("debug", "info", "warning", "error"),
            envvar="EVERSERVE_LOG_LEVEL",
        ),
    ] = "info"
    otlp_traces_endpoint: Annotated[
        str | None,
        Flag("Send a trace of each request there, as OTLP over HTTP: http://localhost:4318/v1/traces."),
    ] = None

    cluster_port: Annotated[
        int, Flag("With --hosts: where other hosts join. Only those with the cluster key are let in.", min=1, max=65535)
    ] = 8010
    cluster_key: Annotated[
        Path | None,
        Flag("With --hosts: the file that lets hosts in. It is made if it is not there; copy it to the other hosts."),
    ] = None

    def check(self) -> None:
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
