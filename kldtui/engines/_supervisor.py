"""Runs one engine and kills it, with all it started, as soon as kldtui is gone.

Knows: a command, and a pipe from kldtui on standard input that is at its end when kldtui ends,
however it ends (kill -9 too). An engine cannot watch for that itself while it loads a model.
Must not know: anything of kldtui or of the engine. Run by path with the standard library alone
(`python -I -S _supervisor.py [TEMPORARY…] -- COMMAND…`); standard error is the engine's log.

Where kldtui says a word before it ends the pipe, it tidies up by itself; else it was killed, and
the temporary files and folders are removed here, since nobody else will.

It writes JSON lines to standard output: `{"pid": 123}` when the engine runs, then what the engine
itself writes to the descriptor that the environment variable KLDTUI_REPORT_FD names (such as
`{"url": …}`), then `{"exit": code}` (negative: killed by that signal).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 1.0
"""From asking the engine to end (SIGTERM) to ending it (SIGKILL)."""


def report(**fields: int) -> None:
    with contextlib.suppress(OSError):  # kldtui is gone; the engine is ended all the same
        os.write(1, json.dumps(fields).encode() + b"\n")


def kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
        os.killpg(pid, number)


def at_end() -> bool:
    """Whether standard input has nothing more to say."""
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready) and not os.read(0, 1)


def remove(path: str) -> None:
    """A file, a link but not what it leads to, or a folder with all that is in it."""
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114 - pathlib is slow
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)  # noqa: PTH108


def main(temporary: list[str], command: list[str]) -> int:
    ended, wake = os.pipe()
    for number in (signal.SIGINT, signal.SIGHUP):  # a handler, since SIG_IGN would be inherited
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: os.write(wake, b"t"))
    reports = os.dup(1)
    try:
        # A session of its own: neither Ctrl-C nor Ctrl-Z in kldtui's terminal reaches it, and one
        # signal reaches all of it. Its standard input ends when this process does.
        engine = subprocess.Popen(  # noqa: S603 - a list of arguments, no shell
            command,
            stdin=subprocess.PIPE,
            stdout=2,
            stderr=2,
            pass_fds=(reports,),
            env={**os.environ, "KLDTUI_REPORT_FD": str(reports)},
            start_new_session=True,
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        report(exit=127)
        return 1
    report(pid=engine.pid)

    def wait() -> None:
        engine.wait()
        os.write(wake, b"e")

    threading.Thread(target=wait, daemon=True).start()
    gone = tidy = False
    while not gone:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            break
        said = os.read(0, 4096)
        gone, tidy = not said, tidy or bool(said)
    kill_group(engine.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        engine.wait(GRACE_SECONDS)
    kill_group(engine.pid, signal.SIGKILL)
    report(exit=engine.wait())
    if not tidy and (gone or at_end()):  # a signal may have come to this process first
        for path in temporary:
            remove(path)
    return 0


if __name__ == "__main__":
    split = sys.argv.index("--")
    sys.exit(main(sys.argv[1:split], sys.argv[split + 1 :]))
