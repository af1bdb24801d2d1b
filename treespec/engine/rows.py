"""The plan of how requests leave the rows of a batch and enter them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class RowMoves:
    """Which sequence each row of a batch holds once requests have left and entered.

    Of five requests B and D have ended, and F enters:

        row                          0  1  2  3  4
        before                       A  B  C  D  E
        F takes the row of B         A  F  C  D  E     taken_rows [1]
        the last row moves to D's    A  F  C  E        kept_rows [0, 1, 2, 4]
                                                       sequences [0, 5, 2, 4]

    If G and H enter, too, G takes the row of D, no row moves, and H gets a new one:

        F, G take rows               A  F  C  G  E     taken_rows [1, 3]
        H joins                      A  F  C  G  E  H  kept_rows [0, 1, 2, 3, 4]
                                                       sequences [0, 5, 2, 6, 4, 7]

    Attributes:
        taken_rows: The row that each of the first entering sequences takes over, before rows move.
            Each other entering sequence gets a new row behind `kept_rows`.
        kept_rows: For each row that stays, the row whose memory moves there.
        sequences: For each new row, its sequence: the old rows are counted first, then the entering ones.
    """

    taken_rows: list[int]
    kept_rows: list[int]
    sequences: list[int]


def plan_rows(
    row_count: int, staying_rows: Sequence[int], free_rows: Sequence[int], entering: int
) -> RowMoves:
    """Plan the rows so that as few as possible are copied: entering sequences take free rows.

    Args:
        row_count: Rows before.
        staying_rows: Rows whose requests go on, in ascending order.
        free_rows: Rows that may be taken over, in ascending order. Rows that are neither staying nor
            free are only dropped.
        entering: The number of entering sequences.
    """
    # 1. Entering sequences take free rows.
    taken_rows = list(free_rows[:entering])
    used_rows = sorted([*staying_rows, *taken_rows])

    # 2. The last used rows move into the gaps that remain.
    kept_rows = []
    moving_rows = [row for row in used_rows if row >= len(used_rows)]
    for row in range(len(used_rows)):
        if row not in used_rows:
            row = moving_rows.pop()
        kept_rows.append(row)

    # 3. The sequence of each new row.
    sequences = []
    for row in kept_rows:
        if row in taken_rows:
            row = row_count + taken_rows.index(row)
        sequences.append(row)
    joining = range(row_count + len(taken_rows), row_count + entering)
    return RowMoves(taken_rows, kept_rows, [*sequences, *joining])
