"""The control process: a Python process around Rust threads that route, dispatch, detokenize and fan out."""
