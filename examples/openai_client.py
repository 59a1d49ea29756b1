"""Chat and completion with OpenAI's own client, whole and streamed.

python examples/openai_client.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

question = [{"role": "user", "content": "What is the capital of Germany?"}]
answer = client.chat.completions.create(model=model, messages=question, max_tokens=32, temperature=0)
print(answer.choices[0].message.content)
print(f"({answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out)\n")

stream = client.chat.completions.create(model=model, messages=question, max_tokens=32, temperature=0, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print("\n")

# A text that goes on, without a chat template; it stops before the first of these strings.
completion = client.completions.create(model=model, prompt="1, 2, 3, 4, 5,", max_tokens=32, temperature=0, stop=["12"])
print(completion.choices[0].text)
