"""What the gateway, the event log and operators are told.

to_gateway.py       messages to the gateway
records.py          events, and their lines in the log
repairs.py          how far a repair is, for events
experts_view.py     loads and places of experts, for the gateway
survivals_view.py   which failures are survived now, for the log and the gateway
"""
