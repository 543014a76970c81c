"""Benchmarks, one file per question. Each prints a table and writes JSON with commit, hardware and configuration.

engine.py    is one worker fast, next to what people would use instead?
decode.py    how fast does one process decode on a GPU, next to what its memory allows? (decode_baseline.py;
             served_decode.py: through HTTP)
failover.py  what does a client see when a worker is killed, next to restarting everything?
repair.py    what does a client see when devices are lost, next to restarting everything?
reshard.py   an instance that is divided over devices loses one: what does how much of what is done again cost?
decline.py   ... loses one after the other and gets them back, next to restarts (restarted.py: servers with fewer)
trace.py     ... as devices came and went in a cloud (availability.py: the trace)
scaling.py   how does recovery grow with the number of running streams and with their context? (grid.py: which)
scale.py     what does a client see while devices come and go?
grey.py      what does a client see of a worker that is only slow, with and without the mechanism that finds it?
overhead.py  what do the protections cost when nothing fails?
checkpoint.py  what does the KV log cost when nothing fails?
balance.py   what does moving experts by their load give under skewed traffic, next to not moving them?
restore.py   a lost stream goes on: how fast from the log, next to computing it again?
timeline.py  where does the time of a divided step go on one GPU? (`python -m everserve.bench.timeline`)
mask.py      what do answers lose while experts are masked, next to none? (mask_tasks.py: asked by lm-eval)

duty.py      take a worker's CPU away: duty cycles, quotas, busy neighbours
kill.py      one worker is killed under load (instance.py: the server that it belongs to; restart.py: everything is)
lose.py      devices are lost under load (repair_cases.py: how many, how, and with how many shadow experts)
divided.py   an instance that is divided over devices: flags, bytes (link.py: how fast those come)
subject.py   what is served: the bundled model, or a large shape (on_gpu.py: which is for a GPU)
baseline.py  transformers, measured in a process of its own
shapes.py    model directories with random weights, of any shape (device_shapes.py: as large as a GPU is for)
variants.py  variants of one server, side by side or one after the other (slices.py: one of them, under load)
restore_stage.py  workers that lose a stream and go on with it, in one process (restore_cpu.py, restore_gpu.py)
masked_model.py  the bundled model in this process, with a mask (held_out.py: text that it was not trained on)
load.py      streams that run side by side, and whose right answer is known (counted_streams.py: only counted)
processes.py a server from outside: /cluster, its processes, their core time
incident.py  one killed worker, told from the typed events (repaired.py: lost devices; resharded.py, declined.py,
             traced.py: of a divided instance)
analysis.py  what arrival times say: gaps, rates over time, ratios (pure)
report.py    where and with what it ran; tables and files (show.py: the tables of earlier results once more)
decode_report.py, failover_report.py, repair_report.py, scaling_report.py, scale_report.py, overhead_report.py,
restore_report.py, balance_report.py, mask_report.py, grey_report.py, reshard_report.py, decline_report.py,
trace_report.py, plot.py   summaries, tables, pictures
"""
