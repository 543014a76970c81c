"""Parts of the system on their own, mostly without a server.

engine.py    is one worker fast, next to what people would use instead? (baseline.py: transformers, in a process of its
             own; roofline.py: what memory and cores allow)
decode.py    how fast does one process decode on a GPU, next to what its memory allows? (decode_baseline.py;
             served_decode.py: through HTTP)
prefill_alone.py  prompts in one process on a GPU (kernel_times.py: by kernel)
restore.py   a lost stream goes on: how fast from the log, next to computing it again? (restore_stage.py: workers that
             lose a stream, in one process; restore_cpu.py, restore_gpu.py)
start.py     from the command to the first token
timeline.py  where does the time of a divided step go on one GPU? (`python -m everserve_bench.micro.timeline`)
link.py      how fast do bytes come from the memory of the host?
"""
