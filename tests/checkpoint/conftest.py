"""Fixtures that several test files of training use."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a loss of power would show the difference; what is asked of the disk, and when, has a test of its own."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
