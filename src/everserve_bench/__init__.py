"""Benchmarks, one file per question. A package of its own: it uses everserve, which does not use it. Each benchmark
prints a table and writes JSON with commit, hardware and configuration.

scenarios/   benchmarks in the form that all are to have
scenario.py  ... a question: flags, load, faults, baseline and verdict (options.py: flags that several have)
runner.py    ... runs one; tables.py prints what it found

decisions.py what do the orchestrator's decisions cost as an instance grows, and how much do they tell?
grey.py      what does a client see of a worker that is only slow, with and without the mechanism that finds it?
balance.py   what does moving experts by their load give under skewed traffic, next to not moving them?
mask.py      what do answers lose while experts are masked, next to none? (mask_tasks.py: asked by lm-eval)

micro/       parts of the system on their own: engine, decode, speculation, restore, start
planners/    other ways to plan what moves, by arithmetic
cli/         their commands

duty.py      take a worker's CPU away: duty cycles, quotas, busy neighbours
kill.py      one worker is killed under load (instance.py: the server that it belongs to; restart.py: everything is)
lose.py      devices are lost under load (repair_cases.py: how many, how, and with how many shadow experts;
             revive_variants.py: what is done about it)
divided.py   an instance that is divided over devices: flags, bytes (micro/link.py: how fast those come),
             and its devices come and go (restarted.py: servers with fewer; availability.py: as in a cloud)
subject.py   what is served: the bundled model, or a large shape
shapes.py    model directories with random weights, of any shape (device_shapes.py: as large as a GPU is for)
variants.py  variants of one server, side by side or one after the other (slices.py: one of them, under load)
masked_model.py  the bundled model in this process, with a mask (held_out.py: text that it was not trained on)
load.py      streams that run side by side, and whose right answer is known (counted_streams.py: only counted)
processes.py a server from outside: /cluster, its processes, their core time
incident.py  one killed worker, told from the typed events (kill_rounds.py: many; repaired.py: lost devices;
             resharded.py, declined.py, traced.py: of a divided instance)
analysis.py  what arrival times say: gaps, rates over time, ratios (pure)
report.py    tables and files (show.py: the tables of earlier results once more)
publish.py   results become what documents cite (figures.py: markers in the documents that say where each figure comes
             from; cited.py: expressions over results)

balance_report.py, mask_report.py, grey_report.py, plot.py   summaries, tables, pictures
"""
