"""Traits of a setting, which stand in its annotation: ``device: Annotated[str, Trait.NO_PLACE]``.

Those of a section, such as ``monitor``, hold for all of its settings.
"""

from enum import Enum, auto


class Trait(Enum):
    """What can be said of a setting, or of an option of a command, beside its type and range."""

    NO_PLACE = auto()
    """It is text or a path, but names nothing that a run reads, writes or listens at. All other texts and paths do, so
    that a folder or bucket of somebody else can't choose them unseen."""
    MAY_BE_EMPTY = auto()
    """An empty text has a meaning."""
    OF_CALL = auto()
    """It belongs to one call of the command, and ``config.toml`` leaves it out."""
    OF_PROCESS = auto()
    """It identifies one process of a run: neither ``config.toml`` nor a command for another machine repeats it."""
    OF_MACHINE = auto()
    """It is about one machine and its owner: no command for another machine repeats it, and no service elsewhere gets
    it."""
    CHANGEABLE = auto()
    """It may change when a run resumes, because it changes nothing that a step of a replica computes."""
