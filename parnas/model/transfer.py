"""Copies from the CPU to a GPU that do not wait for it: each wait leaves the GPU without work until the CPU goes on."""

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on a device; a copy from the CPU to a GPU is queued behind the work that the GPU has."""
    if device.type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)  # the CPU must wait for what a GPU writes
    return tensor.pin_memory().to(device, non_blocking=True)  # a GPU reads pinned memory by itself
