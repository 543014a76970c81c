"""What happens, for people and their tools.

cluster.py     who is here now
feed.py        what happened, and what happens: typed events
timeline.py       ... in plain words: one entry per fault and its consequences
incidents.py   one such entry: facts in, words out
live.py        /cluster/live: all of that as one stream, for the dashboard
redundancy.py  how many expert workers may still die
tracing.py     whether requests are traced
spans.py       ... with OpenTelemetry
"""
