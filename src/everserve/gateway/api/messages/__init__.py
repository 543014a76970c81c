"""/v1/messages: Anthropic's form of a chat.

routes.py     create, count_tokens
request.py    the fields, and the chat that they mean
view.py       a message, its events, and errors, as clients see them
writer.py     what a model says, as content blocks and events
renderer.py   the same, of a generation
"""
