"""Serves one GGUF model with xllamacpp: llama.cpp's own HTTP server inside this process.

Knows: xllamacpp. It is a process of its own since creating the server holds the interpreter's
lock while the model loads, and since llama.cpp writes its log to standard error.
Must not know: anything of kldtui. Run by path (`python -P _xllamacpp_child.py {json}`); writes
`{"url": …}` to the descriptor that KLDTUI_REPORT_FD names, and ends when standard input does.
"""

from __future__ import annotations

import json
import os
import sys


def main(settings: dict[str, object]) -> int:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.port = 0
    params.n_ctx = settings["n_ctx"]
    params.n_parallel = 1
    params.cpuparams.n_threads = settings["threads"]
    params.cpuparams_batch.n_threads = settings["threads"]
    if settings["gpu_layers"] is not None:
        params.n_gpu_layers = settings["gpu_layers"]
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    line = json.dumps({"url": server.listening_address}) + "\n"
    reports = int(os.environ["KLDTUI_REPORT_FD"])
    os.write(reports, line.encode())
    os.close(reports)
    sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # llama.cpp's threads are not waited for
