"""A plain stdio tool server that waits: ``slow_server.py START_SECONDS CALL_SECONDS``. Standard library only."""

import json
import sys
import time

start, call = map(float, sys.argv[1:3])
time.sleep(start)
for line in sys.stdin:
    message = json.loads(line)
    method, result = message.get("method"), None
    if method == "initialize":
        result = {"protocolVersion": "2025-06-18", "serverInfo": {"name": "slow", "version": "1"}, "capabilities": {}}
    elif method == "tools/list":
        result = {"tools": [{"name": "wait", "inputSchema": {"type": "object", "properties": {}}}]}
    elif method == "tools/call":
        time.sleep(call)
        result = {"content": [{"type": "text", "text": "waited"}]}
    if result is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
