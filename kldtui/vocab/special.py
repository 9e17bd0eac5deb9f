"""Which tokens end a generation, by their text.

Knows: the names that llama.cpp goes by.
Must not know: files, ids of any one model.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
        "<｜end▁of▁sentence｜>", "[e~[",
        # the padding and separators of fill-in-the-middle
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
"""llama.cpp, src/llama-vocab.cpp, `special_eog_ids`: it has no other way to know them all."""


def ends_by_text(id_of: Mapping[str, int]) -> set[int]:
    """The ids whose text llama.cpp takes for an end of generation (its exceptions included).

    `id_of` maps text to id. Where several names of one fill-in-the-middle token occur, llama.cpp
    takes one of them at random; here all count.
    """
    ends = _ENDS.intersection(id_of)
    if {"<|return|>", "<|call|>"} <= ends or (
        "<|flush|>" in ends and ends & {"<|call|>", "<|calls|>"}
    ):
        ends -= {"<|end|>"}
    if "<|tool_response>" in ends:
        ends -= {"</s>"}
    return {id_of[text] for text in ends}
