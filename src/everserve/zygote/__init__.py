"""The process that workers are forked from.

__main__.py  the zygote: imports what workers need, starts no threads, and forks
imports.py   ... how fast
spares.py    spare processes, forked and warmed up in advance
backend.py   the compute backend for each kind of device
"""
