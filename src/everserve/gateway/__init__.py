"""The gateway: HTTP on one side, workers on the other, and every token stream in between.

    __main__.py      bootstrap: a keeper, with what it has read and loaded for all its gateways (prepared.py)
    keeper.py        makes the process, and the next one when it has died
    succession.py    one keeper follows another
    life.py          a gateway's life
    takeover.py      ... it goes on with connections and requests of the one before ...
    inheritance.py   ... and with its numbers, and those of other gateways ...
    supervised.py    ... and handles the supervisor's messages
    gateway.py       what the process holds: its config, tokenizer, workers, counters
    orchestrator.py  the channel to the orchestrator, as long as there is one: tables, lost workers, faults, drains
    supervisor.py    what the supervisor is asked for
    questions.py     questions to other processes, and their answers

    api/             the routes, and one client's request from its arrival to its answer
    observe/         what happens, for people and their tools
    streams/         every token stream between its client and its worker
    text/            text to tokens and back
    store/           what outlives every process: responses, files, batches
    http/            HTTP below the routes: limits, keys, shapes of requests and answers
    dashboard/       the page at /

A token's way: streams/links.py reads a StepOutput -> streams/stream.py finds its stream and checks its index ->
streams/choices.py makes text of it -> api/completions.py or chat.py makes an event of that -> streams/outbox.py pours
it into the connection (http/transport.py). The first and the last events are sent by the request's task
(api/answers.py).
"""
