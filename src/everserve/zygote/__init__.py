"""The process that workers are forked from.

__main__.py  the zygote: has imported what workers need, starts no thread, and forks
spares.py    processes that it forks ahead of need
backend.py   what workers compute with, by the kind of their device
"""
