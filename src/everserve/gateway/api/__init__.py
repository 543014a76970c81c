"""The routes, and one client's request from its arrival to its answer.

app.py          the FastAPI application: all routes, and how errors are answered
depends.py      what routes depend on: the gateway, a key, whether requests are taken, whether all is well
completions.py  /v1/completions
chat.py         /v1/chat/completions
responses/      /v1/responses
messages/       /v1/messages
batches/        /v1/files, /v1/batches
pooling/        /v1/embeddings, /v1/score, /v1/rerank
models.py       /v1/models
tokenize.py     /tokenize, /detokenize, /tokenizer_info
health.py       /livez, /readyz, /health, /ping, /version, /load, /metrics, /cluster, /cluster/live, /events
operators.py    POST /cluster/...: what operators ask for
pages.py        / and the files of the dashboard (../dashboard)
openapi.py      /openapi.json, from the routes and the structs they use
exposition.py   /metrics: Prometheus, under vLLM's names
views.py        what many may watch: metrics, cluster, experts, each written once for all who ask
answers.py      the response to a request that generates: a stream, or the whole at the end
converted.py    requests of other families of endpoints as chat requests
unattended.py   requests of our own to the application
jobs.py         what no client waits for
generation.py   one client's request: its choices, and the events that are made of them
"""
