"""What acceptance.json holds, part by part."""

from typing import TypedDict

Coordinates = dict[str, str | float]


class Mean(TypedDict):
    """A mean and its standard error; None where one group gives no error."""

    value: float
    error: float | None


class Row(TypedDict):
    """One method at one place, as a rate over all positions.

    at: temperature, draft (its temperature), draws and, for given laws, which law. method: a
    scheme's name, or for α* how its draws are made. optimum: whether the row is α*. drawn: how the
    method's draws are made, where α* of that is known. positions, groups: their numbers; a group is
    a question or text. rate: α or α*; its error is over positions, by group, and at least `noise`:
    the Monte-Carlo error of a rate that no formula states. gap: α* - α of the same draws, with an
    error alike. measured: the share of sampled outputs that were draws; its error is that of
    sampling.
    """

    at: Coordinates
    method: str
    optimum: bool
    drawn: str | None
    positions: int
    groups: int
    rate: Mean
    noise: float | None
    gap: Mean | None
    measured: Mean | None


class AcceptanceResult(TypedDict):
    """The whole file.

    left_out: why each scheme that is missing does not fit. plots: names of the plots; None without
    matplotlib. sweeps: the rows of each sweep.
    """

    config: dict[str, object]
    environment: dict[str, object]
    left_out: dict[str, str]
    plots: list[str] | None
    sweeps: list[list[Row]]
