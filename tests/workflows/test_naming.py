"""Ids: unambiguous, within the server's limits, and pinned, since changing one orphans what exists."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workflows.jobs import PARAMETERS
from workflows import naming
from workflows.tasks import User

ALICE = User(tenant="acme", end_user="alice")


def test_ids_are_pinned() -> None:
    assert naming.task_id(ALICE, "explicit:k") == "tcbdplhf2itdg34zpawxpmeundr"
    assert naming.user_hash(ALICE) == "c398e7376c3f85ccdbad2b1653b07992"
    assert naming.artifact_key(ALICE, PARAMETERS, "1")[:16] == "81c01689af540b4f"
    assert naming.derived_seed(ALICE, {"prompt": "x"}) == 1562732908
    assert naming.callback_id("t1") == "callback-t1"
    assert naming.callback_id("t1", 2) == "callback-t1-r2"


def test_a_task_id_is_a_short_opaque_lower_case_word() -> None:
    value = naming.task_id(ALICE, "explicit:k")
    assert len(value) == 27
    assert value.isalnum()
    assert value == value.lower()


@given(st.tuples(*[st.text(max_size=5)] * 3), st.tuples(*[st.text(max_size=5)] * 3))
def test_different_users_or_keys_never_share_a_task_id(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    first, second = (naming.task_id(User(tenant=t, end_user=e), k) for t, e, k in (one, other))
    assert (first == second) == (one == other)


def test_the_next_link_of_a_chain_depends_on_the_ended_task() -> None:
    first = naming.task_id(ALICE, "derived:1")
    second = naming.task_id(ALICE, "derived:1", after=first)
    assert len({first, second, naming.task_id(ALICE, "derived:1", after=second)}) == 3


def test_an_explicit_key_never_meets_a_derived_one() -> None:
    derived = naming.derived_key({"prompt": "x"})
    assert naming.explicit_key(derived.removeprefix("derived:")) != derived
    assert naming.explicit_key(derived) != derived


def test_fairness_keys_stay_under_the_64_bytes_over_which_a_job_hangs() -> None:
    long = User(tenant="t" * 500, end_user="é" * 500)
    assert len(naming.user_hash(long)) == 32
    assert len(naming.endpoint_hash("t" * 500, "https://example.org/" + "x" * 2000)) == 32


@pytest.mark.parametrize(
    "changed", [{"seed": 2}, {"prompt": "a blue circle"}, {"width": 64}, {"image_sha256": "0"}, {"fps": 9.0}]
)
def test_every_generation_parameter_is_in_the_artifact_key(changed: dict[str, object]) -> None:
    other = replace(PARAMETERS, **changed)  # type: ignore[arg-type]
    assert naming.artifact_key(ALICE, PARAMETERS, "1") != naming.artifact_key(ALICE, other, "1")


def test_the_model_revision_and_the_user_are_in_the_artifact_key() -> None:
    keys = {
        naming.artifact_key(ALICE, PARAMETERS, "1"),
        naming.artifact_key(ALICE, PARAMETERS, "2"),
        naming.artifact_key(User(tenant="acme", end_user="bob"), PARAMETERS, "1"),
    }
    assert len(keys) == 3


def test_seeds_fit_every_generator() -> None:
    assert all(0 <= naming.task_seed(f"t{i}") < 2**31 for i in range(100))


@pytest.mark.parametrize(("key", "requeues", "expected"), [(4, 0, 4), (4, 1, 3), (4, 2, 2), (2, 2, 1), (2, 9, 1)])
def test_a_requeue_raises_the_priority_one_level_but_never_above_the_first(
    key: int, requeues: int, expected: int
) -> None:
    assert naming.requeued_priority(key, requeues) == expected


def test_ids_of_batches_and_keys_of_their_items_do_not_change() -> None:
    first = naming.batch_id(ALICE, "explicit:k")
    assert (first, len(first)) == ("bcody64qmce25m5vaptyg7bbwwa", 27)
    assert first[1:] != naming.task_id(ALICE, "explicit:k")[1:]
    assert len({first, second := naming.batch_id(ALICE, "explicit:k", after=first)}) == 2
    assert second.startswith("b")
    assert naming.batch_item_key("broot", 3, "0123456789abcdef") == "batch:broot:3:0123456789abcdef"
    assert naming.batch_item_seed("broot", 3, "0123456789abcdef") == 1407012747
