"""Token ids in, text out, with nothing but the standard library: /tokenize, then a completion of the ids.

python examples/token_ids.py [http://127.0.0.1:8000]
"""

import json
import sys
import urllib.request
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def ask(path: str, **fields: Any) -> Any:
    """POST with fields, GET without."""
    body = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(URL + path, data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


model = ask("/v1/models")["data"][0]["id"]
ids = ask("/tokenize", prompt="The first ten prime numbers are")["tokens"]
print(ids)
answer = ask("/v1/completions", model=model, prompt=ids, max_tokens=16, temperature=0)
print(answer["choices"][0]["text"], answer["usage"])
