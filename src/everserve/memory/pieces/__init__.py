"""What is done with the KV of heads in C: words are written and checked, rows go into a mirror, blocks are fetched.

library.py    the C functions, and a pool as they see it
mirror.py     the second memory of a pool: rows go there behind the steps that have stored them
parity.py     what lets heads of a lost device be rebuilt from those of all others (parity_layout.py: its memory)
sources.py    the memory of other workers, and fetching from it
"""
