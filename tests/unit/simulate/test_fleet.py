"""A fleet in virtual time: faults of hosts and processes, what they cost, and that all is whole in the end."""

import csv
import json
from importlib import resources

import msgspec
import pytest

from everserve.errors import ConfigError
from everserve.simulate.faults import Fault, What, faults_of, outages_of_trace
from everserve.simulate.fleet import simulate
from everserve.simulate.others import falling_to_half, restarting
from everserve.simulate.settings import Settings

_DAY_S = 86_400.0
SMALL = {"instances": 2, "seats": 32, "gpus_per_host": 4, "layers": 2, "experts": 16, "days": 30.0, "hosts_per_rack": 2}


def small(**more) -> Settings:
    settings = Settings(**{**SMALL, **more})
    settings.check()
    return settings


BUSY = small(
    trace="rates", gpu_hours_per_fault=2000.0, repair_hours=12.0, gpu_hours_per_crash=2000.0, rack_years_per_fault=0.15
)


def test_the_trace_is_the_published_one() -> None:
    by_node = outages_of_trace()
    assert sum(map(len, by_node)) == 584 and sum(map(bool, by_node)) == 231
    assert all(outage.begin_s <= outage.end_s for ones in by_node for outage in ones)


def test_default_rates_are_those_of_the_published_table() -> None:
    with resources.files("everserve.simulate").joinpath("data/llama3_405b_interruptions.csv").open() as lines:
        rows = [*csv.DictReader(lines)]
    software = {"Software Bug", "NCCL Watchdog Timeouts", "Silent Data Corruption", "Dependency"}
    num_crashes = sum(int(row["count"]) for row in rows if row["component"] in software)
    num_faults = sum(int(row["count"]) for row in rows) - num_crashes
    gpu_hours = 16_384 * 54 * 24
    assert Settings().gpu_hours_per_fault == pytest.approx(gpu_hours / num_faults, rel=0.01)
    assert Settings().gpu_hours_per_crash == pytest.approx(gpu_hours / num_crashes, rel=0.01)


@pytest.mark.parametrize("settings", [BUSY, small(days=400.0)], ids=["rates", "trace"])
def test_hosts_are_lost_and_back_in_turn(settings: Settings) -> None:
    fleet = faults_of(settings)
    assert fleet == faults_of(settings) and fleet != faults_of(small(seed=2, days=settings.days))
    for faults in fleet:
        assert faults == sorted(faults) and all(0 <= fault.at_s < settings.days * _DAY_S for fault in faults)
        for host in range(settings.num_hosts):
            mine = [fault.what for fault in faults if fault.which == host and fault.what is not What.CRASH]
            assert mine == [What.LOST, What.BACK] * (len(mine) // 2) + [What.LOST] * (len(mine) % 2)


def test_an_outage_has_a_length() -> None:
    """Of the trace, some end when they begin: the host is lost first, and then back."""
    fleet = faults_of(small(days=340.0, instances=100))
    waits = {}
    for number, faults in enumerate(fleet):
        for fault in faults:
            if fault.what is What.LOST:
                waits[number, fault.which] = fault.at_s
            elif fault.what is What.BACK:
                assert fault.at_s >= waits.pop((number, fault.which)) + 60


def test_a_fleet_survives_and_is_whole_in_the_end() -> None:
    result = simulate(BUSY)
    assert result.findings == []
    assert all(result.num_faults[what] > 3 for what in What)
    ours, restarted = (result.accounts[name] for name in ("everserve", "restart"))
    assert ours.seconds == pytest.approx(restarted.seconds) == BUSY.instances * BUSY.days * _DAY_S
    assert 0.5 < ours.capacity_s / ours.seconds < 1
    assert sum(ours.pauses.values()) > 0 and ours.weights_bytes > 0 and ours.kv_bytes > 0
    assert max(restarted.pauses) >= BUSY.restart_s


def test_the_same_seed_gives_the_same_result() -> None:
    few = msgspec.structs.replace(BUSY, instances=1, days=8.0)
    first, second = (json.dumps(simulate(few).as_json()) for _ in range(2))
    assert first == second


def test_without_faults_there_are_no_pauses() -> None:
    result = simulate(small(trace="rates", gpu_hours_per_fault=1e12, gpu_hours_per_crash=0.0, rack_years_per_fault=0.0))
    for account in result.accounts.values():
        assert account.capacity_s == pytest.approx(account.seconds) and not account.pauses
    assert result.num_faults == dict.fromkeys(What, 0)


# -- restarting ----------------------------------------------------------------------------------

HOUR = 3600.0
LOST, BACK = Fault(HOUR, What.LOST, 0), Fault(11 * HOUR, What.BACK, 0)


def test_a_restart_at_a_loss_and_at_the_return() -> None:
    settings = small(days=1.0)  # of four hosts
    for policy, share in ((restarting, 3 / 4), (falling_to_half, 2 / 4)):
        account = policy(settings, [LOST, BACK])
        assert account.pauses == {settings.restart_s: 2 * settings.num_streams}
        expected = 1 * HOUR + share * (10 * HOUR - settings.restart_s) + 13 * HOUR - settings.restart_s
        assert account.capacity_s == pytest.approx(expected)


def test_too_few_hosts_serve_nothing() -> None:
    settings = small(days=1.0)
    lost = [Fault(HOUR, What.LOST, host) for host in range(3)]
    account = restarting(settings, [*lost, Fault(3 * HOUR, What.BACK, 1)])
    assert max(account.pauses) == pytest.approx(2 * HOUR + settings.restart_s)


def test_a_fault_of_a_host_that_is_not_used_costs_nothing() -> None:
    settings = small(days=1.0)
    account = falling_to_half(settings, [LOST, Fault(2 * HOUR, What.LOST, 3), Fault(3 * HOUR, What.BACK, 3)])
    assert sum(account.pauses.values()) == settings.num_streams


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="two or more hosts of 16 seats"):
        Settings(seats=24).check()
    with pytest.raises(ConfigError, match="128 expert workers for 64 experts"):
        Settings(experts=64).check()
