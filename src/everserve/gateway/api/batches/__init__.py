"""/v1/files and /v1/batches: many requests in a file, run when there is room.

files.py   files: upload, list, content, delete
routes.py  batches: create, list, retrieve, cancel
view.py    both, as clients see them
lines.py   a line of a batch: what it asks for, and how its answer is written
runner.py  runs what is in the store
"""
