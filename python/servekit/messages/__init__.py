"""What the processes say to each other: an envelope (`envelope.py`), then a body (`requests.py`, `batches.py`)."""
