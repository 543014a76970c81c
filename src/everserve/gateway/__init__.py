"""The gateway: HTTP on one side, workers on the other, and every token stream in between.

    __main__.py     the process: bootstrap, then one loop over the supervisor's messages
    server.py       the HTTP server: uvicorn, and a listener that leaves descriptors to others
    connections.py  connections of clients: what each may cost before its request has arrived
    orchestrator.py the channel to the orchestrator, as long as there is one: tables, lost workers, faults, drains
    supervisor.py   what the supervisor is asked for
    questions.py    questions to other processes, and their answers
    gateway.py      what the process holds: settings, tokenizer, workers, metrics
    app.py          the FastAPI application: all routes, and how errors are answered
    depends.py      what routes depend on: the gateway, a key, whether requests are taken, whether all is well
    access.py       API keys and the admin key: whose request it is, and what it may do
    origins.py      which names of this server, and which pages of browsers, may be used to ask
    stream_ids.py   names of streams, and which readers of events may see them
    slices.py       large work, in slices between which streams go on
    bodies.py       how much work a JSON body is, before it is decoded
    http.py         beyond Starlette: request ids, JSON bodies within limits, disconnects
    errors.py       OpenAI-shaped errors and the words for bad JSON
    openapi.py      /openapi.json, from the routes and the structs they use

    protocol.py     request bodies, field by field with their ranges
    sampling.py     request -> SamplingParams: the checks that need the model, defaults, seeds
    prompts.py      request -> token ids: texts, lists, chat templates
    responses.py    response bodies
    completions.py  /v1/completions
    chat.py         /v1/chat/completions
    models.py       /v1/models
    tokenize.py     /tokenize, /detokenize, /tokenizer_info
    health.py       /health, /ping, /version, /load, /metrics, /cluster, /cluster/live, /events
    pages.py        / and the files of the dashboard (dashboard/)
    faults.py       /cluster/fault
    drains.py       /cluster/drain
    cluster.py      who is here now
    feed.py         what happened, and what happens: typed events
    story.py        ... in plain words: one entry per fault and its consequences
    incidents.py    one such entry: facts in, words out
    pulse.py        tokens and the times between them, in ticks
    live.py         /cluster/live: all of that as one stream, for the dashboard

    answers.py      the response to a request that generates: a stream, or the whole at the end
    keeping.py      streams whose clients may lose their connections and come back
    outbox.py       from the callbacks that make events to the task that writes them
    unread.py       clients that do not read
    generation.py   one client's request: its choices, and the events that are made of them
    choices.py      one choice: tokens in, text out
    streams.py      exactly once: streams by token index, and those that run at one worker
    links.py        the channel to one incarnation of one worker; fencing
    fleet.py        all workers and all streams: which worker gets which stream, and what happens when it is lost
    waiting.py      streams without a worker, in order
    suspects.py     streams that may be what ends their workers
    settling.py     whose KV logs streams still need
    tokenizer.py    the model's tokenizer and chat template; the only importer of transformers
    detokenizer.py  exact text, token by token
    stops.py        stop strings, across token boundaries
    logprobs.py     log probabilities in the shapes clients expect
    sse.py          server-sent events
    spares.py       how many expert workers may still die
    metrics.py      what is counted and measured
    tracing.py      a trace per request: what is asked for, and what happens where nobody asks
    spans.py        ... and where somebody does: OpenTelemetry
    exposition.py   /metrics: Prometheus, under vLLM's names

A token's way: links.py reads a StepOutput -> streams.py finds its stream and checks its index -> choices.py makes
text of it -> completions.py or chat.py makes an event of that -> outbox.py wakes the task that sends it (answers.py).
"""
