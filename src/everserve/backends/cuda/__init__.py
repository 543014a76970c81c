"""Workers that compute on an NVIDIA GPU.

roles.py           the two roles of a worker, put together
build.py           from a StartWorker message to what they are made of
device.py          a device, opened for a worker; its memory as tensors
expert_loop.py     the loop of an expert worker: keep the device supplied with graphs
kernel_keys.py     what is computed for all workers, before kernels are found in Triton's cache
rehearsal.py       what a spare does ahead of need
sampling.py        every way of choosing a token once, before a stream needs it

captured.py        a step: new contents for fixed addresses, and the replay of graphs
step_queue.py      steps on their way, and one that stops in the middle
recorder.py        one pass over the model, captured as a chain of graphs
graphs.py          graphs that were captured one by one, launched as one
staging.py         a step's rows on their way to the device
device_batch.py    the rows of one step in device memory, with attention cut into items of work
take_in.py         how a step on the device begins
report.py          how it ends: what it tells the host, and the next step
waiting.py         waiting for that (csrc/)
notes.py           what kernels note in a profile

placed_weights.py  weights in places that were planned for them
weights_state.py   what the weights memory of an attention seat holds, for the next incarnation
seat_experts.py    the expert slots of a seat in its memory; arena_range.py: and those of other seats, behind them
device_places.py   where its experts lie, how they get there, and how kernels compute with them
transfer.py        an expert on its way into a slot, in chunks
host_backup.py     the backup of all experts, registered ahead of need
expert_files.py    experts out of the model's files; file_feed.py: through registered buffers
backup_copy.py     experts from the device to the backup
logs.py            a worker's own KV log, and those of other workers
predecessor.py     until nothing of the worker that had this KV pool before can write there

ops/               the arithmetic: Triton kernels, and `Ops` over them
lanes/             rows between workers, by kernels
log/               the KV log of a pool in device memory
"""
