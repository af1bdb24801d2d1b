"""Checks of what the kernels are given: C reads memory where Python says that it is, so Python must be right."""

from collections.abc import Container, Sequence

import torch
from torch import Tensor


class KernelInputError(ValueError):
    """A tensor does not fit the kernel that it was given to."""


def check_dense(
    tensor: Tensor, name: str, dtypes: Container[torch.dtype], shape: Sequence[int]
) -> None:
    """Raises KernelInputError unless a tensor is contiguous, on the CPU, of one of the dtypes and of this shape.

    name: of the parameter, for the error.
    """
    if (
        tensor.shape != shape
        or tensor.dtype not in dtypes
        or not tensor.is_cpu
        or not tensor.is_contiguous()
    ):
        refuse(tensor, name, f"contiguous on the CPU, of shape {tuple(shape)}, one of {dtypes}")


def check_rows(tensor: Tensor, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """As `check_dense`, of a tensor of one dtype whose numbers lie together only along the last dimension."""
    if (
        tensor.shape != shape
        or tensor.dtype != dtype
        or not tensor.is_cpu
        or tensor.stride(-1) != 1
    ):
        refuse(tensor, name, f"on the CPU, of shape {tuple(shape)} and {dtype}, with dense rows")


def refuse(tensor: Tensor, name: str, wanted: str) -> None:
    """Raises KernelInputError. wanted: what the kernel takes."""
    order = "contiguous"
    if not tensor.is_contiguous():
        order = f"strides {tensor.stride()}"
    raise KernelInputError(
        f"{name} has shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}, {order}; "
        f"the kernel takes it {wanted}"
    )
