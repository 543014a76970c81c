"""The routes, and one client's request from its arrival to its answer.

app.py          the FastAPI application: all routes, and how errors are answered
depends.py      what routes depend on: the gateway, a key, whether requests are taken, whether all is well
completions.py  /v1/completions
chat.py         /v1/chat/completions
models.py       /v1/models
tokenize.py     /tokenize, /detokenize, /tokenizer_info
health.py       /health, /ping, /version, /load, /metrics, /cluster, /cluster/live, /events
faults.py       /cluster/fault
drains.py       /cluster/drain
scaling.py      /cluster/scale
switching.py    /cluster/switch
pages.py        / and the files of the dashboard (../dashboard)
openapi.py      /openapi.json, from the routes and the structs they use
exposition.py   /metrics: Prometheus, under vLLM's names
answers.py      the response to a request that generates: a stream, or the whole at the end
generation.py   one client's request: its choices, and the events that are made of them
"""
