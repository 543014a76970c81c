"""Numbers in sentences."""

from everserve.words import agree, any_of, count, plural, size


def test_nouns_and_verbs_follow_the_number():
    assert [count(number, "worker") for number in (0, 1, 2, 2048)] == [
        "0 workers",
        "1 worker",
        "2 workers",
        "2,048 workers",
    ]
    assert count(1, "expert", "are") == "1 expert is" and count(3, "expert", "are") == "3 experts are"
    assert [agree(verb, 1) for verb in ("have", "were", "go", "need")] == ["has", "was", "goes", "needs"]
    assert plural("process", 2) == "processes" and plural("process", 1) == "process"


def test_how_many_may_be_lost():
    assert [any_of(number, "device") for number in range(4)] == [
        "no device",
        "any one device",
        "any two devices",
        "any 3 devices",
    ]
    assert any_of(2, "process") == "any two processes"


def test_the_size_of_an_instance():
    assert size(1, 2, 1) == "1 attention worker and 2 expert workers on 1 device"
    assert size(2, 0, 2) == "2 attention workers on 2 devices" and size(0, 0, 0) == "no workers on 0 devices"
