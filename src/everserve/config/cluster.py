"""How many workers an instance has, and when one of them counts as dead."""

from typing import Annotated

import msgspec

from everserve.config.base import Config, Flag
from everserve.errors import ConfigError
from everserve.words import count

MAX_RANKS = 64  # of an instance: C and kernels keep sets of ranks in one word (backends/cpu/csrc/lanes/lane.h)

_MIN_SLOW_FACTOR = 1.2  # equal workers differ by so much
_MIN_DETECT_MS, _MAX_DETECT_MS = 20, 60_000  # below that, busy machines make live workers look dead


class ClusterConfig(Config, frozen=True, kw_only=True):
    """Attention workers are the first ranks, expert workers follow; both are dealt to the devices in this order."""

    attention_workers: Annotated[int, Flag("Workers that own requests and their KV cache.", min=1, max=MAX_RANKS)] = 1
    expert_workers: Annotated[
        int, Flag("Workers that own experts. 0: each attention worker has all experts itself.", min=0, max=MAX_RANKS)
    ] = 0
    data_parallel_size: Annotated[
        int | None,
        Flag("The same as so many --attention-workers; with --enable-expert-parallel also --expert-workers and"
             " --devices.", short="-dp", min=1, max=MAX_RANKS),
    ] = None  # fmt: skip
    enable_expert_parallel: Annotated[
        bool, Flag("An attention and an expert worker on each of --data-parallel-size devices.")
    ] = False
    tensor_parallel_size: Annotated[
        int | None,
        Flag("Divide every layer over so many devices, each with an attention and an expert worker. Any number:"
             " the bits of a stream do not depend on it.", short="-tp", min=1, max=MAX_RANKS // 2),
    ] = None  # fmt: skip
    devices: Annotated[
        int | None,
        Flag("Failure domains: workers on one device are lost together, with all memory on it. On CPUs sets of workers"
             " (default: each worker alone); on GPUs shares of them (default: each GPU is one).", min=1, max=MAX_RANKS),
    ] = None  # fmt: skip
    max_workers: Annotated[
        int | None,
        Flag("Most workers that `everserve scale` may ask for. Default: those at the start.", min=1, max=MAX_RANKS),
    ] = None
    survive_losses: Annotated[  # cli/survive_losses.py
        int | None,
        Flag("So many workers or devices may be lost at once without a stream that waits for weights: sets"
             " --shadow-experts, --shadow-shards and --max-lost-devices where they are not given. Default: 1 without"
             " -tp.", min=0),
    ] = None  # fmt: skip
    shadow_experts: Annotated[
        int | None,
        Flag("Inactive copies per expert worker and layer. Default: enough to survive the death of any one.", min=0),
    ] = None
    shadow_shards: Annotated[
        int | None,
        Flag("With -tp: so many further places of the weights of every head, slice and expert, on other devices. Then a"
             " loss leaves none without a place, and of heads only KV has to be fetched. Default: 0.", min=0),
    ] = None  # fmt: skip
    max_lost_devices: Annotated[
        int | None,
        Flag("With -tp on GPUs: so many devices can be lost at once, and the others have room for what they had."
             " Default: 1 of three or more. On CPUs the others always have room.", min=0),
    ] = None  # fmt: skip
    map_experts: Annotated[
        str,
        Flag("Experts without a place whose worker has only died are served where it left them, by workers that reach"
             " its memory: on the same GPU; on CPUs with --weights memory, where auto means on, and else off.",
             choices=("auto", "on", "off")),
    ] = "auto"  # fmt: skip
    on_lost_expert: Annotated[
        str,
        Flag("While an expert has no place: streams that need it wait; or it is masked; or an attention worker becomes"
             " an expert worker if the others have no room for it. Loading it again begins at once in any case.",
             choices=("wait", "mask", "switch-role", "mask-and-switch-role")),
    ] = "wait"  # fmt: skip
    max_masked_experts: Annotated[
        float,
        Flag("Most masked experts of a layer: a number, or below 1 a share of them (at least one expert).", min=0),
    ] = 1 / 32
    enable_eplb: Annotated[
        bool,
        Flag("Let experts change places, and hot ones have several, by their load. Costs copies of weights at times."),
    ] = False
    spares: Annotated[
        int, Flag("Processes per device that wait to become workers: replacements start sooner.", min=0, max=8)
    ] = 0
    health_source: Annotated[
        str | None,
        Flag("A file, or a command that is run every few seconds, with lines DEVICE LEVEL REASON: how healthy devices"
             " are."),
    ] = None  # fmt: skip
    detect_ms: Annotated[
        float,
        Flag("A worker that shows no sign of life for this long counts as dead. 0: only those whose process ended."),
    ] = 50.0
    hosts: Annotated[
        int,
        Flag("Wait for so many hosts, this one among them, and spread the workers over them. Each of the others runs"
             " `everserve agent --join`.", min=1, max=MAX_RANKS),
    ] = 1  # fmt: skip
    host_grace_s: Annotated[
        float,
        Flag("A host of which nothing was heard for this long is lost. For less its streams wait, and go on there.",
             min=0.5, max=60.0),
    ] = 2.0  # fmt: skip
    slow_factor: Annotated[
        float,
        Flag("A worker that needs more than this times as long as others for the same work is routed around and at last"
             " replaced. 0: only shown.", min=0),
    ] = 2.0  # fmt: skip

    def check(self) -> None:
        if self.max_masked_experts > 1 and not float(self.max_masked_experts).is_integer():
            raise ConfigError(f"--max-masked-experts {self.max_masked_experts:g}: a whole number, or a share below 1")
        if self.num_workers > MAX_RANKS:
            raise ConfigError(f"{count(self.num_workers, 'worker')}: an instance has at most {MAX_RANKS}")
        if self.shadow_shards and self.tensor_parallel_size is None:
            raise ConfigError(f"--shadow-shards {self.shadow_shards} needs -tp: elsewhere say --shadow-experts")
        if self.max_lost_devices and (self.tensor_parallel_size or 0) <= self.max_lost_devices:
            raise ConfigError(f"--max-lost-devices {self.max_lost_devices}: with -tp, and fewer than its devices")
        is_resolved = self.data_parallel_size is None and self.tensor_parallel_size is None
        if self.devices is not None and is_resolved and self.devices > self.num_workers:
            raise ConfigError(f"--devices {self.devices}: only {count(self.num_workers, 'worker')} to put on them")
        if self.max_workers is not None and self.max_workers < self.num_workers:
            raise ConfigError(f"--max-workers {self.max_workers}: it starts with {count(self.num_workers, 'worker')}")
        self._check_hosts()
        if self.detect_ms and not _MIN_DETECT_MS <= self.detect_ms <= _MAX_DETECT_MS:
            raise ConfigError(f"--detect-ms {self.detect_ms:g}: choose 0 or {_MIN_DETECT_MS} to {_MAX_DETECT_MS}")
        if 0 < self.slow_factor < _MIN_SLOW_FACTOR:
            raise ConfigError(f"--slow-factor {self.slow_factor:g}: choose 0 or at least {_MIN_SLOW_FACTOR:g}")

    def _check_hosts(self) -> None:
        """Replicas of the whole model: nothing is divided over hosts yet."""
        if self.hosts == 1:
            return
        is_divided = self.expert_workers or self.tensor_parallel_size is not None or self.enable_expert_parallel
        if is_divided:
            raise ConfigError(
                f"--hosts {self.hosts}: every worker has the whole model, so without --expert-workers, -tp and"
                " --enable-expert-parallel; say --attention-workers"
            )
        if self.data_parallel_size is None and self.attention_workers < self.hosts:
            raise ConfigError(f"--hosts {self.hosts}: give each at least one of --attention-workers")
        if self.devices is not None and self.devices % self.hosts:
            raise ConfigError(f"--hosts {self.hosts} --devices {self.devices}: every host has as many devices")

    def resolved(self) -> "ClusterConfig":
        """The same configuration with the workers that data, expert and tensor parallelism stand for."""
        if self.tensor_parallel_size is not None:
            return self._resolved_tensor_parallel(self.tensor_parallel_size)
        size = self.data_parallel_size
        if size is None:
            if self.enable_expert_parallel:
                raise ConfigError("--enable-expert-parallel: say on how many devices, with --data-parallel-size N")
            return self
        num_expert, devices = self.expert_workers, self.devices
        if self.attention_workers not in (1, size):
            raise ConfigError(f"--data-parallel-size {size} means {size} --attention-workers: leave one of them out")
        if self.enable_expert_parallel:
            if num_expert not in (0, size) or devices not in (None, size):
                raise ConfigError(
                    f"--data-parallel-size {size} --enable-expert-parallel means {size} --expert-workers and"
                    f" {size} --devices: leave those flags out"
                )
            num_expert = devices = size
        found = msgspec.structs.replace(
            self, data_parallel_size=None, enable_expert_parallel=False,
            attention_workers=size, expert_workers=num_expert, devices=devices,
        )  # fmt: skip
        found.check()
        return found

    def _resolved_tensor_parallel(self, size: int) -> "ClusterConfig":
        """On one device nothing is divided, and one worker does everything; the model is cut all the same."""
        if self.data_parallel_size is not None or self.enable_expert_parallel:
            raise ConfigError("--tensor-parallel-size and --data-parallel-size: choose one of them")
        num_expert = size if size > 1 else 0
        said = self.attention_workers in (1, size), self.expert_workers in (0, num_expert), self.devices in (None, size)
        if not all(said):
            raise ConfigError(
                f"--tensor-parallel-size {size} means {size} --attention-workers, {num_expert} --expert-workers and"
                f" {size} --devices: leave those flags out"
            )
        found = msgspec.structs.replace(self, attention_workers=size, expert_workers=num_expert, devices=size)
        found.check()
        return found

    @property
    def num_workers(self) -> int:
        return self.attention_workers + self.expert_workers

    @property
    def num_growth(self) -> int:
        """How many workers more than at the start there may be."""
        return max(0, (self.max_workers or 0) - self.num_workers)
