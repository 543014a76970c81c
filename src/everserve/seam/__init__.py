"""The seam between attention and experts: what both kinds of devices have in common.

experts.py   the one interface through which a step reaches its experts
heads.py     the one interface through which a step reaches its attention heads
kv_at.py     where the KV of all heads is, for one home
trust.py     the expert workers, which of them are trusted, and hence where each expert is
healing.py   what is decided while answers do not come
batching.py  when an expert worker starts computing, and what
outcomes.py  what became of an exchange, and what an answer says

How rows travel is a matter of the device: backends/cpu and backends/cuda.
"""
