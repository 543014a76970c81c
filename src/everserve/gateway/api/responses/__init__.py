"""/v1/responses: a chat whose conversation and answers the server keeps.

routes.py      create, retrieve, cancel, delete, input_items
request.py     the fields, and the chat that they mean
items.py       items given and answered, and the messages of a chat
view.py        a response and its events, as clients see them
writer.py      what a model says, as items and events
renderer.py    the same, of a generation
background.py  responses that no connection waits for
"""
