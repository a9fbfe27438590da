"""Checkpoints: what they hold, how they are saved and how they are read.

::

    checkpoints/
      latest                      a line of text, the newest one's name (not every Windows user may make symlinks)
      step-00001000/
        manifest.json             what it holds, with size and digest of every file
        NAME.json                 the skeleton of part NAME (see `diloco.state_tree`)
        NAME.safetensors          its tensors

A checkpoint is written beside its place as ``.step-00001000.TOKEN.partial`` and renamed when all of it is on the disk.
Only then does ``latest`` move, and only then do the oldest ones go, renamed to ``....deleted`` first. One that is saved
again steps aside as ``....replaced`` and stands in for its successor until that has its name. Every move is one rename,
so a kill falls before or after it. One process writes to a folder; any number may read.
"""
