#!/usr/bin/env bash
# A running server, asked with curl; URL and MODEL say which. For the tool at the end it must know how its model
# writes calls: make serve ARGS='--enable-auto-tool-choice --tool-call-parser hermes'
set -euo pipefail
URL="${URL:-http://127.0.0.1:8000}"
MODEL="${MODEL:-SmolLM2-135M-Instruct}"

post() { # post PATH JSON
  curl --silent --show-error --fail-with-body --no-buffer "$URL$1" -H 'Content-Type: application/json' -d "$2"
  echo
}

echo '-- a completion'
post /v1/completions '{"model": "'"$MODEL"'", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'

echo '-- a chat, streamed'
post /v1/chat/completions '{
  "model": "'"$MODEL"'", "stream": true, "max_tokens": 8, "temperature": 0,
  "messages": [{"role": "user", "content": "Name three rivers."}]
}'

echo '-- an answer that is JSON of a given form'
post /v1/chat/completions '{
  "model": "'"$MODEL"'", "max_tokens": 60, "temperature": 0,
  "messages": [{"role": "user", "content": "Anna is 34 and lives in Porto. As JSON:"}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": {
    "type": "object", "required": ["age", "city"], "additionalProperties": false,
    "properties": {"age": {"type": "integer", "maximum": 120}, "city": {"enum": ["Porto", "Oslo"]}}
  }}}
}'

echo '-- what the model thinks of a prompt, and how likely its own choices were'
post /v1/completions '{
  "model": "'"$MODEL"'", "prompt": "To be or not", "max_tokens": 2, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1
}'

echo '-- the call of a tool'
post /v1/chat/completions '{
  "model": "'"$MODEL"'", "max_tokens": 60, "temperature": 0,
  "messages": [{"role": "user", "content": "How will the weather be in Oslo?"}],
  "tool_choice": {"type": "function", "function": {"name": "weather"}},
  "tools": [{"type": "function", "function": {"name": "weather", "strict": true, "parameters": {
    "type": "object", "required": ["city"], "additionalProperties": false,
    "properties": {"city": {"enum": ["Porto", "Oslo"]}}
  }}}]
}'
