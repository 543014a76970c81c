"""What happens, for people and their tools.

cluster.py     the processes and workers of the cluster now
feed.py        typed events, recent and new
timeline.py    ... in plain words: one entry per fault and its consequences
incidents.py   one such entry: events in, a sentence out
live.py        /cluster/live: all of that as one stream, for the dashboard
redundancy.py  how many expert workers may still die
tracing.py     whether requests are traced
spans.py       ... with OpenTelemetry
"""
