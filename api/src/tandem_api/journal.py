"""What a decode worker's stream says about itself, so that another worker can go on with it.

A gateway that wants that asks with `names.HEADER_RESUME`. Between the events of the stream there are then comment lines
of server-sent events, which begin with `MARK`. Each commits what came since the last one: a gateway passes on events up
to the last mark that it has, keeps the marks, and drops what follows when the worker is gone. The marks in their order
are the stream's journal. With the value of the response's `HEADER_RESUME` before them they are what another worker of
the same revision needs to go on; nobody else reads them.

To resume, the gateway sends the same request once more, with this value, a line feed and the journal before its body,
and their length in bytes in `HEADER_RESUME`.
"""

from __future__ import annotations

MARK = b": "
"""What a line of the journal begins with. The events' own lines begin with `data:`, and hold no line feed."""
COMMIT = b": \n"
"""Commits and tells nothing: after an error."""
USAGE = b": u "
"""After the end of an answer, with its prompt tokens, those of them that were cached, and its tokens, in decimals. For
the gateway, whether or not the client is told its usage."""
MOVED = b": moved\n"
"""The last line: this worker stops, and the stream is to go on at another one. Not part of the journal."""
MAX_JOURNAL_BYTES = 1 << 20
"""A stream with a longer one stays where it is: about 100,000 tokens."""
