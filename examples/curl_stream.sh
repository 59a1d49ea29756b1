#!/bin/sh
# A streamed chat with nothing but curl: one `data:` line per piece of text, then `data: [DONE]`.
#
#     sh examples/curl_stream.sh [http://127.0.0.1:8000 [MODEL]]
set -eu
url="${1:-http://127.0.0.1:8000}"
model="${2:-SmolLM2-135M-Instruct}"
curl --no-buffer --silent --show-error --fail "$url/v1/chat/completions" \
    --header 'content-type: application/json' \
    --data '{
        "model": "'"$model"'",
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 32,
        "stream": true,
        "stream_options": {"include_usage": true}
    }'
