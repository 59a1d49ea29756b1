"""The command `llm`, with the model in its configuration. Arguments as for `with_openai.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, _, _, key = sys.argv[1:]
question = "What is the capital of France?"


def llm(home: Path, *arguments: str, keys: str = key) -> str:
    """What a command prints."""
    done = subprocess.run(
        [Path(sys.executable).with_name("llm"), *arguments, *(["--key", keys] if arguments[0] == "-m" else [])],
        env={**os.environ, "LLM_USER_PATH": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


with tempfile.TemporaryDirectory() as folder:
    home = Path(folder)
    entries = [
        {"model_id": "chat", "model_name": model, "api_base": f"{url}/v1", "api_key_name": "local"},
        {"model_id": "text", "model_name": model, "api_base": f"{url}/v1", "api_key_name": "local", "completion": True},
    ]
    # JSON is YAML too.
    (home / "extra-openai-models.yaml").write_text(json.dumps(entries))

    options = ["-o", "temperature", "0", "-o", "max_tokens", "12"]
    streamed = llm(home, "-m", "chat", *options, question)
    assert "Paris" in streamed, streamed
    assert llm(home, "-m", "chat", "--no-stream", *options, question) == streamed
    print("chat ok", flush=True)

    logged = json.loads(llm(home, "logs", "list", "--json", "-n", "2"))
    assert all(each["output_tokens"] for each in logged), logged
    assert len({each["input_tokens"] for each in logged}) == 1, logged
    print("usage ok", flush=True)

    assert llm(home, "-m", "chat", "-c", "--system", "Be short.", *options, "And of Italy?").strip()
    print("conversation ok", flush=True)

    prompt = "The capital of France is"
    assert llm(home, "-m", "text", *options, prompt) == llm(home, "-m", "text", "--no-stream", *options, prompt)
    print("text ok", flush=True)

    try:
        llm(home, "-m", "chat", question, keys="wrong")
    except RuntimeError as error:
        assert "key" in str(error), error
    else:
        raise AssertionError("a wrong key was taken")
    print("errors ok", flush=True)
