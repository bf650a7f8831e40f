"""The rows that keep the agreement: its own, the token that each rule's carries, and the opinion
that each dispenser's states.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import datetime
from typing import Any

from callqueue import database, tables
from callqueue.limits.agreements import Agreement
from callqueue.limits.opinions import Opinion

# The RuleState rows that are no rule's, since no rule has these names: the one about all rules, the
# one in which the clock's jumps are written down (`passes`: how many, `served`: their sum), and the
# one of the attempts that are still to be moved along (`memo`: by rule).
ALL, FRAME, MOVING = "", "\njumps", "\nmoving"
OF_NO_RULE = (ALL, FRAME, MOVING)


def locked(using: str) -> Agreement:
    """The agreement, locked until the transaction ends: nobody changes it, or stamps rows."""
    states = tables.rule_states(using).filter(rule=ALL)
    found = database.locked(states, wait=True).values_list("agreement", "memo", "rates").first()
    if found is None:
        tables.rule_states(using).bulk_create([tables.RuleState(rule=ALL)], ignore_conflicts=True)
        found = database.locked(states, wait=True).values_list("agreement", "memo", "rates").get()
    return Agreement.of(found[0], found[1] or {}, found[2] or {})


def read(using: str) -> Agreement:
    found = (
        tables.rule_states(using).filter(rule=ALL).values_list("agreement", "memo", "rates").first()
    )
    return Agreement.of(found[0], found[1] or {}, found[2] or {}) if found else Agreement()


def token(using: str) -> str:
    return (
        tables.rule_states(using).filter(rule=ALL).values_list("agreement", flat=True).first() or ""
    )


def renew(using: str, before: Agreement, after: Agreement) -> Agreement:
    """Write the agreement if it changed, with a new token if more is in force; as it is."""
    if after == before:
        return before
    token = before.token if before.token and after.says_the_same(before) else secrets.token_hex(8)
    after = replace(after, token=token)
    tables.rule_states(using).filter(rule=ALL).update(
        agreement=token, memo=after.as_memo(), rates=dict(after.rates)
    )
    return after


def behind(using: str, token: str) -> Any:
    """The rows of rules whose passes may go by another agreement."""
    return tables.rule_states(using).exclude(rule__in=OF_NO_RULE).exclude(agreement=token)


def stamp(using: str, token: str) -> bool:
    """Give the token to rows that no pass holds; whether all have it. Lock the agreement first."""
    rows = behind(using, token)
    lacking = set(rows.values_list("rule", flat=True))
    if not lacking:
        return True
    free = set(database.locked(rows.order_by("rule")).values_list("rule", flat=True))
    tables.rule_states(using).filter(rule__in=free).update(agreement=token)
    return lacking <= free


def ensure_states(using: str, rules: set[str], token: str) -> None:
    """Make the row of every rule that has none yet. The agreement must be locked."""
    states = tables.rule_states(using)
    missing = rules - set(states.filter(rule__in=rules).values_list("rule", flat=True))
    states.bulk_create(
        [tables.RuleState(rule=rule, agreement=token) for rule in sorted(missing)],
        ignore_conflicts=True,
    )


def signs(using: str) -> list[tuple[str, str, datetime]]:
    """Of each dispenser with an opinion: its name, the opinion's digest, its last sign of life."""
    return list(
        tables.dispensers(using).exclude(digest="").values_list("name", "digest", "seen_at")
    )


def opinions(using: str, digests: Any) -> dict[str, Opinion]:
    """The opinions by their digests. No statement where none is asked for."""
    if not digests:
        return {}
    stated = tables.dispensers(using).filter(digest__in=list(digests))
    names: dict[str, str] = {digest: name for name, digest in stated.values_list("name", "digest")}
    found = stated.filter(pk__in=names.values()).values_list("digest", "opinion")
    return {digest: opinion for digest, opinion in found if opinion is not None}
