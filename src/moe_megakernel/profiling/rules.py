"""Which class a kernel or op belongs to, and which part of the MoE layer it is: rules read from JSON, first match wins.

The shipped rules are `rules.json` beside this file; a user's file is put in front of them. `analysis.py` asks once for
every pair of a name and what stands around its launch. docs/profile.md explains how to write rules.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ProfileError

#: Classes of work. Compute, which hides communication, is the first three.
CLASSES = ("gemm", "attention", "other", "communication", "memory")
COMPUTE = ("gemm", "attention", "other")
#: Parts of the MoE layer: `exchange` sends rows without saying which way, `fused` does everything in one kernel, `rest`
#: is inside the layer and nothing of these.
PARTS = ("route", "dispatch", "expert_gemm", "combine", "exchange", "fused", "rest")

_SHIPPED = Path(__file__).with_name("rules.json")
_KEYS = frozenset({"why", "name", "within", "if_class", "class", "moe"})


@dataclass(frozen=True)
class Rule:
    """Conditions, all of which must hold, and what follows from them.

    `name`: searched in the name of the kernel or op. `within`: searched in the names of the ops and ranges around its
    launch (of a CPU op: of itself and those around it). `if_class`: holds for work of that class. `moe` "none" says
    that it is no part of the layer, whatever later rules say.
    """

    name: re.Pattern[str] | None = None
    within: re.Pattern[str] | None = None
    if_class: str | None = None
    work_class: str | None = None
    moe: str | None = None


class Rules:
    """Rules in order. Names are looked at once each; see `classify`."""

    def __init__(self, rules: list[Rule]) -> None:
        self._rules = rules
        self._around = [(1 << i, rule.within) for i, rule in enumerate(rules) if rule.within is not None]
        self._known: dict[tuple[str, int], tuple[str, str | None]] = {}

    def surroundings(self, name: str) -> int:
        """The rules whose `within` the name of an op or range satisfies, as a mask; those of nested ones are or-ed."""
        return sum(bit for bit, within in self._around if within.search(name))

    def classify(self, name: str, around: int = 0) -> tuple[str, str | None]:
        """Class, one of `CLASSES`, and part, one of `PARTS` or None, of work called `name`.

        Each comes from the first matching rule that says something about it: a rule without `class` leaves the class to
        later ones. What no rule gives a class is "other".

        Args:
            name: of the kernel, copy or op.
            around: `surroundings` of everything around its launch, or-ed.
        """
        key = name, around
        if key not in self._known:
            matching = [rule for i, rule in enumerate(self._rules) if _holds(rule, i, name, around)]
            found = next((r.work_class for r in matching if r.work_class and r.if_class is None), "other")
            part = next((r.moe for r in matching if r.moe and r.if_class in (None, found)), None)
            self._known[key] = found, None if part == "none" else part
        return self._known[key]


def load_rules(path: str | Path | None = None) -> Rules:
    """The shipped rules, behind those of `path` if one is given.

    Raises:
        ProfileError: the file is missing, or is not of the form that docs/profile.md describes.
    """
    rules = [] if path is None else _read(Path(path))
    return Rules(rules + _read(_SHIPPED))


def _holds(rule: Rule, index: int, name: str, around: int) -> bool:
    if rule.within is not None and not around >> index & 1:
        return False
    return rule.name is None or rule.name.search(name) is not None


def _read(path: Path) -> list[Rule]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(path, "a file of rules", error.strerror or error, exit_code=2) from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(path, "rules as JSON", error, exit_code=2) from None
    if not isinstance(document, dict) or not isinstance(document.get("rules"), list):
        raise ProfileError(path, 'an object with a list "rules"', type(document).__name__, exit_code=2)
    return [_rule(f"{path}: rule {i}", entry) for i, entry in enumerate(document["rules"])]


def _rule(where: str, entry: Any) -> Rule:
    def wrong(expected: str, got: object) -> ProfileError:
        return ProfileError(where, expected, got, exit_code=2)

    if not isinstance(entry, dict) or not all(isinstance(one, str) for one in entry.values()):
        raise wrong("an object of strings", json.dumps(entry))
    if unknown := sorted(set(entry) - _KEYS):
        raise wrong(f"keys out of {', '.join(sorted(_KEYS))}", unknown[0])
    if not ("class" in entry or "moe" in entry):
        raise wrong("class or moe", ", ".join(entry) or "nothing")
    if "class" in entry and "if_class" in entry:
        raise wrong("class or if_class", "both")
    for key, allowed in (("class", CLASSES), ("if_class", CLASSES), ("moe", (*PARTS, "none"))):
        if key in entry and entry[key] not in allowed:
            raise wrong(f"{key} out of {', '.join(allowed)}", repr(entry[key]))
    patterns = {}
    for key in ("name", "within"):
        try:
            patterns[key] = re.compile(entry[key], re.IGNORECASE) if key in entry else None
        except re.error as error:
            raise wrong(f"a regular expression as {key}", f"{entry[key]!r}: {error}") from None
    return Rule(patterns["name"], patterns["within"], entry.get("if_class"), entry.get("class"), entry.get("moe"))
