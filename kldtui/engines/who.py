"""What kind of server answers at a URL, told by what it says and never by its port.

Knows: how servers name themselves, and which of them take no token ids and what to run instead.
Must not know: how anything is generated, or the models that are served.

Sources: `owned_by` of `/v1/models` and the paths below, from the sources or documentation of
llama.cpp, vLLM, SGLang, mlx-lm, Ollama, LM Studio, llama-cpp-python, TabbyAPI, KoboldCpp and
text-generation-webui.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from kldtui.engines.http import Http
from kldtui.errors import EngineBroke, EngineRefused

Kind = Literal["llama-server", "vllm", "sglang", "mlx_lm.server"]

NAMES: dict[Kind, str] = {
    "llama-server": "llama-server",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "mlx_lm.server": "mlx_lm.server",
}
INSTEAD = {
    "Ollama": "serve its GGUF file, which `ollama show --modelfile NAME` names, with llama-server",
    "LM Studio": "serve the same GGUF file with llama-server, or the MLX folder with mlx_lm.server",
    "llama-cpp-python's server": "serve the same GGUF file with llama-server",
    "TabbyAPI": "serve the model as GGUF with llama-server, or as safetensors with vLLM or SGLang",
    "KoboldCpp": "serve the same GGUF file with llama-server",
    "text-generation-webui": "serve the same file with llama-server, vLLM or SGLang",
}
"""Servers that take text and no ids, and what to run in their place."""

_OWNERS: dict[str, Kind | str] = {
    "llamacpp": "llama-server",
    "vllm": "vllm",
    "sglang": "sglang",
    "library": "Ollama",
    "organization_owner": "LM Studio",
    "me": "llama-cpp-python's server",
    "tabbyapi": "TabbyAPI",
    "koboldcpp": "KoboldCpp",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """Who answers: of a kind that kldtui asks, or else by name, or else unknown.

    name: for people; empty where unknown. calls: what it calls itself in its header.
    """

    kind: Kind | None
    name: str
    calls: str

    @property
    def refusal(self) -> str:
        """Why nothing can be branched from it, and what to run instead; for kinds not asked."""
        if self.name:
            return f"this is {self.name}, which takes no token ids; {INSTEAD[self.name]}"
        seen = f" (it calls itself {self.calls!r})" if self.calls else ""
        known = ", ".join(NAMES.values())
        return f"this is no server that kldtui knows{seen}; it branches from {known}"


async def recognise(http: Http) -> Seen:
    """Ask a server who it is; only GETs, only at this URL.

    Raises EngineUnreachable, EngineRefused for a redirect, EngineLoading for a llama-server that
    loads its model, EngineUnauthorized for a server that says nothing without a key.
    """
    health = await http.peek("/health")
    calls = health.headers.get("server", "")
    if calls.lower().startswith("llama.cpp"):
        return Seen("llama-server", NAMES["llama-server"], calls)
    loading = health.status_code == 503 and b"oading" in health.content
    if loading or health.status_code in (401, 403):
        http.refuse(health.status_code, health.content, health.headers)
    said = _object(health)
    alive = said.get("status") == "ok" and health.status_code == 200
    if said.get("status") in ("healthy", "unhealthy") and "issues" in said:
        return _seen("TabbyAPI", calls)
    models = await http.peek("/v1/models")
    locked = models.status_code in (401, 403)
    plain = calls.startswith("BaseHTTP/") and said.get("status") in ("ok", "unavailable")
    if plain and not locked:
        return _seen("mlx_lm.server", calls)
    listed = _object(models).get("data")
    card = next((c for c in listed if isinstance(c, dict)), {}) if isinstance(listed, list) else {}
    owner = _OWNERS.get(str(card.get("owned_by") or "").lower())
    if owner is not None:
        return _seen(owner, calls)
    refused = models if locked else None
    for path, fits, who in _DOORS:
        answer = await http.peek(path)
        if answer.status_code in (401, 403):
            refused = refused or answer
        elif answer.status_code == 200 and fits(_object(answer)):
            return _seen(who, calls)
    if alive and set(card) == {"id", "object", "created"}:
        return _seen("mlx_lm.server", calls)
    if refused is not None:
        http.refuse(refused.status_code, refused.content, refused.headers)
    if health.status_code >= 500 and models.status_code >= 500:
        try:
            http.refuse(models.status_code, models.content, models.headers)
        except EngineRefused as error:
            raise EngineBroke(f"{error}, to everything; see its log") from None
    return Seen(None, "", calls)


def _seen(who: Kind | str, calls: str) -> Seen:
    for kind, name in NAMES.items():
        if who == kind:
            return Seen(kind, name, calls)
    return Seen(None, who, calls)


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        data = answer.json()
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _is_llama_cpp_python(api: dict[str, Any]) -> bool:
    info = api.get("info")
    return isinstance(info, dict) and "llama.cpp Python API" in str(info.get("title"))


_DOORS: tuple[tuple[str, Callable[[dict[str, Any]], bool], Kind | str], ...] = (
    ("/props", lambda said: "default_generation_settings" in said, "llama-server"),
    ("/model_info", lambda said: "model_path" in said, "sglang"),
    ("/get_model_info", lambda said: "model_path" in said, "sglang"),
    ("/lmstudio-greeting", lambda said: said.get("lmstudio") is True, "LM Studio"),
    ("/api/v0/models", lambda said: isinstance(said.get("data"), list), "LM Studio"),
    ("/api/extra/version", lambda said: said.get("result") == "KoboldCpp", "KoboldCpp"),
    ("/api/version", lambda said: set(said) == {"version"}, "Ollama"),
    ("/v1/internal/model/info", lambda said: "model_name" in said, "text-generation-webui"),
    ("/v1/model", lambda said: said.get("owned_by") == "tabbyAPI", "TabbyAPI"),
    ("/openapi.json", _is_llama_cpp_python, "llama-cpp-python's server"),
    ("/version", lambda said: isinstance(said.get("version"), str), "vllm"),
)
"""Paths that tell a server whose `/v1/models` does not; SGLang and KoboldCpp answer for Ollama."""
