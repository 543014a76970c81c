"""What an instance can be told, one file per component that is told it.

base.py      what a config is; the flag of `everserve serve` that a field has
cluster.py   how many workers, and when one counts as dead (for control/)
gateway.py   the HTTP side (for gateway/)
model.py     which weights, and in which dtype (for model/)
engine.py    batching and the KV cache (for engine/)
kvlog.py     where KV outlives its worker (for kvlog/)
compute.py   the device and its threads (for backends/)
events.py    where events are written, and how many are kept (for wire/event_log.py)
launch.py    what only the process of `everserve serve` needs

A config is made once, by `everserve serve` (cli/serve.py), travels whole inside the messages that start processes, and
is handed whole to its component. So a new flag is a field here, with its default and its `Flag`, and the code that
reads the field. This room stands at the bottom because the messages (wire/) carry what stands here.
"""
