"""The smallest tool server: ``count`` says how often it was called. Standard library only, about 4 MB."""

import json
import sys

LISTING = {"tools": [{"name": "count", "inputSchema": {"type": "object", "properties": {}}}]}
SHAKE = {
    "protocolVersion": "2025-06-18",
    "serverInfo": {"name": "plain", "version": "1"},
    "capabilities": {"tools": {}},
}

count = 0
for line in sys.stdin:
    message = json.loads(line)
    match message.get("method"):
        case "initialize":
            result = SHAKE
        case "tools/list":
            result = LISTING
        case "tools/call":
            count += 1
            result = {"content": [{"type": "text", "text": str(count)}]}
        case _:
            continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
