"""What each refusal is: one line for people."""

from contextlib import contextmanager

import pytest

from treespec.errors import InputError


@contextmanager
def complains(pattern):
    """What runs inside is refused with exit code 2, in one line that holds the pattern."""
    with pytest.raises(InputError, match=pattern) as told:
        yield told
    assert "\n" not in str(told.value)
    assert told.value.exit_code == 2


@contextmanager
def says(*words):
    """What runs inside is refused in one line that holds each of these words as they stand."""
    with complains(".") as told:
        yield
    assert [word for word in words if word not in str(told.value)] == []
