"""The servers that the live tests stand on, and that `kldtui demo` starts."""

from __future__ import annotations

import httpx

REQUEST = {"prompt": [504, 3575, 282, 4649, 314], "n_predict": 2, "temperature": 0, "top_k": 1}


def test_both_models_answer_ids_and_are_told_apart(ref_server: str, quant_server: str) -> None:
    answers = []
    for url in (ref_server, quant_server):
        body = REQUEST | {"return_tokens": True, "n_probs": 2, "cache_prompt": False}
        answer = httpx.post(url + "/completion", json=body, timeout=60).raise_for_status().json()
        assert len(answer["tokens"]) == 2
        answers.append(answer["completion_probabilities"][0]["logprob"])
    assert answers[0] != answers[1]


def test_the_requantization_keeps_the_model_apart_from_its_weights(
    ref_server: str, quant_server: str
) -> None:
    ref, quant = (
        httpx.get(url + "/v1/models", timeout=60).json()["data"][0]["meta"]
        for url in (ref_server, quant_server)
    )
    assert ref["n_params"] == quant["n_params"]
    assert ref["n_vocab"] == quant["n_vocab"]
    assert (ref["ftype"], quant["ftype"]) == ("Q4_1", "Q5_0")
