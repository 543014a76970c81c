"""The stream checker: many clients, faults from a seed, and every token compared with the undisturbed run.

settings.py  what is done to which server, and the flags that say so
run.py       the phases in order: undisturbed answers, faults under load, full strength, the same answers again, verdict

requests.py  what clients ask: a catalogue made from the seed (pure)
schedule.py  the faults, each with its time and victim, made from the seed (pure)
answers.py   one answer, put together from events or from one JSON object (pure)
compare.py   one answer beside the expected one (pure)

target.py    the server from outside: what /cluster and /metrics say
talk.py      one request to its end, over one connection or several
clients.py   the clients: each sends one request after the other and compares the answers
faults.py    injects the faults of the schedule, and records which processes they hit
leaks.py     what processes hold: descriptors, mappings, memory
findings.py  what is wrong, and what had happened just before
tally.py     what is counted while it runs
verdict.py   all of it as a table and as JSON
"""
