"""Sockets between the processes: `sender.py` is the only way to send, `receiver.py` the worker's way to receive."""
