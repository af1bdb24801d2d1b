"""When a batch is asked for drafts: seldom while drafts bring nothing, in each cycle again once they do."""

from treespec.draft.asking import AskingSchedule


def run_cycles(schedule: AskingSchedule, paths: list[list[int]], cycles: int) -> list[int]:
    """The cycles in which a batch that accepts these paths is asked."""
    asked = []
    for cycle in range(cycles):
        if schedule.begin_cycle():
            asked.append(cycle)
            schedule.learn(paths)
    return asked


def test_the_waits_are_those_of_the_drawing():
    asked = run_cycles(AskingSchedule(accepted=0.08), [[], []], 28)
    assert asked == [0, 1, 2, 10, 18, 26]


def test_a_batch_without_accepted_drafts_is_asked_in_every_eighth_cycle():
    asked = run_cycles(AskingSchedule(), [[]] * 4, 1000)
    assert len(asked) < 1000 / 8 + 20


def test_accepted_drafts_end_the_waiting():
    schedule = AskingSchedule()
    run_cycles(schedule, [[], []], 500)
    (first, *rest) = run_cycles(schedule, [[1, 2], []], 64)
    assert first < 8
    assert rest == list(range(first + 1, 64))
