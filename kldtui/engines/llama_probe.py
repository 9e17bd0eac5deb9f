"""Which llama-server answers at a URL, and with which model.

Knows: `/health`, `/v1/models`, `/props`, `/tokenize` of llama-server.
Must not know: how anything is generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kldtui.engines.base import EngineInfo
from kldtui.engines.http import Http
from kldtui.engines.who import recognise
from kldtui.errors import EngineLoading, EngineRefused, EngineUnreachable, UnusableEngine

_DETAILS = ("n_params", "size", "n_ctx_train", "ftype", "vocab_type")


@dataclass(frozen=True, slots=True)
class Found:
    """A llama-server. text_id: a token of whole characters, None if none was found."""

    info: EngineInfo
    text_id: int | None


async def probe(http: Http, build: str = "") -> Found:
    """Ask who is there. Raises EngineUnreachable, EngineLoading, EngineUnauthorized,
    EngineRefused, or UnusableEngine for what is no llama-server with a model. `build` is taken
    where the server does not know its own."""
    await http.get("/health")
    _, models, headers = await http.get("/v1/models")
    wanted = http.address.query.get("model")
    model = _card(models, wanted)
    status, props = await _props(http, model, wanted)
    if status in (400, 404) and wanted is not None and len(_listed(models)) > 1:
        names = ", ".join(_names(models))
        raise http.error(UnusableEngine, f"it has no model {wanted!r} (it has: {names})")
    if not isinstance(props, dict) or status != 200 or not _is_llama(props):
        raise http.error(UnusableEngine, await _other(http, headers.get("server", "")))
    if props.get("role") == "router" and wanted is None:
        names = ", ".join(_names(models)) or "none"
        raise http.error(
            UnusableEngine,
            f"it is a router for several models; add ?model=NAME to the URL (it has: {names})",
        )
    add_bos, bos_id, warnings = await _bos(http, props)
    meta = _dict(model.get("meta"))
    settings = _dict(props.get("default_generation_settings"))
    params = _dict(settings.get("params")) or settings
    slots = props.get("total_slots")
    info = EngineInfo(
        kind="llama-server",
        url=http.address.public,
        model=_model_name(props, model),
        build=_build(props) or build or "unknown",
        n_vocab=_number(meta.get("n_vocab")),
        n_ctx=_number(settings.get("n_ctx")) or _number(meta.get("n_ctx")),
        bos_id=bos_id,
        add_bos=add_bos,
        details={
            **{name: meta[name] for name in _DETAILS if name in meta},
            "model_path": str(props.get("model_path") or ""),
            "total_slots": slots,
        },
        warnings=(*warnings, *_warnings(params, slots)),
    )
    return Found(info, await _text_id(http))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _is_llama(props: dict[str, Any]) -> bool:
    return "default_generation_settings" in props


def _listed(models: Any) -> list[dict[str, Any]]:
    listed = _dict(models).get("data")
    return [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []


def _card(models: Any, wanted: str | None) -> dict[str, Any]:
    """What is listed of the chosen model, which in router mode is one of several."""
    cards = _listed(models)
    named = (c for c in cards if wanted == c.get("id") or wanted in (c.get("aliases") or ()))
    return next(named, cards[0] if len(cards) == 1 else {})


async def _props(http: Http, model: dict[str, Any], wanted: str | None) -> tuple[int, Any]:
    """Status and object of `/props`, for which a router first loads the model: that may take
    longer than an answer should. Raises EngineLoading then."""
    state = _dict(model.get("status")).get("value")
    if state == "loading":
        raise http.error(EngineLoading, f"it loads {wanted}; wait for it")
    try:
        status, props, _ = await http.get("/props")
    except EngineUnreachable:
        if state is None:
            raise
        raise http.error(EngineLoading, f"it loads {wanted}; wait for it") from None
    return status, props


def _names(models: Any) -> list[str]:
    return [str(model.get("id")) for model in _listed(models)][:8]


def _model_name(props: dict[str, Any], model: dict[str, Any]) -> str:
    """The file's name: an alias says less, and a whole path is in the details."""
    path = str(props.get("model_path") or "")
    name = path.replace("\\", "/").rpartition("/")[2]
    alias = str(props.get("model_alias") or model.get("id") or "")
    return name or alias.replace("\\", "/").rpartition("/")[2] or "unnamed"


def _build(props: dict[str, Any]) -> str:
    """`b11549-1a2b3c4`; empty for packaged builds, which say `b0-unknown`."""
    build = str(props.get("build_info") or "")
    return "" if build.startswith("b0-") else build


def _warnings(params: dict[str, Any], slots: Any) -> list[str]:
    """What the server was started with that greedy requests do not keep out."""
    found = []
    if isinstance(slots, int) and slots > 1:
        found.append(f"it has {slots} slots; with -np 1 the same request gives the same answer")
    if params.get("ignore_eos"):
        found.append("it was started with --ignore-eos: branches never end by themselves")
    if params.get("logit_bias"):
        found.append("it was started with --logit-bias: its choices are not the model's own")
    if params.get("grammar"):
        found.append("it was started with a grammar: its choices are not the model's own")
    if str(params.get("speculative.types") or "none") != "none":
        found.append("it decodes speculatively, which hides probabilities: start it without")
    return found


async def _bos(http: Http, props: dict[str, Any]) -> tuple[bool | None, int | None, list[str]]:
    """(add_bos, bos_id, warnings), learnt by tokenizing nothing: `/props` does not say."""
    try:
        answer = await http.post("/tokenize", {"content": "", "add_special": True})
        added = [int(token) for token in _dict(answer).get("tokens") or []]
    except EngineRefused as error:
        return None, None, [f"it does not say whether it adds BOS ({error})"]
    if added:
        more = ["its tokenizer adds more than BOS"] if len(added) > 1 else []
        return True, added[0], more
    word = props.get("bos_token")
    if not isinstance(word, str) or not word:
        return False, None, []
    answer = await http.post("/tokenize", {"content": word, "add_special": False})
    ids = _dict(answer).get("tokens") or []
    return False, int(ids[0]) if len(ids) == 1 else None, []


async def _text_id(http: Http) -> int | None:
    """A token whose text is whole characters: the last of those that spell a word."""
    answer = await http.post("/tokenize", {"content": "a", "add_special": False})
    ids = _dict(answer).get("tokens") or []
    return int(ids[-1]) if ids else None


async def _other(http: Http, server: str) -> str:
    """Words for a server that is no llama-server, which calls itself `server`."""
    if server.lower().startswith("llama.cpp"):
        return "this llama-server is too old to say what it is (/props); use a build from 2025"
    seen = await recognise(http)
    if seen.kind is not None:
        return f"this is {seen.name}, not llama-server"
    called = f" (it calls itself {server!r})" if server else ""
    return seen.refusal if seen.name else f"this is no llama-server{called}"
