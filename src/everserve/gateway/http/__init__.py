"""HTTP, below the routes: what arrives, within which limits, and what an answer looks like.

server.py        accepting connections, and keeping descriptors for workers
connections.py   what a connection may cost before its request has arrived; how one is refused
transport.py     one socket: received into the ledger, committed there before it is sent
recorded.py      a request that an earlier gateway had begun to answer
handing_over.py  a connection whose request is for another gateway; departures.py: until that one has it
memory.py        what requests hold: bodies, and what is made of them, within one bound
exchange.py      request ids, JSON bodies within limits, noticing that the client has left
bodies.py        how much work a JSON body is, before it is decoded
slices.py        large work, in slices between which streams go on
turns.py         much small work that is due at once: a little in each turn of the event loop
shared.py        answers that many ask for at once, written once for all of them
access.py        API keys and the admin key: the owner of a request, and what it may do
origins.py       which names of this server, and which pages of browsers, may be used to ask
requests.py      request bodies, field by field with their ranges
responses.py     response bodies
errors.py        OpenAI-shaped errors and the words for bad JSON
sse.py           server-sent events
"""
