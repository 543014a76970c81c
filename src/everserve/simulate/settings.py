"""What is simulated: the flags of `everserve simulate`."""

from typing import Annotated, Literal

from everserve.config.base import Config, Flag
from everserve.errors import ConfigError
from everserve.words import count

SEATS_PER_GPU = 2  # an attention worker and an expert worker


class Settings(Config, frozen=True, kw_only=True):
    """A fleet, what happens to it, and how long things take there; all of it goes into the JSON."""

    instances: Annotated[int, Flag("Instances of the fleet.", min=1)] = 40
    seats: Annotated[int, Flag("Workers of each instance: on every GPU an attention and an expert worker.", min=4)] = (
        256
    )
    gpus_per_host: Annotated[int, Flag("GPUs of a host. A host is lost as a whole.", min=1)] = 8
    hosts_per_rack: Annotated[int, Flag("Hosts that one switch or power supply takes along.", min=1)] = 8
    days: Annotated[float, Flag("How long, in virtual time.", min=0.1)] = 365.0
    seed: Annotated[int, Flag("Same seed and flags, same result.", min=0)] = 1
    trace: Annotated[
        Literal["infinitehbd", "rates"],
        Flag(
            "Faults of hosts and their repairs: those of a real cluster (infinitehbd), or drawn (rates).",
            choices=("infinitehbd", "rates"),
        ),
    ] = "infinitehbd"
    gpu_hours_per_fault: Annotated[
        float,
        Flag("With --trace rates: GPU hours between faults of a host. Default: as in the training of Llama 3.", min=1),
    ] = 60_700.0
    repair_hours: Annotated[float, Flag("With --trace rates: the mean time to repair.", min=0.01)] = 20.0
    gpu_hours_per_crash: Annotated[
        float,
        Flag(
            "GPU hours between crashes of a worker's process. 0: none. Default: as in the training of Llama 3.", min=0
        ),
    ] = 307_000.0
    rack_years_per_fault: Annotated[
        float, Flag("Years between faults that take a whole rack along. 0: never.", min=0)
    ] = 10.0
    rack_repair_hours: Annotated[float, Flag("How long a rack is away.", min=0.01)] = 1.0
    layers: Annotated[int, Flag("Layers with experts of the model.", min=1)] = 58
    experts: Annotated[int, Flag("Experts of each layer.", min=2)] = 256
    expert_mb: Annotated[float, Flag("Megabytes of one expert.", min=0.001)] = 44.0
    load_gb_s: Annotated[float, Flag("Gigabytes per second at which one worker loads experts.", min=0.001)] = 2.0
    streams: Annotated[int, Flag("Streams of each attention worker.", min=1)] = 32
    kv_mb: Annotated[float, Flag("Megabytes of KV of a stream.", min=0)] = 280.0
    restore_ms: Annotated[
        float, Flag("Milliseconds until a stream of a lost attention worker goes on elsewhere.", min=0)
    ] = 500.0
    detect_ms: Annotated[float, Flag("Milliseconds until the loss of a host is noticed.", min=1)] = 50.0
    start_s: Annotated[float, Flag("Seconds until a new process begins to load weights.", min=0)] = 10.0
    restart_s: Annotated[
        float, Flag("Seconds that a restart of a whole instance takes, for the comparison.", min=0)
    ] = 300.0

    def check(self) -> None:
        """Raises ConfigError."""
        per_host = SEATS_PER_GPU * self.gpus_per_host
        if self.seats % per_host or self.seats < 2 * per_host:
            raise ConfigError(f"--seats {self.seats}: two or more hosts of {count(per_host, 'seat')} each are needed")
        if self.num_pairs > self.experts:
            raise ConfigError(
                f"--seats {self.seats}: {count(self.num_pairs, 'expert worker')} for {self.experts} experts per layer"
            )

    @property
    def num_pairs(self) -> int:
        """Attention workers of an instance, and expert workers."""
        return self.seats // SEATS_PER_GPU

    @property
    def num_hosts(self) -> int:
        """How many an instance has."""
        return self.num_pairs // self.gpus_per_host

    @property
    def num_streams(self) -> int:
        """How many an instance has."""
        return self.num_pairs * self.streams

    @property
    def load_s(self) -> float:
        """One expert."""
        return self.expert_mb / 1e3 / self.load_gb_s
