"""Whom the leader blames when a step does not end."""

from engine.worker.watchdog import Progress, blame, first_late_stage


def _progress(rank: int, *, received: int = 1, collectives: int | None = 5) -> Progress:
    return Progress(rank, sent=1, received=received, num_collectives=collectives)


def test_a_rank_that_has_not_begun_comes_before_all_others() -> None:
    late = [_progress(1), _progress(2, received=0), _progress(3, collectives=None)]
    assert blame(late, 5) == [2]


def test_a_rank_that_does_not_answer_is_to_blame() -> None:
    assert blame([_progress(1), _progress(3, collectives=None)], 5) == [3]


def test_of_ranks_that_wait_for_each_other_the_one_behind_is_to_blame() -> None:
    assert blame([_progress(1), _progress(2, collectives=4), _progress(3)], 5) == [2]
    assert blame([_progress(1), _progress(2)], 3) == [0], "the leader itself"


def test_ranks_that_are_equally_far_are_all_named() -> None:
    assert blame([_progress(2), _progress(1)], 5) == [1, 2]


def test_a_rank_is_late_by_the_time_since_its_last_step_not_since_the_engine_started() -> None:
    progress = Progress(1)
    assert not progress.is_late(1000.0, 30.0), "it has nothing to do"
    progress.give(1, 1000.0)
    assert not progress.is_late(1020.0, 30.0)
    assert progress.is_late(1031.0, 30.0)
    progress.done = 1
    assert not progress.is_late(1031.0, 30.0)


def test_a_stage_is_not_late_while_the_one_before_it_has_not_ended_the_step() -> None:
    before, after = Progress(1), Progress(2)
    for progress in (before, after):
        progress.give(1, 1000.0)
    assert before.is_late(1031.0, 30.0)
    assert not after.is_late(1031.0, 30.0, [before])
    before.done, before.since_s = 1, 1020.0
    assert not after.is_late(1031.0, 30.0, [before]), "it has had the rows for 11 s"
    assert after.is_late(1051.0, 30.0, [before])


def test_of_stages_that_are_late_the_first_is_to_blame() -> None:
    late = [_progress(5, received=0), _progress(2, collectives=4), _progress(3)]
    assert first_late_stage(late, 2) == [late[1], late[2]]
    assert blame(first_late_stage(late, 2), 1, leads=False) == [2], "the leader is of stage 0"
