"""What outlives every process: responses, files and batches, in one SQLite file.

database.py   the file, the thread that uses it, transactions
files.py      files as pieces; expiry
batches.py    batches, and the result of each line exactly once
responses.py  responses of /v1/responses, and what they answer
store.py      all of it, as the gateway has it, and which gateway process works for it

Where the file lies says `--state-dir`. What is committed is there after the death of any process; after a loss of power
the last second may be missing, but nothing is torn (SQLite's WAL with `synchronous = NORMAL`).
"""
