"""Results are kept for the same objects."""

from everserve.tables.remembered import remembered


def test_the_same_objects_are_asked_about_once() -> None:
    asked = []

    @remembered
    def total(numbers: list[int], factor: int) -> int:
        asked.append((numbers, factor))
        return factor * sum(numbers)

    numbers, equal = [1, 2], [1, 2]
    assert [total(numbers, 2), total(numbers, 2)] == [6, 6] and len(asked) == 1
    assert total(equal, 2) == 6 and len(asked) == 2, "equal objects may be different ones"
    assert total(numbers, 3) == 9 and len(asked) == 3
