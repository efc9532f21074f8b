"""The transition table, walked exhaustively."""

from itertools import product

import pytest

from workflows.states import ENDED, OPEN, TRANSITIONS, IllegalTransitionError, TaskStatus, move

C, Q, P = TaskStatus.CREATED, TaskStatus.QUEUED, TaskStatus.PROCESSING
S, F, T, X = TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.TIMEOUT, TaskStatus.CANCELED

LEGAL = {(C, Q), (C, X), (Q, P), (Q, S), (Q, F), (Q, T), (Q, X), (P, Q), (P, S), (P, F), (P, T), (P, X), (X, P)}


@pytest.mark.parametrize(("source", "target"), list(product(TaskStatus, TaskStatus)))
def test_exactly_the_legal_moves_are_allowed(source: TaskStatus, target: TaskStatus) -> None:
    if (source, target) in LEGAL:
        assert move(source, target) is target
    else:
        with pytest.raises(IllegalTransitionError, match=f"{source} -> {target}"):
            move(source, target)


def test_every_state_is_in_the_table_and_either_open_or_ended() -> None:
    assert set(TRANSITIONS) == set(TaskStatus)
    assert set(TaskStatus) == OPEN | ENDED
    assert not OPEN & ENDED


def test_an_ended_state_is_final_but_for_the_revive() -> None:
    assert {s: TRANSITIONS[s] for s in ENDED} == {S: set(), F: set(), T: set(), X: {P}}
