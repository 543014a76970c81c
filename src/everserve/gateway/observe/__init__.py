"""What happens, for people and their tools.

cluster.py     the processes and workers of the cluster now
feed.py        typed events, recent and new
timeline.py    ... in plain words: one entry per fault and its consequences
incidents.py   one such entry: events in, a sentence out
repairs.py     experts that moved, and how long repairs took
live.py        /cluster/live: all of that as one stream, for the dashboard
readers.py     a stream of events as a response
prometheus_text.py  metrics as Prometheus' text, some lines at a time
tracing.py     whether requests are traced
spans.py       ... with OpenTelemetry
"""
