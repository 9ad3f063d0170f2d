"""What a setting may be, refused in one sentence otherwise; a NaN is in no range."""

from __future__ import annotations


def positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}={value} must be positive")


def not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name}={value} must not be negative")


def share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must lie between 0 and 1")


def clip_width(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name}={value} is how far the ratio may go from 1: set it to 0 or more")
