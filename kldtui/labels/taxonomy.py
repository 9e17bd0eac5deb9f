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
        "It strays for some tokens, then comes to the same end.",
    ),
    LabelClass(
        "2",
        "changes_meaning",
        "changes meaning",
        "It says or does something else, and is wrong.",
    ),
    LabelClass(
        "3",
        "malformed_tool_call",
        "malformed tool call",
        "Its call does not parse or fit its schema.",
    ),
    LabelClass(
        "4",
        "both_fail",
        "both fail",
        "Both branches are wrong: the quant is not at fault.",
    ),
    LabelClass(
        "5",
        "same_meaning",
        "other wording, same meaning",
        "A reader would act the same on both.",
    ),
    LabelClass(
        "6",
        "quant_better",
        "quant better",
        "It is right where the reference is worse.",
    ),
    LabelClass(
        "7",
        "unsure",
        "unsure",
        "Not to be decided from these two branches.",
    ),
)

BY_ID: dict[str, LabelClass] = {entry.id: entry for entry in TAXONOMY}
BY_KEY: dict[str, LabelClass] = {entry.key: entry for entry in TAXONOMY}
