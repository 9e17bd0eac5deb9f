"""The classes a person can give a root.

Knows: keys, ids, names and one-line definitions.
Must not know: files, the screen, hints.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LabelClass:
    """One class: the key that gives it, its id in files, its name and definition on screen."""

    key: str
    id: str
    name: str
    definition: str

    def to_json(self) -> dict[str, str]:
        return {
            "key": self.key,
            "id": self.id,
            "name": self.name,
            "definition": self.definition,
        }


TAXONOMY: tuple[LabelClass, ...] = (
    LabelClass(
        "1",
        "recovers",
        "recovers",
        "The quant strays for some tokens, then comes to the same outcome.",
    ),
    LabelClass(
        "2",
        "changes_meaning",
        "changes meaning",
        "The quant's branch says or does something else, and the reference's was right.",
    ),
    LabelClass(
        "3",
        "malformed_tool_call",
        "malformed tool call",
        "The quant's branch holds a tool call that does not parse or does not fit its schema.",
    ),
    LabelClass(
        "4",
        "both_fail",
        "both fail",
        "Both branches are wrong: prompt, template or model is at fault, not the quant.",
    ),
    LabelClass(
        "5",
        "same_meaning",
        "other wording, same meaning",
        "The branches differ in wording only; a reader would act the same on both.",
    ),
    LabelClass(
        "6",
        "quant_better",
        "quant better",
        "The quant's branch is right where the reference's is wrong or worse.",
    ),
    LabelClass(
        "7",
        "unsure",
        "unsure",
        "Looked at, and not to be decided from these two branches.",
    ),
)

BY_ID: dict[str, LabelClass] = {entry.id: entry for entry in TAXONOMY}
BY_KEY: dict[str, LabelClass] = {entry.key: entry for entry in TAXONOMY}
CLEAR_KEY = "0"
