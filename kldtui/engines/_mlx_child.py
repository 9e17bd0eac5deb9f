"""Runs one MLX folder with mlx_lm's `generate_step`, on ids, for whoever connects to a socket.

Knows: mlx_lm. It is a process of its own since loading and computing hold the interpreter's lock,
and since mlx_lm writes to standard error. Models that need code from their folder are not loaded.
Must not know: anything of kldtui. Run by path (`python -P _mlx_child.py {json}`, with `folder`,
`socket` and `ends`, ids that end an answer besides the model's own). It writes what it has loaded
to the descriptor that KLDTUI_REPORT_FD names, and is ended from outside.

One connection is one answer, in JSON lines: `{"ids", "n", "top_n", "cache"}` comes;
`{"read", "of"}` goes out while the prompt is read, `{"id", "logp", "top": [[id, log p], …]}` for
each token (nats), and last `{"end": "eog" | "limit", "cached"}` or `{"error"}`. Whoever closes the
connection cancels the answer.

A given text is scored by `{"ids", "score": start, "top_n", "also": [id or null, …]}`: each token
from `start` on gets its line, `also` in it being log p of the other id that was asked for there.
With `"rows": path` in place of `top_n` and `also`, the logits are written to files, float32, some
rows each: `{"rows", "file"}` says so, and the next are computed once any line has come back.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_STEP, _STEP_VALUES = 512, 1 << 25
"""Tokens, and logits, that are computed at a time where a text is scored."""


class Model:
    """A loaded folder, and the prompt cache of the last answer."""

    def __init__(self, folder: str, ends: list[int]) -> None:
        import mlx.core as mx
        from mlx_lm.generate import generate_step, wired_limit
        from mlx_lm.models import cache
        from mlx_lm.utils import load_model

        self._mx, self._cache, self._step, self._wired = mx, cache, generate_step, wired_limit
        self._model, config = load_model(Path(folder))
        logits = self._model(mx.array([[0]]))
        own = config.get("eos_token_id")
        own = own if isinstance(own, list) else [] if own is None else [own]
        self.ends = {*ends, *own}
        self.n_vocab = int(logits.shape[-1])
        self.facts = {
            "n_vocab": self.n_vocab,
            "dtype": str(logits.dtype).rpartition(".")[2],
            "device": str(mx.default_device()),
            "ends": sorted(self.ends),
            "mlx_lm": importlib.metadata.version("mlx-lm"),
            "mlx": importlib.metadata.version("mlx"),
        }
        self._held: tuple[list[int], list[Any]] = ([], [])

    def answer(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The lines of an answer; `read` lines come through `request["progress"]`."""
        ids = [int(id) for id in request["ids"]]
        if not ids or min(ids) < 0 or max(ids) >= self.n_vocab:
            yield {"error": "the prompt contains invalid tokens"}
            return
        reused, cache = self._start(ids) if request["cache"] else (0, self._new())
        held: list[int] = ids[:]
        self._held = (held, cache)
        steps = self._step(
            self._mx.array(ids[reused:]),
            self._model,
            max_tokens=request["n"],
            prompt_cache=cache,
            prompt_progress_callback=request["progress"],
        )
        with self._wired(self._model):
            for id, logps in steps:
                held.append(int(id))
                yield {"id": int(id), **self._best(logps, int(id), request["top_n"])}
                if id in self.ends:
                    yield {"end": "eog", "cached": reused}
                    return
        yield {"end": "limit", "cached": reused}

    def score(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The lines of a given text that is scored, computed some hundred tokens at a time."""
        mx, start = self._mx, int(request["score"])
        ids = [int(id) for id in request["ids"]]
        if not 0 < start < len(ids) or min(ids) < 0 or max(ids) >= self.n_vocab:
            yield {"error": "the text contains invalid tokens"}
            return
        cache, at = self._new(), 0
        step = max(1, min(_STEP, _STEP_VALUES // self.n_vocab))
        self._held = ([], [])
        with self._wired(self._model):
            while at < len(ids) - 1:
                # What is read before the first row that is wanted needs no rows of its own.
                end = start - 1 if at < start - 1 else len(ids) - 1
                stop = min(at + step, end)
                logits = self._model(mx.array(ids[at:stop])[None], cache=cache)[0]
                if at < start - 1:
                    mx.eval([part.state for part in cache])
                    yield {"read": stop, "of": len(ids)}
                else:
                    yield from self._scored(request, logits, ids[at + 1 : stop + 1], at + 1 - start)
                at = stop
                mx.clear_cache()
        yield {"end": "limit", "cached": 0}

    def _scored(
        self, request: dict[str, Any], logits: Any, targets: list[int], first: int
    ) -> Iterator[dict[str, Any]]:
        """Lines of the rows that predict `targets`, the first being row number `first`."""
        import numpy as np

        mx = self._mx
        logits = logits.astype(mx.float32)
        if "rows" in request:
            file = f"{request['rows']}.{first}"
            np.array(logits).tofile(file)
            yield {"rows": len(targets), "file": file}
            request["wait"]()
            return
        logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logps)
        for k, id in enumerate(targets):
            other = request["also"][first + k]
            line = {"id": id, **self._best(logps[k], id, request["top_n"])}
            yield line if other is None else {**line, "also": float(logps[k, other])}

    def _new(self) -> list[Any]:
        return list(self._cache.make_prompt_cache(self._model))

    def _start(self, ids: list[int]) -> tuple[int, list[Any]]:
        """How many of the ids are in the last answer's cache, and that cut to them."""
        held, cache = self._held
        self._held = ([], [])
        pairs = enumerate(zip(held, ids[:-1], strict=False))
        same = next((k for k, (a, b) in pairs if a != b), min(len(held), len(ids) - 1))
        if not cache or not self._cache.can_trim_prompt_cache(cache):
            return 0, self._new()
        surplus = getattr(cache[0], "offset", -1) - same
        if same == 0 or surplus < 0 or self._cache.trim_prompt_cache(cache, surplus) != surplus:
            return 0, self._new()
        return same, cache

    def _best(self, logps: Any, id: int, top_n: int) -> dict[str, Any]:
        """log p of `id`, and of the best, ties by lowest id."""
        import numpy as np

        values = np.array(logps.astype(self._mx.float32))
        n = min(top_n, values.size)
        if n == 0:
            return {"logp": float(values[id]), "top": []}
        least = np.partition(values, values.size - n)[values.size - n]
        listed = np.flatnonzero(values >= least)
        listed = listed[np.lexsort((listed, -values[listed]))][:n]
        return {"logp": float(values[id]), "top": [[int(i), float(values[i])] for i in listed]}


def serve(model: Model, listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as asked:
            raw = asked.readline()
            if not raw.endswith(b"\n"):
                continue  # it was closed before it had asked

            def send(line: dict[str, Any], to: socket.socket = connection) -> None:
                to.sendall(json.dumps(line).encode() + b"\n")

            try:
                request = json.loads(raw)
                request["progress"] = lambda done, all, send=send: send({"read": done, "of": all})
                request["wait"] = asked.readline
                answer = model.score if "score" in request else model.answer
                for line in answer(request):
                    send(line)
            except OSError:
                raise
            except Exception as error:
                send({"error": f"{type(error).__name__}: {error}"})


def main(settings: dict[str, Any]) -> int:
    try:
        model = Model(settings["folder"], settings["ends"])
    except Exception as error:
        print(f"cannot load the model: error: {error}", file=sys.stderr)
        return 1
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(settings["socket"])
        listener.listen()
        reports = int(os.environ["KLDTUI_REPORT_FD"])
        os.write(reports, json.dumps(model.facts).encode() + b"\n")
        os.close(reports)
        serve(model, listener)
    return 0


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
