"""Real clients, unchanged: what each gets while workers and the gateway die is what it gets otherwise.

scenarios.py           what each client does: a function from a server to what came of it
test_under_kills.py    all of them, twice
"""
