"""The HTTP workers: FastAPI on uvicorn (`worker.py`), one file a route in `routes/`."""
