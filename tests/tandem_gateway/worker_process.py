"""A worker as a process: it repeats each prompt, so that nobody can get another one's answer unnoticed.

A prompt with `POISON` in it ends the process as a fault of a kernel does. The argument is the port to listen on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

POISON = "the prompt that ends its worker"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            break
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        request = json.loads(await reader.readexactly(length) or b"{}")
        if POISON in str(request.get("prompt")):
            os._exit(1)
        await asyncio.sleep(0.02)
        text = json.dumps({"choices": [{"index": 0, "text": request.get("prompt")}]}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text) + text
        )
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
