"""What the commands share: reading arguments, and naming things in tables."""

from __future__ import annotations

import argparse

import torch


def chosen_device(wish: str) -> str:
    """`auto` is CUDA if there is a device."""
    if wish == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wish


def device_name(device: torch.device) -> str:
    """For tables: the name of a GPU, with its index."""
    return f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else str(device)


def wrapped(head: str, items: list[str], width: int, limit: int = 100) -> list[str]:
    """Items behind a head of this width, in lines of at most `limit` characters."""
    lines = [head]
    for item in items:
        if len(lines[-1]) > width and len(lines[-1]) + len(item) + 2 > limit:
            lines.append(" " * width)
        lines[-1] += (", " if len(lines[-1]) > width else "") + item
    return lines


def positive(text: str) -> int:
    """An argument that is 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value
