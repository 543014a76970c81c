"""HTTP, below the routes: what arrives, within which limits, and what an answer looks like.

server.py        accepting connections, and keeping descriptors for workers
connections.py   what a connection may cost before its request has arrived
exchange.py      request ids, JSON bodies within limits, noticing that the client has left
bodies.py        how much work a JSON body is, before it is decoded
slices.py        large work, in slices between which streams go on
access.py        API keys and the admin key: the owner of a request, and what it may do
origins.py       which names of this server, and which pages of browsers, may be used to ask
requests.py      request bodies, field by field with their ranges
responses.py     response bodies
errors.py        OpenAI-shaped errors and the words for bad JSON
sse.py           server-sent events
"""
