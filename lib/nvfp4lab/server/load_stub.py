"""A server that answers SGLang's benchmark at once with invented tokens: what it measures here is the client itself.

Run as a script: `python load_stub.py`; prints the port it listens on. Every token is its own server-sent event, as a real
server sends it, and streams take turns. Standard library only.
"""

import asyncio
import functools
import json

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{length}Connection: close\r\n\r\n"


@functools.cache
def events(tokens: int) -> tuple[bytes, ...]:
    """The chunks of a stream of `tokens` tokens, in HTTP's chunked coding; `text` grows as SGLang's does."""
    rows = ({"text": " a" * n, "meta_info": {"completion_tokens": n, "prompt_tokens": 1}} for n in range(1, tokens + 1))
    lines = [f"data: {json.dumps(row)}\n\n".encode() for row in rows] + [b"data: [DONE]\n\n"]
    return tuple(b"%x\r\n%s\r\n" % (len(line), line) for line in lines)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, one reply."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if head.startswith("POST /generate"):
            await _stream(writer, json.loads(body)["sampling_params"]["max_new_tokens"])
        else:
            _reply(writer, {"data": [{"id": "stub"}], "internal_states": [{}]})
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client left; nothing to answer
    finally:
        writer.close()


async def _stream(writer: asyncio.StreamWriter, tokens: int) -> None:
    writer.write(HEAD.format(kind="text/event-stream", length="Transfer-Encoding: chunked\r\n").encode())
    for event in events(tokens):
        writer.write(event)
        await writer.drain()
        await asyncio.sleep(0)  # let the other streams send their token first
    writer.write(b"0\r\n\r\n")


def _reply(writer: asyncio.StreamWriter, content: dict) -> None:
    body = json.dumps(content).encode()
    writer.write(HEAD.format(kind="application/json", length=f"Content-Length: {len(body)}\r\n").encode() + body)


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
