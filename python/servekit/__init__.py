"""servekit serves language models over HTTP: Python workers, a Rust control plane, a torch scheduler."""

__version__ = "0.1.0"
